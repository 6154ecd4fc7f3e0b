"""Traces: the decisions of a forward pass, their statistics and their maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmod.adapters import SeenGrid, grid_of_squares, image_stack, watch_grid
from mmod.analysis.maps import draw_maps, runs_of_one_mask
from mmod.blocks import Deciding, deciding_modules
from mmod.config import Grid
from mmod.io.tables import markdown_table
from mmod.methods.base import method_owners, refuse_evaluated
from mmod.names import plural
from mmod.routing import Routing
from mmod.values import check_module

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEADER = ("decision", "tokens", "kept")


class Trace(Mapping[str, Routing]):
    """Which tokens each routed block kept in the last forward pass, by name: a mapping to `Routing`.

    `print(trace)` shows the kept shares, in one line for adjoining blocks that kept the same tokens, and notebooks show
    them as a table. A routed block decides once. Other methods decide several times, as in `blocks.1.mlp.expert2` (an
    expert) or `layers.2.recursion1`. A decision on full images has one token per image. In a ResNet, the tokens are
    channels. After `generate`, they are the prompt's if text may not be skipped.
    """

    def __init__(self, model: nn.Module) -> None:
        check_module(model)
        self._modules = deciding_modules(model)
        self._closed: dict[str, Routing] | None = None
        owners = method_owners(model)
        # Wrappers of a model belong to no library.
        self._owner = owners[0] if len(owners) == 1 else model
        self._seen = SeenGrid()
        # By module: the decisions of a trace around this one, which has those of its passes too; None without one.
        self._around: dict[str, dict[str, Routing] | None] = {}

    def __getitem__(self, name: str) -> Routing:
        routing = self._routings().get(name)
        if routing is None:
            raise KeyError(f"{name!r}: traced blocks with a decision are {sorted(self._routings())}")
        return routing

    def __iter__(self) -> Iterator[str]:
        return iter(self._routings())

    def __len__(self) -> int:
        return len(self._routings())

    @property
    def names(self) -> list[str]:
        """The names of all decisions, in order, including those that were not made yet."""
        return [_name(name, decision) for name, _, decision in self._decisions()]

    def start(self) -> None:
        """Record decisions in evaluation too, and forget earlier ones, except for a trace around this one."""
        for name, module in self._modules.items():
            record = module.mod_record
            self._around[name] = dict(record.decisions) if record.traced else None
            record.traced = True
            record.decisions.clear()

    @contextmanager
    def watching_grid(self) -> Iterator[None]:
        """Watch the grid of patches within the context, see `grid`."""
        with watch_grid(self._owner) as self._seen:
            yield

    @contextmanager
    def recording(self) -> Iterator[Trace]:
        """Record within the context; alone it spares the grid, which takes trials to find in some models."""
        self.start()
        try:
            yield self
        finally:
            self.close()

    def take(self) -> dict[str, Routing]:
        """Return the decisions since the last call, and forget them."""
        decisions = self._routings()
        for name, module in self._modules.items():
            around = self._around[name]
            if around is not None:
                around.update(module.mod_record.decisions)
            module.mod_record.decisions.clear()
        return decisions

    def close(self) -> None:
        """Stop recording, and keep the decisions; a trace around this one goes on."""
        self._closed = self._routings()
        for name, module in self._modules.items():
            around = self._around[name]
            if around is None:
                module.mod_record.traced = False
            else:
                module.mod_record.decisions = around | module.mod_record.decisions
        self._around.clear()

    def _routings(self) -> dict[str, Routing]:
        if self._closed is not None:
            return self._closed
        return {
            # Detached: a trace must not keep the graph of the pass alive.
            _name(name, decision): module.mod_record.decisions[decision].detach()
            for name, module, decision in self._decisions()
            if decision in module.mod_record.decisions
        }

    def decided_alone(self) -> dict[str, Tensor]:
        """Return which tokens would run if decided independently (B, N), by name; empty where evaluation decides so.

        The traced passes decided jointly, as in training.
        """
        routings = self._routings()
        alone: dict[str, Tensor] = {}
        for name, module in self._modules.items():
            names = {decision: _name(name, decision) for decision in module.mod_decision_names()}
            decisions = {decision: routings[known] for decision, known in names.items() if known in routings}
            alone |= {names[decision]: keep_BN for decision, keep_BN in module.mod_decided_alone(decisions).items()}
        return alone

    def _decisions(self) -> Iterator[tuple[str, Deciding, str]]:
        """Yield the name of each deciding module, the module, and the name of one of its decisions, in order."""
        for name, module in self._modules.items():
            for decision in module.mod_decision_names():
                yield name, module, decision

    @property
    def grid(self) -> Grid:
        """Rows and columns of an image's patches in the last forward pass, as the model made them.

        Raises:
            ValueError: No pass was traced, or its images had no common grid, or the model shows none.
        """
        if self._seen.grid is None:
            if not self._routings():
                raise ValueError("no pass was traced: call the model inside the `with` block")
            raise ValueError("the model showed no grid of patches in this trace: pass rows and columns, grid=(10, 10)")
        return self._seen.grid

    @property
    def prefix(self) -> int:
        """Number of leading tokens that are not patches.

        Raises:
            ValueError: The model belongs to no supported library, and no trial of its blocks showed it.
        """
        stack = image_stack(self._owner)
        if stack is None:
            raise ValueError(
                "this model does not say which tokens are patches: pass the number of tokens before them, and their "
                "rows and columns, as prefix=1, grid=(10, 10)"
            )
        return stack.prefix

    def kept_shares(self) -> dict[str, float]:
        """Return the share of tokens that each decision kept, mean over the batch."""
        return {name: float(routing.keep_BN.float().mean()) for name, routing in self.items()}

    def maps(
        self, prefix: int | None = None, grid: tuple[int, int] | None = None, image_BN: Tensor | None = None
    ) -> Tensor:
        """Return where patches were kept (decisions, images, rows, columns).

        Args:
            prefix: Leading tokens that are not patches; None takes the model's.
            grid: Rows and columns of patches; None takes those of the traced pass. If the model shows none, `plot`
                tiles the images with square patches. A grid that does not hold the patches is a ValueError.
            image_BN: True where a token is a patch, in sequences of text and images (B, N), whose images come in order;
                None if all tokens after the prefix are patches.
        """
        routings = self._routings()
        if not routings:
            raise ValueError(f"{self}: run the model within `mmod.trace`")
        lengths = {routing.keep_BN.shape[1]: name for name, routing in routings.items()}
        if len(lengths) > 1:
            raise ValueError(
                f"decisions of {' and '.join(lengths.values())} are about sequences of other lengths: trace one part "
                "alone, such as mmod.trace(model.vision_tower)"
            )
        if prefix is None:
            prefix = self.prefix
        if grid is None:
            grid = self.grid
        kept = torch.stack([routing.keep_BN[:, prefix:] for routing in routings.values()])
        # Of prompts, the tokens of images alone, which are those of all frames in order.
        if image_BN is not None:
            kept = kept[:, image_BN[:, prefix:].to(kept.device)]
            if kept.shape[-1] % (grid[0] * grid[1]):
                raise ValueError(f"grids of {grid[0]} x {grid[1]} do not hold {kept.shape[-1]} image tokens")
            return kept.unflatten(-1, (-1, *grid))
        if kept.shape[-1] != grid[0] * grid[1]:
            raise ValueError(f"a grid of {grid[0]} x {grid[1]} does not hold {kept.shape[-1]} patches")
        return kept.unflatten(-1, grid)

    def plot(
        self,
        images: Tensor,
        labels: Sequence[str] | None = None,
        *,
        prefix: int | None = None,
        grid: tuple[int, int] | None = None,
        image_BN: Tensor | None = None,
    ) -> Figure:
        """Draw which patches each routed block kept: kept ones as they are, skipped ones under a veil.

        Adjoining blocks that kept the same patches, as after a shared decision, have one map.

        Args:
            images: What the traced pass saw (B, 1 or 3 channels, height, width). Images outside [0, 1], as normalised
                ones, are shown from their lowest value, black, to their highest, white.
            labels: Text next to each image.
            prefix: See `maps`, which also describes `grid` and `image_BN`.

        Raises:
            ValueError: Images of another number of channels, or decisions or labels for another number of images.

        Example:
            >>> import timm, mmod
            >>> model, images = mmod.route_(timm.create_model("test_vit").eval(), "a-mod"), torch.randn(2, 3, 160, 160)
            >>> with mmod.trace(model) as decisions:
            ...     _ = model(images)
            >>> len(decisions.plot(images).axes)
            8
        """
        if grid is None and self._seen.grid is None and image_BN is None and len(self):
            if prefix is None:
                prefix = self.prefix
            grid = self._grid_of_squares(images, prefix)
        return draw_maps(images, list(self), self.maps(prefix, grid, image_BN).cpu(), labels)

    def _grid_of_squares(self, images: Tensor, prefix: int) -> Grid | None:
        """Return rows and columns of square patches that tile images; None where none do."""
        patches = next(iter(self.values())).keep_BN.shape[1] - prefix
        if patches <= 0:
            return None
        return grid_of_squares(patches, *images.shape[-2:])

    def __str__(self) -> str:
        if not self._modules:
            return "no decisions: no method that decides changed this model"
        shares = self.kept_shares()
        if not shares:
            return "no decisions: no forward pass in this thread had tokens to choose from"
        mean = sum(shares.values()) / len(shares)
        names = list(self)
        masks = [routing.keep_BN for routing in self.values()]
        rows = []
        for group in runs_of_one_mask(names, masks):
            first, *others = names[group]
            named = first
            if others:
                last = others[-1].rpartition(".")[2]
                named += f" to {last}"
            tokens = masks[group.start].shape[1]
            rows.append([named, str(tokens), f"{shares[first]:.3f}"])
        counted = f"{len(rows)} {plural('decision', len(rows))}"
        if len(rows) < len(names):
            counted += f" of {len(names)} blocks"
        title = f"{counted}, {mean:.3f} of the tokens kept on average"
        return f"{title}\n\n{markdown_table(_HEADER, rows)}"

    __repr__ = _repr_markdown_ = __str__


def _name(module: str, decision: str) -> str:
    return f"{module}.{decision}" if decision else module


@contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Record which tokens a model keeps, in the forward passes of this thread inside the `with` statement.

    Decisions are recorded in evaluation too.

    Args:
        model: A model, as a rule one that `mmod.apply_` or `mmod.route_` changed.

    Yields:
        A mapping from names to decisions, filled by each forward pass; empty for a dense model, and for a method that
        decides nothing.

    Raises:
        ValueError: The model is routed in training alone, and in evaluation mode.

    Example:
        >>> import timm, mmod
        >>> model = mmod.route_(timm.create_model("test_vit").eval(), "a-mod")
        >>> with trace(model) as decisions:
        ...     _ = model(torch.randn(1, 3, 160, 160))
        >>> decisions["blocks.1"].kept.index_BK.shape
        torch.Size([1, 50])
        >>> print(decisions)
        3 decisions, 0.495 of the tokens kept on average
        <BLANKLINE>
        | decision | tokens |  kept |
        | :------- | -----: | ----: |
        | blocks.1 |    101 | 0.495 |
        | blocks.3 |    101 | 0.495 |
        | blocks.5 |    101 | 0.495 |
    """
    decisions = Trace(model)
    if not decisions.names:
        refuse_evaluated(model)
    with decisions.watching_grid(), decisions.recording():
        yield decisions


def draw_sample_maps(model: nn.Module, images: Tensor) -> Figure:
    """Draw which patches the routed blocks of an image model keep of images (B, C, height, width)."""
    with torch.inference_mode(), trace(model) as decisions:
        model(images.to(next(model.parameters()).device))
    return decisions.plot(images)
