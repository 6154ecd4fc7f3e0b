"""Comparisons of models: studies, evaluations, plan searches, advice and audits of runs."""
