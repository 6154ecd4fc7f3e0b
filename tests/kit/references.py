"""The smallest run of each kind and of each comparison, as plain numbers: what must stay equal when code moves.

`python -m tests.kit.references` writes them to `tests/references.json`; `--check` compares them bitwise instead. Both
run commands of `mmod` alone, so that they know no class of the package.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import timm
import torch
import transformers
import yaml
from safetensors.torch import save_file

from mmod import cli
from mmod.training.chat.processor import create_word_processor
from tests.kit.chat_configs import MASKED, TRAINER, VISION
from tests.kit.chat_configs import TEXT as TEXT_MODEL
from tests.kit.folders import save_image_model
from tests.kit.pair_files import png
from tests.kit.pairs_worker import MODEL as CLIP
from tests.kit.pairs_worker import write_model
from tests.kit.prompts import make_prompts
from tests.kit.sets import SETS
from tests.kit.text_configs import LLAMA, PREDICTOR

EXPECTED = Path(__file__).parents[1] / "references.json"
# Measured on a machine, or told of it: no value that another run repeats.
_MEASURED = re.compile(
    r"(^|[/_])(ms|milliseconds|latency|speedup|seconds|peak|decode|prefill_ms|prefill_speedup|before_ms|cores|threads)"
)
_NOT_RESULTS = {
    "config",
    "summary",
    "code",
    "title",
    "command",
    "torch",
    "recommended",
    "on_front",
    "to_baseline",
    "baseline",
}
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")
_ONE_STEP = {"epochs": 1, "epoch_steps": 1, "device": "cpu"}
_PLAN = ["--plan.options", "[[0.5, block, kept], [0.5, mlp, kept]]", "--plan.batches", "2", "--plan.batch_size", "4"]
_AUDIT = ["--audit.draws", "1", "--audit.resamples", "100"]
# The study of images has two seeds: what is computed of several knows no kind.
_STUDY = {"seeds": 1, "latency_rounds": 2}

IMAGE = {
    "kind": "image",
    "model": {
        "name": "vit_tiny_patch16_224",
        "args": {"img_size": 32, "patch_size": 8, "in_chans": 1, "num_classes": 10}
        | {"embed_dim": 16, "depth": 4, "num_heads": 2},
    },
    "data": {"source": "digits:tiny", "root": str(SETS / "digits"), "image_size": 32, "channels": 1},
    **_ONE_STEP,
}
TEXT = {
    "kind": "text",
    "model": {"config": LLAMA},
    "data": {"length": 32, "batch_size": 4, "val_limit": 6},
    "optim": {"lr": 3e-3},
    **_ONE_STEP,
}
CHAT = {
    "kind": "chat",
    "data": {"train": "questions:tiny/train", "val": "questions:tiny/val", "root": str(SETS / "questions")},
    "trainer": {**TRAINER, "max_steps": 2, "use_cpu": True},
    "max_new_tokens": 3,
}


def pairs(folder: Path) -> dict[str, Any]:
    """Return the config of a small CLIP on synthetic scenes, whose architecture is a file in a folder."""
    vision = {**CLIP["vision_cfg"], "image_size": 48, "patch_size": 16}  # type: ignore[dict-item]
    text = {**CLIP["text_cfg"], "context_length": 12}  # type: ignore[dict-item]
    return {
        "kind": "pairs",
        "model": write_model(folder, "reference-clip", vision_cfg=vision, text_cfg=text),
        "data": {"train": "scenes:tiny/train", "val": "scenes:tiny/val", "root": str(SETS / "scenes"), "batch_size": 8},
        "augment": None,
        "zero_shot": "scenes",
        **_ONE_STEP,
    }


ROUTINGS: dict[str, dict[str, Any]] = {
    "image": {"router": "linear", "capacity": 0.5, "blocks": [1, 3]},
    "pairs": {"image": {"router": "linear", "capacity": 0.5}, "text": {"router": "norm", "capacity": 0.5}},
    "text": PREDICTOR,
    "chat": MASKED,
}


def of_runs(folder: Path, kind: str, dense: Mapping[str, Any]) -> dict[str, float]:
    """Train a dense and a routed model, then evaluate, audit and search; return all numbers."""
    values = {}
    # A folder of transformers holds its architecture; of the others the config names it.
    is_chat = kind == "chat"
    start = {"checkpoint": str(folder / "dense/model")} if is_chat else {"checkpoint": str(folder / "dense")}
    routed = {**dense, "model": start if is_chat else {**dense["model"], **start}, "routing": ROUTINGS[kind]}
    for name, fields in (("dense", dense), ("routed", routed)):
        output = folder / name
        config = written(folder / f"{name}.yaml", {**fields, "output": str(output)})
        command("train", kind, str(config))
        values |= numbers(f"train {name}", json.loads((output / "result.json").read_text())["evaluation"])
    shown = command("evaluate", str(folder / "routed"))
    # Times stand behind the FLOPs.
    values |= numbers("evaluate", [_NUMBER.findall(re.split(", ms|, times", line)[0]) for line in shown.splitlines()])
    options = {"text": ["--audit.generation", "32", "--audit.texts", "3"], "chat": ["--audit.questions", "12"]}
    audit = [*_AUDIT, *options.get(kind, []), *([] if is_chat else ["--audit.reference", str(folder / "dense")])]
    if kind == "pairs":
        audit += ["--audit.shifts", "[noise]"]
    command("audit", str(folder / "routed"), *audit)
    values |= numbers("audit", json.loads((folder / "routed/audit/audit.json").read_text()))
    # Of a vision-language model, the tower costs what no plan changes.
    budget = "0.95" if is_chat else "0.9"
    command("plan", str(folder / "dense"), *_PLAN, "--plan.budget", budget)
    values |= numbers("plan", json.loads((folder / f"dense/plan/flops-{budget}.json").read_text()))
    return values


def of_study(folder: Path, dense: Mapping[str, Any], **fields: Any) -> dict[str, float]:
    """Run a study of a dense config, and return the numbers of its points."""
    output = folder / "study"
    base = written(folder / "base.yaml", {**dense, "output": "unused"})
    config = written(folder / "study.yaml", {"dense": str(base), "output": str(output), **_STUDY, **fields})
    command("tradeoff", str(config))
    points = json.loads((output / "tradeoff.json").read_text())["points"]
    return numbers("study", {point["name"]: point for point in points})


def image(folder: Path) -> dict[str, float]:
    """A classifier of digits."""
    routers = {
        "a-mod": {"preset": "a-mod"},
        "threshold": {"router": "linear", "select": "threshold"},
        "random": {"router": "random"},
    }
    study = {"changes": {"data": {"val_split": "test"}}, "routers": routers, "capacities": [0.5], "seeds": 2}
    study |= {"finetune": {"optim": {"lr": 1e-4}}, "isoflop": "scratch"}
    study |= {"latency_batch": 2, "latency_batches": [], "maps": 0}
    return of_runs(folder, "image", IMAGE) | of_study(folder, IMAGE, **study)


def features(folder: Path) -> dict[str, float]:
    """The features of a classifier without training, beside merging and smaller images."""
    images = photos(folder / "images")
    weights = folder / "weights.safetensors"
    args = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 4, "num_heads": 2, "num_classes": 3}
    dense = {
        "model": {"name": "vit_tiny_patch16_224", "args": args},
        "data": {
            "source": "folder",
            "train_split": "",
            "val_split": "",
            "image_size": 16,
            "channels": 3,
            "mean": [0.485, 0.456, 0.406],
            "std": [0.229, 0.224, 0.225],
            "crop_pct": 0.875,
            "batch_size": 4,
        },
        **_ONE_STEP,
    }
    torch.manual_seed(1)
    save_file(timm.create_model("vit_tiny_patch16_224", **args).state_dict(), weights)
    baselines = {
        "merging": {0.5: {"kind": "merge", "r": 2}},
        "resolution": {0.5: {"kind": "resolution", "image_size": 12}},
    }
    routers = {"late": {"router": "redundancy", "blocks": "late", "skipped": "merge"}, "random": {"router": "random"}}
    fields = {"kind": "features", "images": str(images), "checkpoint": str(weights), "neighbours": 3, "folds": 3}
    return of_study(folder, dense, **fields, routers=routers, baselines=baselines, latency_batch=2, latency_batches=[1])


def pair(folder: Path) -> dict[str, float]:
    """A CLIP of scenes and captions."""
    dense = pairs(folder)
    routers = {"a-mod": {"image": {"preset": "a-mod"}, "text": {"preset": "a-mod"}}}
    study = {"kind": "pairs", "changes": {"data": {"val": "scenes:tiny/test"}}, "finetune": {"optim": {"lr": 1e-4}}}
    return of_runs(folder, "pairs", dense) | of_study(folder, dense, **study, routers=routers, latency_batch=4)


def text(folder: Path) -> dict[str, float]:
    """A language model of bytes, and sizes of it at equal FLOPs of training."""
    values = of_runs(folder, "text", TEXT)
    base = {
        **TEXT,
        "model": {"config": {**LLAMA, "num_hidden_layers": 2, "num_attention_heads": 1}},
        "output": "unused",
    }
    base["data"] = {"length": 32, "batch_size": 2, "val_limit": 4}
    del base["epoch_steps"]
    sizes = {f"w{width}": {"hidden_size": width, "intermediate_size": 2 * width} for width in (8, 16)}
    fields = {
        "dense": str(written(folder / "base.yaml", {**base, "epochs": 2})),
        "output": str(folder / "isoflop"),
        "sizes": sizes,
        "budgets": [2e7],
        "routings": {"dense": None, "mod": PREDICTOR},
        "rates": [1e-2, 1e-3],
        "seeds": 2,
    }
    command("isoflop", str(written(folder / "isoflop.yaml", fields)))
    record = json.loads((folder / "isoflop/isoflop.json").read_text())
    return values | numbers("isoflop", record["points"])


def chat(folder: Path) -> dict[str, float]:
    """A LLaVA that answers questions on scenes."""
    dense = {
        **CHAT,
        "model": {"checkpoint": str(save_llava(folder / "llava"))},
        "trainer": {**CHAT["trainer"], "save_strategy": "no"},
    }
    routers = {"p-mod": {"preset": "p-mod"}, "random": {"router": "random", "blocks": [1, 2], "capacity": 0.25}}
    baselines = {"resolution": {0.25: {"kind": "resolution", "image_size": 16}}}
    study = {"kind": "chat", "routers": routers, "baselines": baselines, "finetune": {"trainer": {"max_steps": 1}}}
    return of_runs(folder, "chat", dense) | of_study(folder, dense, **study, latency_batch=2)


def advice(folder: Path) -> dict[str, float]:
    """Advice on labelled images, and on prompts."""
    save_image_model("vit", folder / "vit")
    draw_weights(folder / "vit", transformers.AutoModelForImageClassification)
    photos(folder / "images")
    make_prompts(folder)
    draw_weights(folder / "llava", transformers.AutoModelForImageTextToText)
    command("advise", str(folder / "vit"), "--images", str(folder / "images"), "--output", str(folder / "of-images"))
    prompts = ["--prompts", str(folder / "questions.json"), "--batch_size", "1", "--output", str(folder / "of-prompts")]
    command("advise", str(folder / "llava"), *prompts)
    values = {}
    for name in ("of-images", "of-prompts"):
        record = json.loads((folder / name / "advice.json").read_text())
        # Where times are equal, all rows are as fast, in the order in which they were tried.
        values |= numbers(f"advice {name}", {**record, "rows": {row["name"]: row for row in record["rows"]}})
    return values


REFERENCES: dict[str, Callable[[Path], dict[str, float]]] = {
    "image": image,
    "features": features,
    "pairs": pair,
    "text": text,
    "chat": chat,
    "advice": advice,
}


def save_llava(folder: Path) -> Path:
    """Save a small LLaVA with 16 image tokens and the words of the embedded questions, and return its folder."""
    processor = create_word_processor(VISION["image_size"], VISION["patch_size"])
    tokenizer = processor.tokenizer
    text = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = transformers.LlavaConfig(
        text_config={**TEXT_MODEL, **text, "vocab_size": len(tokenizer)},
        vision_config=VISION,
        image_token_index=processor.image_token_id,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_seq_length=16,
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    draw_weights(folder, transformers.AutoModelForImageTextToText)
    return folder


def draw_weights(folder: Path, made: Any) -> None:
    """Draw the matrices of a saved model anew, the same by every version of torch, whose initialisers differ."""
    model = made.from_pretrained(folder)
    generator = np.random.default_rng(0)
    for _, weight in sorted(model.named_parameters()):
        if weight.ndim > 1:
            weight.data = torch.from_numpy(generator.normal(0, 0.1, tuple(weight.shape)).astype(np.float32))
    model.save_pretrained(folder)


def photos(root: Path) -> Path:
    """Save 12 images of noise of each of two classes, the same on every machine."""
    for label, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for number in range(12):
            (root / name / f"{number}.png").write_bytes(png(100 * label + number, side=40))
    return root


def written(path: Path, fields: Mapping[str, Any]) -> Path:
    """Write a config and return its path."""
    path.write_text(yaml.safe_dump(dict(fields)))
    return path


def command(*words: str) -> str:
    """Run a command of mmod in this process, as if every model took a millisecond; return what it printed."""
    shown = io.StringIO()
    equal = mock.patch("mmod.analysis.timing.interleave", lambda calls, **_: {name: [1.0, 1.0] for name in calls})
    torch.manual_seed(0)
    errors = io.StringIO()
    with equal, contextlib.redirect_stdout(shown), contextlib.redirect_stderr(errors):
        try:
            cli.main(words)
        except SystemExit as end:
            raise AssertionError(f"mmod {shlex.join(words)}: {end.code}\n{errors.getvalue()[-2000:]}") from end
    return shown.getvalue()


def numbers(name: str, tree: Any) -> dict[str, float]:
    """Return the numbers in nested values by path, those of a table by the names of its rows; no times.

    Example:
        >>> numbers("run", {"loss": 0.5, "ms": 3.1, "points": [{"name": "dense", "kept": 1}]})
        {'run/loss': 0.5, 'run/points/dense/kept': 1.0}
    """
    return dict(_numbers(name, tree))


def _numbers(path: str, tree: Any) -> Iterator[tuple[str, float]]:
    if isinstance(tree, Mapping):
        children = {str(key): value for key, value in tree.items() if key not in _NOT_RESULTS}
    elif isinstance(tree, list):
        children = {}
        for place, value in enumerate(tree):
            named = isinstance(value, Mapping) and "name" in value
            children[str(value["name"] if named else place)] = value
    elif isinstance(tree, str) and _NUMBER.fullmatch(tree):
        yield path, float(tree)
        return
    else:
        if isinstance(tree, (int, float)):
            yield path, float(tree)
        return
    for key, value in children.items():
        if not _MEASURED.search(key):
            yield from _numbers(f"{path}/{key}", value)


def main() -> None:
    """Write or check all references."""
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    actual = {}
    for name, compute in REFERENCES.items():
        with tempfile.TemporaryDirectory() as folder:
            actual[name] = compute(Path(folder))
        print(f"{name}: {len(actual[name])} numbers", flush=True)
    if "--check" not in sys.argv:
        EXPECTED.write_text(json.dumps(actual, indent=1) + "\n")
        return
    changed = [
        f"{path}: {expected[name].get(path)} expected, {value} now"
        for name, values in actual.items()
        for path, value in values.items()
        if expected[name].get(path) != value
    ]
    missing = [path for name, values in expected.items() for path in values if path not in actual[name]]
    print("\n".join([*changed, *(f"{path}: missing" for path in missing)]) or "all equal to the last bit")
    sys.exit(bool(changed or missing))


if __name__ == "__main__":
    main()
