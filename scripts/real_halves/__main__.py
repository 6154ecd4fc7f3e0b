"""A vision-language model of trained halves, made, trained, evaluated: `python -m scripts.real_halves COMMAND FOLDER`.

FOLDER takes everything that is written. `make` needs the weights, and photographs or `--screens`, see `--help`. On
photographs, training costs an hour and a half of one CPU thread, evaluating two, tuning two; on screens, training and
evaluating cost ten minutes each. A stopped command goes on where it was, and several processes may evaluate or tune
together. `torchrun --nproc_per_node 2 -m scripts.real_halves train FOLDER` trains in two processes.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from transformers import LlavaForConditionalGeneration

from scripts.doc_tables import markdown
from scripts.real_halves import compare, learn, on_screens, photographs, screens
from scripts.real_halves.evaluate import evaluate, loaded
from scripts.real_halves.features import features_of
from scripts.real_halves.model import create
from scripts.real_halves.questions import held_out_in, things_in
from scripts.real_halves.tune import ADAPTED, journal_of, tune, tuned_table

_ON_PHOTOGRAPHS = learn.Schedule(
    start=1500, stages=(learn.Stage(2, 1920, 1e-3), learn.Stage(1, 4000, 7e-4), learn.Stage(1, 3200, 7e-4))
)
_ON_SCREENS = learn.Schedule(
    start=600,
    stages=(
        learn.Stage(2, 720, 1e-3, batch=8),
        learn.Stage(2, 480, 1e-3, batch=4),
        learn.Stage(2, 240, 7e-4, batch=4),
        learn.Stage(1, 120, 7e-4, batch=4),
    ),
)


def make(folder: Path, tower: Path, language: Path, source: Path | None) -> None:
    """Write the untrained model, and pictures and questions.

    Args:
        folder: Takes them.
        tower: Weights of the tower.
        language: Folder of the language model.
        source: Folder of photographs; None draws screens and pages.
    """
    model, processor = create(tower, language, screens.PATCHES if source is None else photographs.PATCHES)
    model.save_pretrained(folder / "untrained")
    processor.save_pretrained(folder / "untrained")
    if source is None:
        screens.write_questions(folder / "questions")
    else:
        photographs.write_questions(source, folder / "questions")


def train(folder: Path) -> None:
    """Train projector and adapters, and save the model with merged adapters."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, processor = loaded(folder / "untrained")
    held_out = held_out_in(folder / "questions")
    schedule = _ON_SCREENS if screens.are_in(folder / "questions") else _ON_PHOTOGRAPHS
    chats = {name: learn.Chats(folder / f"questions/{name}.json", processor.tokenizer) for name in ["train", *held_out]}
    features = {
        name: features_of(model, processor, asked.pictures, folder / f"features/{name}")
        for name, asked in chats.items()
    }
    model.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(True)
    if not (folder / "training/training.pt").exists():
        things = things_in(folder / "questions")
        seen = learn.seen_in(features["train"], chats["train"].pictures, things)
        names = [thing.name for thing in things]
        learn.start_projector(model, processor.tokenizer, features["train"], seen, names, schedule.start)
    language = model.model.language_model
    inject_adapter_in_model(LoraConfig(r=16, lora_alpha=32, target_modules=ADAPTED), language)
    for name, weight in language.named_parameters():
        weight.requires_grad_("lora" in name)
        # Products run in half precision; the embeddings stay exact, as images join them.
        if name.endswith("base_layer.weight"):
            weight.data = weight.data.bfloat16()
    evaluated = {name: (chats[name], features[name]) for name in held_out}
    learn.Training(model, chats["train"], features["train"], folder / "training", evaluated).run(schedule.stages)
    if not dist.is_initialized() or dist.get_rank() == 0:
        save(model, folder)


def save(trained: LlavaForConditionalGeneration, folder: Path) -> None:
    """Write the model in single precision, adapters merged into the weights that they adapt."""
    model, processor = loaded(folder / "untrained")
    model.model.multi_modal_projector.load_state_dict(trained.model.multi_modal_projector.state_dict())
    weights = dict(model.model.language_model.named_modules())
    with torch.no_grad():
        for name, module in trained.model.language_model.named_modules():
            if hasattr(module, "get_delta_weight"):
                weights[name].weight += module.get_delta_weight("default")
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")


def write_tables(folder: Path, patches: int) -> None:
    """Write and print the tables of what was evaluated, and of what was tuned if something was."""
    of_screens = screens.are_in(folder / "questions")
    tables = {"evaluated": on_screens.table(folder, patches) if of_screens else compare.table(folder, patches)}
    if journal_of(folder, patches).exists():
        tables["tuned"] = tuned_table(folder, patches)
    for name, table in tables.items():
        (folder / f"{name}-{patches}.json").write_text(json.dumps(table, indent=1))
        print(markdown(table))


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.real_halves", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="write the untrained model, pictures and questions")
    making.add_argument("folder", type=Path)
    making.add_argument("--tower", type=Path, required=True, help="weights of timm's vit_small_patch14_dinov2")
    making.add_argument("--language", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    pictures = making.add_mutually_exclusive_group(required=True)
    pictures.add_argument("--photographs", type=Path, help="folder of Caltech-101 with its lists")
    pictures.add_argument("--screens", action="store_true", help="draw screens and pages with large type")
    training = commands.add_parser("train", help="train it")
    training.add_argument("folder", type=Path)
    evaluating = commands.add_parser("evaluate", help="answer the questions with every way to spend less")
    evaluating.add_argument("folder", type=Path)
    evaluating.add_argument("--patches", type=int, default=10, help="side of the images in patches")
    evaluating.add_argument("--limit", type=int, default=500, help="questions of each file")
    evaluating.add_argument("--rows", nargs="*", help="names of rows; all by default")
    evaluating.add_argument("--no-plans", action="store_true", help="leave out the plans that are searched")
    tables = commands.add_parser("table", help="write the tables of what was evaluated and tuned, with times")
    tables.add_argument("folder", type=Path)
    tables.add_argument("--patches", type=int, default=10, help="side of the images in patches")
    tuning = commands.add_parser("tune", help="fine-tune it by several ways to spend less")
    tuning.add_argument("folder", type=Path)
    tuning.add_argument("--patches", type=int, default=10, help="side of the images in patches")
    tuning.add_argument("--limit", type=int, default=500, help="questions of each file")
    tuning.add_argument("--seeds", type=int, default=3)
    tuning.add_argument("--rows", nargs="*", help="names of rows; all by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "make":
        make(options.folder, options.tower, options.language, options.photographs)
    elif options.command == "train":
        train(options.folder)
    elif options.command == "table":
        write_tables(options.folder, options.patches)
    elif options.command == "tune":
        tune(options.folder, options.patches, options.seeds, options.limit, options.rows)
    else:
        if screens.are_in(options.folder / "questions"):
            rows = on_screens.rows(options.folder, options.patches)
        else:
            rows = compare.rows(options.folder, options.patches, not options.no_plans)
        chosen = {name: rows[name] for name in options.rows or rows}
        journal = options.folder / f"answers-{options.patches}.jsonl"
        evaluate(
            options.folder / "model", options.folder / "questions", chosen, journal, options.patches, options.limit
        )


if __name__ == "__main__":
    main()
