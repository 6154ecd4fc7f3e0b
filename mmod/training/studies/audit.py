"""The command that audits an image classifier: `python tools/audit.py CONFIG_OR_RUN [--key value]`."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmod.training.engine.parse import parse_config
from mmod.training.image.config import DistillConfig, TrainConfig
from mmod.values import check_fields

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mmod import Audit
    from mmod.data.loader import BatchStream

__all__ = ["AuditConfig", "AuditOptions", "audit_run", "main"]

_RECORD, _FOUND = "config.json", "audit.json"
_RUN = "config.yaml"


@dataclass(frozen=True)
class AuditOptions:
    """How a model is audited, see `mmod.audit`.

    Args:
        conditions: Choices of tokens that are compared, "random" among them; null for all.
        draws: Random choices for each image.
        margin: Points of accuracy below which a gain over random tokens may count as none.
        resamples: How often images are resampled.
        positions_split: Split from which the positions that the router keeps are counted; null for the evaluation set.
        maps: Sample images over which routing is drawn; 0 draws none.
    """

    conditions: list[str] | None = None
    draws: int = 5
    margin: float = 5.0
    resamples: int = 2000
    positions_split: str | None = None
    maps: int = 6

    def __post_init__(self) -> None:
        check_fields(self, "audit", draws="[1, inf)", margin="(0, inf)", resamples="[100, inf)", maps="[0, inf)")


@dataclass(frozen=True, kw_only=True)
class AuditConfig(TrainConfig):
    """The keys of a training config, whose `model`, `data`, `routing` and `device` say what is audited.

    Args:
        audit: How it is audited. What is found goes to the folder `audit` in `output`.
    """

    audit: AuditOptions = field(default_factory=AuditOptions)


def audit_run(config: AuditConfig, *, command: str | None = None, progress: bool = True) -> Audit:
    """Audit the model that a run would start from, and write what was found into the folder `audit` of its output.

    Args:
        config: The model with its weights, the data, and how to audit.
        command: The command line to note beside the findings.
        progress: Show a bar.

    Returns:
        What was found; it is written as JSON, Markdown and pictures. A finished audit is read and not done again.

    Raises:
        FolderTakenError: If the folder holds the audit of another config.
        ValueError: If the config starts from no weights, or routes nothing.
    """
    from mmod import audit, flops
    from mmod.analysis.audit.plots import draw_audit
    from mmod.analysis.audit.result import read_audit
    from mmod.data.loader import create_eval_stream
    from mmod.io.claim import claim_folder
    from mmod.io.files import write_atomically
    from mmod.training.engine.distributed import choose_device
    from mmod.training.engine.loop import seed_draws
    from mmod.training.image.model import create_models

    if not config.model.has_weights or config.routing is None:
        raise ValueError(
            "an audit needs a routed model with weights: name a run folder of one, or set model.checkpoint and routing"
        )
    options, folder = config.audit, Path(config.output) / "audit"
    claim_folder(folder, {"model": dataclasses.asdict(config.model), **_record(config)}, file=_RECORD, kind="an audit")
    if (folder / _FOUND).exists():
        return read_audit(json.loads((folder / _FOUND).read_text())["audit"])
    seed_draws(config.seed, 0, 0)
    plain = dataclasses.replace(config, distill=DistillConfig(teacher="none"), grad_checkpointing=False)
    model = create_models(plain)[0].to(choose_device(config.device)).eval()
    data, split = config.data, options.positions_split
    elsewhere = None if split is None else _Epoch(create_eval_stream(dataclasses.replace(data, val_split=split)))
    found = audit(
        model,
        _Epoch(create_eval_stream(data)),
        positions_from=elsewhere,
        conditions=options.conditions,
        draws=options.draws,
        margin=options.margin,
        resamples=options.resamples,
        progress=progress,
    )
    maps = _draw_maps(config, model, folder) if options.maps else None
    record = {
        "name": Path(config.output).name,
        "command": command or f"mmod audit {shlex.quote(config.output)}",
        "environment": _environment(),
        "audit": found.to_dict(),
        "flops": flops(model, (data.channels, data.image_size, data.image_size)).to_dict(),
        "maps": maps,
    }
    draw_audit(found).savefig(folder / "audit.png", dpi=150)
    write_atomically(folder / "audit.md", f"{found}\n")
    write_atomically(folder / _FOUND, json.dumps(record, indent=1) + "\n")
    return found


class _Epoch:
    """One pass of a stream, as often as it is asked for."""

    def __init__(self, stream: BatchStream) -> None:
        self._stream = stream

    def __len__(self) -> int:
        return self._stream.steps_per_epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._stream.batches(0))


def _record(config: AuditConfig) -> dict[str, Any]:
    """Return what decides the outcome beside the model, as plain values."""
    routing = config.routing_config()
    assert routing is not None
    data = dataclasses.asdict(config.data)
    moves = {name: value for name, value in data.items() if name not in ("workers", "pin_memory", "batch_size")}
    return json.loads(
        json.dumps({"data": moves, "routing": routing.to_dict(), "audit": dataclasses.asdict(config.audit)})
    )


def _environment() -> dict[str, Any]:
    import platform
    from importlib.metadata import version

    import torch

    return {
        "mmod": version("mmod"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _draw_maps(config: AuditConfig, model: nn.Module, folder: Path) -> dict[str, Any]:
    """Draw what the blocks keep of sample images, and return the same as plain values."""
    import torch

    from mmod import trace
    from mmod.adapters import find_stack
    from mmod.analysis.plots import draw_routing_maps
    from mmod.training.studies.image import sample_images

    images, prefix = sample_images(config, config.audit.maps), find_stack(model).prefix
    device = next(model.parameters()).device
    with torch.inference_mode(), trace(model) as decisions:
        model(images.to(device))
    patches = next(iter(decisions.values())).score_BN.shape[1] - prefix
    rows, columns = getattr(getattr(model, "patch_embed", None), "grid_size", (1, patches))
    low, high = images.amin(), images.amax()
    shown = ((images - low) / (high - low)).clamp(0, 1)
    draw_routing_maps(shown, decisions, prefix, (rows, columns)).savefig(
        folder / "maps.png", dpi=150, bbox_inches="tight"
    )
    kept = decisions.maps(prefix, (rows, columns)).flatten(2)
    blocks = {name: [row.nonzero().flatten().tolist() for row in own] for name, own in zip(decisions, kept)}
    return {"grid": [rows, columns], "blocks": blocks, "images": [_png(image) for image in shown]}


def _png(image: Tensor) -> str:
    """Return an image (C, height, width) in [0, 1] as the address of a PNG that holds it."""
    import base64
    import io

    from PIL import Image

    pixels = (image.expand(3, -1, -1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def main(arguments: Sequence[str]) -> None:
    """Audit as the command line `CONFIG_OR_RUN [--key value]` says and print what was found.

    Args:
        arguments: The command line without the program's name: a run folder of a routed model or a training config,
            then options.
    """
    arguments = list(arguments)
    command = shlex.join(["mmod", "audit", *arguments])
    if arguments and (Path(arguments[0]) / _RUN).is_file():
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            json.dump(_of_run(Path(arguments[0])), file)
            file.flush()
            config = parse_config([file.name, *arguments[1:]], AuditConfig)
    else:
        config = parse_config(arguments, AuditConfig)
    found = audit_run(config, command=command)
    print(f"{found}\n\nTables and pictures: {Path(config.output) / 'audit'}")


def _of_run(folder: Path) -> dict[str, Any]:
    """Return the config of a finished run, started from its own weights."""
    from mmod.config import regroup_saved
    from mmod.io.yaml import read_yaml

    fields = {name: value for name, value in regroup_saved(read_yaml(folder / _RUN)).items() if name != "world_size"}
    config = TrainConfig.from_dict({**fields, "output": str(folder)})
    return dataclasses.replace(config, model=config.model.started_from(str(folder))).to_dict()
