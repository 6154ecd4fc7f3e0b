"""One of two processes that split a model on the CPU."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule

from mmod.blocks import RoutedBlock
from mmod.training import fit
from mmod.training.chat import loop
from mmod.training.chat.config import TrainConfig
from mmod.training.chat.trainer import RoutedTrainer
from tests.kit.chat_configs import GAMMA, P_MOD, vlm_config

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
# The last one's checkpoints are split, too.
RUNS: dict[str, dict[str, Any]] = {"shared": {"routing": GAMMA}, "sharded": {"routing": P_MOD, "lora": LORA}}


def run_config(folder: Path, name: str, processes: int) -> TrainConfig:
    """Return a run on so many processes, split where there are several, of four conversations a step in all."""
    fields: dict[str, Any] = {"max_steps": 2, "logging_steps": 1, "max_grad_norm": 0.0, "use_cpu": True}
    fields["per_device_train_batch_size"] = 4 // processes
    # The single one is not taken back.
    fields |= {"save_steps": 1} if processes > 1 else {"save_strategy": "no"}
    if processes > 1:
        fields |= {
            "ddp_backend": "gloo",
            "fsdp": True,
            "fsdp_config": {
                "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
                "state_dict_type": f"{'SHARDED' if name == 'sharded' else 'FULL'}_STATE_DICT",
            },
        }
    data = replace(vlm_config(folder).data, val=None)
    return vlm_config(folder, f"{name}-{processes}", fields, data=data, **RUNS[name])


def train_split(folder: Path) -> None:
    """Train every run, take its second half back, and train that again."""
    made, split = loop.training_arguments, []

    def on_cpu(config: TrainConfig) -> Any:
        arguments = made(config)
        # accelerate splits models on accelerators alone: this one passes for such a device.
        assert arguments.device.type == "cpu"
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return arguments

    class Watching(RoutedTrainer):
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            blocks = [module for module in model.modules() if isinstance(module, RoutedBlock)]
            split.append(isinstance(model, FSDPModule) and all(isinstance(block, FSDPModule) for block in blocks))
            return super().compute_loss(model, *args, **kwargs)

    loop.training_arguments, loop.RoutedTrainer = on_cpu, Watching  # type: ignore[assignment,misc]
    for name in RUNS:
        config = run_config(folder, name, 2)
        fit(config, progress=False)
        run = Path(config.output)
        state = PartialState()
        if state.is_main_process:
            shutil.copytree(run / "model", folder / f"{name}-whole")
            (run / "result.json").unlink()
            shutil.rmtree(run / "model")
            shutil.rmtree(run / "checkpoints" / "checkpoint-2")
        state.wait_for_everyone()
        assert not fit(config, progress=False).reused
    if PartialState().is_main_process:
        (folder / "split.json").write_text(json.dumps(split))
