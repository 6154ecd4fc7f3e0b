"""Benchmark of whole routed models against dense ones and free routing."""
