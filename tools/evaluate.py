"""Evaluate a model as it is: `python tools/evaluate.py CONFIG_OR_RUN [--key value]`.

`python tools/evaluate.py RUN` says what the final model of a run scores and costs; `--routing '{preset: a-mod, blocks:
late}'` routes it first. The keys are those of the training of its kind: image, pairs, chat or text.
"""

import sys

from mmod.cli import run

if __name__ == "__main__":
    run("evaluate CONFIG_OR_RUN", sys.argv[1:])
