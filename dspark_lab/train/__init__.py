"""Training of drafters and of the small targets that ship."""
