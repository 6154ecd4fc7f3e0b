"""Evaluate a model as it is: `python tools/evaluate.py CONFIG_OR_RUN [--key value]`.

`python tools/evaluate.py RUN` says what the final model of a run scores and costs; `--routing '{preset: a-mod, blocks:
late}'` routes it first. The keys are those of the training of its kind: image, pairs, chat or text.
"""

import sys

from mmod.studies.assess import main
from mmod.training.engine.command import one_line_errors

if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
