"""One score for all routed layers of a model: stored once, by the module that holds the layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mmod.routing.router import Router

# Ends like the name of a layer's own router, so that what reaches those by name, as peft does, reaches it too.
NAME = "shared_router"


class BorrowedScore(nn.Module):
    """Score tokens with the score that another module holds, whatever has been wrapped around it since.

    Args:
        owner: The module that holds it.
    """

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        # Bypass nn.Module registration, so the shared weight is in state_dict once and FSDP shards it with its owner.
        self._owner = (owner,)

    @property
    def held(self) -> nn.Module:
        """The score itself, or what has been put around it."""
        return self._owner[0].get_submodule(NAME)

    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Return the scores (B, N) of tokens (B, N, D), on their device."""
        score_BN: Tensor = self.held(x_BND, valid_BN)
        return score_BN.to(x_BND.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> BorrowedScore:
        """Refer to the owner's copy in a copy of the whole model, and to the owner itself in a copy of one router."""
        (owner,) = self._owner
        return BorrowedScore(memo.get(id(owner), owner)).train(self.training)


def share_score(owner: nn.Module, routers: Sequence[Router]) -> None:
    """Let routers score with the first one's weight, which moves to `owner`."""
    owner.add_module(NAME, routers[0].score)
    for router in routers:
        router.score = BorrowedScore(owner)


def unshare_score(owner: nn.Module) -> None:
    """Take back what `share_score` did to a module, if it did."""
    if NAME in owner._modules:
        delattr(owner, NAME)
