"""Benchmarks of ops, routed models, generation and drafts; the output of every timed path was checked first."""
