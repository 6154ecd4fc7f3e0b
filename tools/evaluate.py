"""Evaluate a model as it is: `python tools/evaluate.py CONFIG [--key value] [--group.key value]`.

`python tools/evaluate.py configs/digits/dense.yaml --model.checkpoint RUN` says what a run's model scores and costs;
`--routing '{preset: a-mod, blocks: late}'` routes it first. The keys are those of the training
of its kind: image, pairs, chat or text.
"""

import sys

from mmod.studies.assess import main
from mmod.training.engine.command import one_line_errors

if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
