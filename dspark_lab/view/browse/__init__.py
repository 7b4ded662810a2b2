"""The timeline to zoom in: `scene` (rows of traces on one clock), `detail` (what of them can be seen), `pick` (what a click says), `canvas` (the widget), `still`."""
