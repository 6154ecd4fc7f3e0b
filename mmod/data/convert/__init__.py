"""Conversion of data sets of others to what the readers of mmod take: ImageNet, image-text pairs, conversations."""
