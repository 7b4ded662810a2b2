"""The tabs of the panel, a module each. A tab has a ``name``, a ``widget``, ``draw(shown)``, ``figure`` (what is in front) and ``fill(width)``; for "copy as Python"
``code`` (the line that draws it, ``{arms}`` where the runs go; "": the tab's usual one), or ``script`` (all lines) where it does not draw the runs shown."""
