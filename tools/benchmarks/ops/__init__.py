"""Benchmark of single ops against their bounds and other implementations."""
