"""Figures and the panel. The only place that imports plotly or ipywidgets; nothing here computes what others should."""
