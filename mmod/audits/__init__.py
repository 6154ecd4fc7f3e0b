"""Audits of trained models of every kind: what their routers learned.

`config.py` holds the options, `subjects.py` says of each kind on which set its model is judged and what samples and
tokens are sorted by, and `command.py` runs the audit and writes the results. The recipe of the kind makes, judges and
counts the model.
"""
