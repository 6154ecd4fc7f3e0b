"""Traces: the decisions of a forward pass, their statistics and their maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mmod.model import routed_blocks
from mmod.routing import Routing


class Trace(Mapping[str, Routing]):
    """The last decision of every routed block, by module name, without gradients.

    Args:
        model: The routed model that is traced.
    """

    def __init__(self, model: nn.Module) -> None:
        self._blocks = routed_blocks(model)
        self._closed: dict[str, Routing] | None = None

    def __getitem__(self, name: str) -> Routing:
        routing = self._routings().get(name)
        if routing is None:
            raise KeyError(f"{name!r}: traced blocks with a decision are {sorted(self._routings())}")
        return routing

    def __iter__(self) -> Iterator[str]:
        return iter(self._routings())

    def __len__(self) -> int:
        return len(self._routings())

    def close(self) -> None:
        """Keep what was decided so far, whatever the model does next."""
        self._closed = self._routings()

    def _routings(self) -> dict[str, Routing]:
        if self._closed is not None:
            return self._closed
        found = {name: block.mod_state.routing for name, block in self._blocks.items()}
        return {name: routing.detach() for name, routing in found.items() if routing is not None}

    def kept_shares(self) -> dict[str, float]:
        """Return the share of tokens each routed block kept, mean over the batch."""
        return {name: float(routing.keep_BN.float().mean()) for name, routing in self.items()}

    def maps(self, prefix: int, grid: tuple[int, int], image_BN: Tensor | None = None) -> Tensor:
        """Return which patches each routed block kept.

        Args:
            prefix: Leading tokens that are not patches.
            grid: Rows and columns of patches.
            image_BN: True where a token is a patch, in sequences of text and images (B, N); None where all tokens
                after the prefix are.

        Returns:
            True where kept (blocks, images, rows, columns); images in the order in which they stand.

        Raises:
            ValueError: The grid does not hold the patches.
        """
        kept = torch.stack([routing.keep_BN[:, prefix:] for routing in self.values()])
        if image_BN is not None:
            kept = kept[:, image_BN[:, prefix:].to(kept.device)]
            if kept.shape[-1] % (grid[0] * grid[1]):
                raise ValueError(f"grids of {grid[0]} x {grid[1]} do not hold {kept.shape[-1]} image tokens")
            return kept.unflatten(-1, (-1, *grid))
        if kept.shape[-1] != grid[0] * grid[1]:
            raise ValueError(f"a grid of {grid[0]} x {grid[1]} does not hold {kept.shape[-1]} patches")
        return kept.unflatten(-1, grid)


@contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Record the decisions of the forward passes that this thread makes inside the block, in evaluation too.

    Args:
        model: A routed model.

    Yields:
        A mapping from module names to decisions, filled by each forward pass.

    Raises:
        ValueError: Nothing in the model is routed.

    Example:
        >>> import timm, mmod
        >>> model = mmod.route_(timm.create_model("test_vit").eval())
        >>> with trace(model) as decisions:
        ...     _ = model(torch.randn(1, 3, 160, 160))
        >>> decisions["blocks.1"].index_BK.shape
        torch.Size([1, 50])
    """
    blocks = routed_blocks(model)
    for block in blocks.values():
        block.mod_state.start_recording()
    decisions = Trace(model)
    try:
        yield decisions
    finally:
        decisions.close()
        for block in blocks.values():
            block.mod_state.stop_recording()
