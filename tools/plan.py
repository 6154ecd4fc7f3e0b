"""Search which tokens may miss which operator in which block: `python tools/plan.py CONFIG_OR_RUN [--key value]`.

CONFIG is that of a training of any kind (image, pairs, chat or text), and nothing is trained; RUN is the folder of a
dense run. `--model.checkpoint FOLDER` names the dense model, `--plan.budget 0.5` the share of its FLOPs, and `--help`
lists every key. Scores, the plan and a picture go to the folder `plan` in the run's. The same command resumes an
interrupted search; another budget needs no further passes.
"""

import sys

from mmod.cli import run

if __name__ == "__main__":
    run("plan CONFIG_OR_RUN", sys.argv[1:])
