"""Audits of trained models of every kind: what their routers learned.

`config.py` holds the options, `subjects.py` the evaluation set of every kind with the labels of samples and tokens, and
`command.py` runs the audit and writes the results. The recipe of the kind makes, judges and counts the model.
"""
