"""The tabs of the panel, a module each. A tab has a ``name``, a ``widget``, ``draw(shown)``, ``figure`` (what is in front) and ``code`` (Python that makes it, "" where
the panel knows it), and ``fill(width)``."""
