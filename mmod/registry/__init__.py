"""Routed models in the registries of host libraries; a program imports the one it needs."""
