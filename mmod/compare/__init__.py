"""Comparisons of models: what is measured of each candidate is a table, and each figure is a function of it."""
