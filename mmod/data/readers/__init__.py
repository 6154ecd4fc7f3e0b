"""Readers of shards, image folders, image-text pairs and conversations."""
