"""Synthetic data sets of handwritten digits: classification, dense labels, captions, questions."""
