"""Training of causal language models on text, byte by byte."""
