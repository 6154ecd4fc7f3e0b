"""Audits: counterfactual tests of a routed model's decisions, and how decisions of blocks depend on each other."""
