"""Find out what the routers of a trained model learned: `python tools/audit.py CONFIG_OR_RUN [--key value]`.

`python tools/audit.py runs/tradeoff/digits/seed0/mod-0.25` audits the model of a run; its keys, and those of
`tools/train.py`, may be set differently (`--audit.draws 10 --output FOLDER`). JSON, Markdown and pictures go to the
folder `audit` in the run's.
"""

import sys

from mmod.cli import run

if __name__ == "__main__":
    run("audit CONFIG_OR_RUN", sys.argv[1:])
