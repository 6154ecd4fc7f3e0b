"""One score for all routed layers of a model, stored in the module that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mmod.routing.router import Router

# Ends with "router", so that tools which select routers by name, such as peft, select it too.
NAME = "shared_router"


class BorrowedScore(nn.Module):
    """Score tokens with the score that another module holds, also if it was wrapped since."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        # Not registered: the shared weight is in state_dict once, and FSDP shards it with its owner.
        self._owner = (owner,)

    @property
    def held(self) -> nn.Module:
        """The score or its wrapper."""
        return self._owner[0].get_submodule(NAME)

    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Return scores (B, N) of tokens (B, N, D), on their device."""
        score_BN: Tensor = self.held(x_BND, valid_BN)
        return score_BN.to(x_BND.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> BorrowedScore:
        """Refer to the owner's copy in a copy of the model, and to the owner in a copy of a router."""
        (owner,) = self._owner
        return BorrowedScore(memo.get(id(owner), owner)).train(self.training)


def share_score(owner: nn.Module, routers: Sequence[Router]) -> None:
    """Make routers use the first one's score, which moves to `owner`."""
    owner.add_module(NAME, routers[0].score)
    for router in routers:
        router.score = BorrowedScore(owner)


def unshare_score(owner: nn.Module) -> None:
    """Undo `share_score`, if it was called."""
    if NAME in owner._modules:
        delattr(owner, NAME)
