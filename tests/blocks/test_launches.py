"""What a pass costs, counted without a clock: the kernels that a GPU launches. `test_walk.py` counts calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import timm
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mmod
from mmod import RoutingConfig
from mmod.routing import RandomScore

HALF: dict[str, Any] = {"capacity": 0.5}


class FusedAttention(TorchFunctionMode):
    """What torch does on a GPU, and cannot choose for fake tensors."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.nn.functional.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        q, k, v = args[:3]
        mask = (kwargs or {}).get("attn_mask")
        if mask is not None:
            # The kernel reads rows of a mask that begin at multiples of eight elements; torch copies others.
            if any(stride % 8 for stride in mask.stride()[:-1]):
                mask = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8))[..., : mask.shape[-1]]
            mask = mask.expand(*q.shape[:3], k.shape[2])
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, mask, False)[0]


class Launches(TorchDispatchMode):
    """Count operations that launch a kernel; one of this library's is one launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        views = [
            result.alias_info is not None and not result.alias_info.is_write for result in function._schema.returns
        ]
        if not any(views) and "empty" not in name and name not in ("aten::_unsafe_view", "prim::device"):
            self.names[name] += 1
        return function(*args, **(kwargs or {}))


def launches_of(config: RoutingConfig | None) -> Counter[str]:
    with torch.device("meta"):
        model = timm.create_model("vit_small_patch16_224").eval().requires_grad_(False)
    if config is not None:
        mmod.route_(model, config)
    launches = Launches()
    with FakeTensorMode(), torch.no_grad():
        for module in model.modules():
            for name, value in list(module._parameters.items()):
                if value is not None:
                    fake = torch.empty(value.shape, device="cuda")
                    module._parameters[name] = torch.nn.Parameter(fake, requires_grad=False)
            if isinstance(module, RandomScore):
                module.salt = torch.empty((), dtype=torch.int64, device="cuda")
        with launches, FusedAttention():
            model(torch.empty(1, 3, 224, 224, device="cuda"))
    return launches.names


@pytest.mark.parametrize(
    ("config", "most"),
    [
        (None, 125),
        (mmod.preset("gradual", depth=12), 200),
        (RoutingConfig(router="redundancy", skipped="merge", blocks="late", **HALF), 140),
        (RoutingConfig(router="random", **HALF), 143),
        (RoutingConfig(router="attention", blocks="late", **HALF), 129),
        # Six more than a dense block: score by product, norm, root and quotient, then select, gather and write back in
        # one kernel each, of which the gather has the block's norm inside.
        (RoutingConfig(router="linear", blocks="late", **HALF), 125 + 8 * 6),
        (RoutingConfig(router=mmod.config.score("linear", shared=True), blocks="late", **HALF), 138),
    ],
    ids=["dense", "gradual", "late merge", "random", "late attention", "late learned", "late learned, shared"],
)
def test_a_pass_launches_few_kernels(config: RoutingConfig | None, most: int) -> None:
    launches = launches_of(config)
    assert launches.total() <= most, launches.most_common()
