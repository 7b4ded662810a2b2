"""The panel: `shell` puts it together; `board` and `toggles` are the left side, `tabs` the right one, `frame` the rest."""

from dspark_lab.view.panel.shell import Panel, panel

__all__ = ["Panel", "panel"]
