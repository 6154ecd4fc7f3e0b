"""Find out what the routers of a trained model learned: `python tools/audit.py CONFIG_OR_RUN [--key value]`.

`python tools/audit.py runs/tradeoff/digits/seed0/mod-0.25` audits the model of a run; its keys, and those of
`tools/train.py`, may be set differently (`--audit.draws 10 --output FOLDER`). JSON, Markdown and pictures go to the
folder `audit` in the run's.
"""

import sys

from mmod.training.audits.command import main
from mmod.training.engine.command import one_line_errors

if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
