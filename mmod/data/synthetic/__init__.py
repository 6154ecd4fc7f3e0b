"""Data sets that are drawn: digits among clutter, crowds of them, captions of them, questions about them."""
