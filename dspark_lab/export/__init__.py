"""What leaves the lab for other viewers. No torch, no plotly."""
