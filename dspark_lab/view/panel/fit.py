"""How wide the panel's right column is, told by the browser, so that figures fill it: a plot drawn before it is on the page cannot know."""

from __future__ import annotations

from typing import Any

import ipywidgets as W

ESM = """
export default {
  render({ model, el }) {
    el.style.width = "100%";
    el.style.height = "0px";
    const seen = new ResizeObserver((entries) => {
      const width = Math.floor(entries[0].contentRect.width);
      if (width > 200 && Math.abs(width - model.get("width")) > 3) {
        model.set("width", width);
        model.save_changes();
      }
    });
    seen.observe(el);
    return () => seen.disconnect();
  },
};
"""


def fit() -> Any:
    """An invisible widget with ``width`` in pixels (0 until shown); a plain box where anywidget is missing."""
    try:
        import anywidget
        import traitlets
    except ImportError:
        return W.Box(layout=W.Layout(display="none"))

    class Fit(anywidget.AnyWidget):
        _esm = ESM
        width = traitlets.Int(0).tag(sync=True)

    return Fit()
