"""Conversion of data sets of others to what the readers of mmod take: image-text pairs, conversations."""
