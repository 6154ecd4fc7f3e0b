"""Draw the accuracy/FLOPs/latency trade-off: `python tools/tradeoff.py CONFIG [--key value]`.

`python tools/tradeoff.py configs/tradeoff/digits.yaml --seeds 5` repeats the study for five seeds, draws error bars and
says which models they tell apart; `--processes 2` does two runs side by side, each in a process of one thread; `--help`
lists every key. A config with `kind: pairs` is a study of image-text models, of retrieval and zero-shot
accuracy, one with `kind: conversations` of vision-language models, of answers by kind of question, prefill, decoding
and cache. Started again, the same command goes on where it was interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from jsonargparse import ArgumentParser

from mmod.io.yaml import STRICT, read_yaml
from mmod.training.engine.command import one_line_errors
from mmod.training.engine.optional_dependency import extra
from mmod.training.engine.parse import make_config
from mmod.training.studies.image import TradeoffConfig, run_tradeoff


def main(arguments: list[str]) -> None:
    """Run the study that the command line names, print its table and say where the pictures are."""
    kind, run = choose(arguments)
    parser = ArgumentParser(
        usage="%(prog)s CONFIG [--key value]",
        description="Draw the accuracy/FLOPs/latency trade-off.",
        allow_abbrev=False,
        parser_mode=STRICT,
    )
    parser.add_argument("--config", action="config", help="The config file; its place is the first argument.")
    parser.add_class_arguments(kind)
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--config", *arguments]
    options = parser.parse_args(arguments)
    options.pop("config", None)
    result = run(make_config(parser, kind, options.as_dict()))
    used = sum(os.times()[:4])
    print(f"\n{result.table()}\n\nTable and pictures: {result.folder}\nCPU time of all processes: {used:.0f} seconds")


def choose(arguments: list[str]) -> tuple[type, Callable[..., Any]]:
    """Return the config and the study that the config file asks for."""
    given = arguments[0] if arguments and not arguments[0].startswith("-") else None
    asked = None if given is None else read_yaml(given).get("kind")
    if asked == "pairs":
        with extra("clip"):
            from mmod.training.studies.pairs import ClipTradeoffConfig, run_clip_tradeoff

        return ClipTradeoffConfig, run_clip_tradeoff
    if asked == "conversations":
        with extra("vlm"):
            from mmod.training.studies.chat import VlmTradeoffConfig, run_vlm_tradeoff

        return VlmTradeoffConfig, run_vlm_tradeoff
    return TradeoffConfig, run_tradeoff


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
