"""Data sets that are drawn: digits among clutter, captions of them, questions about them."""
