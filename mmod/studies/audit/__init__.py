"""Audits of trained models of every kind: what their routers learned."""
