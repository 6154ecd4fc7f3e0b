"""Draw the trade-off between accuracy, FLOPs and latency: `python tools/tradeoff.py CONFIG [--key value]`.

`python tools/tradeoff.py configs/tradeoff/digits.yaml --seeds 5` repeats the study for five seeds, draws error bars and
says which models they tell apart; `--processes 2` does two runs side by side, each in a process of one thread; `--help`
lists every key. A config with `kind: pairs` is a study of image-text models, of retrieval and zero-shot
accuracy, one with `kind: chat` of vision-language models, of answers by kind of question, prefill, decoding
and cache. Started again, the same command goes on where it was interrupted.
"""

import sys

from mmod.cli import run

if __name__ == "__main__":
    run("tradeoff CONFIG", sys.argv[1:])
