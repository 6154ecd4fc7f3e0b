"""Benchmark of prefill, decoding and training of language models."""
