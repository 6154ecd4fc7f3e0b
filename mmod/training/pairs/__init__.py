"""Training of image-text models."""
