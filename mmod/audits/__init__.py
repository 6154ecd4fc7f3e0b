"""Audits of trained models: what their routers learned, by one command for each kind of training.

`config.py` holds the options, `image.py`, `pairs.py`, `chat.py` and `text.py` say of each kind which model is judged by
what, and `command.py` runs the audit and writes what was found.
"""
