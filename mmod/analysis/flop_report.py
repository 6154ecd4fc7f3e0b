"""Reports of FLOPs, as values, text and HTML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from mmod.io.tables import markdown_table
from mmod.plain import from_plain, without

REST = ""
# Properties that a written report has beside its fields.
_TOTALS = ("dense", "routed", "importance", "share")


@dataclass(frozen=True)
class BlockFlops:
    """The cost of one block for one image.

    Args:
        name: Module name; empty for everything outside the blocks.
        tokens: Tokens that enter it (N).
        kept: Tokens it computes (K).
        routed: FLOPs of the routed block, including `router` and `importance`.
        cached: Tokens whose keys and values it caches, in a language model.
    """

    name: str
    tokens: int
    kept: int
    dense: int
    routed: int
    router: int = 0
    importance: int = 0
    cached: int = 0


@dataclass(frozen=True)
class FlopCounts:
    """FLOPs of a model by block; `print` and notebooks show a summary and a table."""

    blocks: tuple[BlockFlops, ...]
    rest: BlockFlops

    @property
    def dense(self) -> int:
        """FLOPs of the dense model."""
        return self.rest.dense + sum(row.dense for row in self.blocks)

    @property
    def routed(self) -> int:
        """FLOPs of the routed model, with routers and importance."""
        return self.rest.routed + sum(row.routed for row in self.blocks)

    @property
    def importance(self) -> int:
        """FLOPs of importance, included in `routed`."""
        return sum(row.importance for row in self.blocks)

    @property
    def share(self) -> float:
        """FLOPs of the routed model over those of the dense one."""
        return self.routed / self.dense

    def summary(self) -> list[str]:
        """Return the main figures, one line each."""
        cheaper = [row for row in self.blocks if row.kept < row.tokens]
        if not cheaper:
            return [f"{len(self.blocks)} blocks, which compute all tokens"]
        # Of tokens and not of blocks: those may differ in length.
        kept = sum(row.kept for row in cheaper)
        share = kept / sum(row.tokens for row in cheaper)
        return [f"{len(cheaper)} of {len(self.blocks)} blocks compute {share:.3f} of their tokens"]

    def rows(self) -> list[list[str]]:
        """Return the counts in MFLOPs as rows of a table, header first."""
        rows = [["block", "tokens", "kept", "dense MFLOPs", "routed MFLOPs", "router", "importance"]]
        for row in self.blocks:
            counts = (row.dense, row.routed, row.router, row.importance)
            rows.append([row.name, str(row.tokens), str(row.kept), *map(_mega, counts)])
        rest = self.rest
        rows.append(["everything else", "", "", _mega(rest.dense), _mega(rest.routed), "-", "-"])
        router = sum(row.router for row in self.blocks)
        totals = (self.dense, self.routed, router, self.importance)
        rows.append(["total", "", "", *map(_mega, totals)])
        return rows

    def __str__(self) -> str:
        header, *rows = self.rows()
        return "\n".join([*self.summary(), "", markdown_table(header, rows)])

    _repr_markdown_ = __str__  # Notebooks show it.


@dataclass(frozen=True)
class FlopReport(FlopCounts):
    """The cost of a model for one image, one caption, or both; `rest` is everything outside the blocks.

    Args:
        inputs: Shape of each input by name, such as channels, height and width of an image.
        added_parameters: Parameters beyond those of the dense model; negative where blocks share weights.
        activation_bytes: Peak activation memory in inference.
        training_bytes: Activations held for the backward pass at the end of the forward pass.
    """

    inputs: Mapping[str, tuple[int, ...]]
    parameters: int
    added_parameters: int
    dense_activation_bytes: int
    activation_bytes: int
    dense_training_bytes: int
    training_bytes: int

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain JSON values, totals included."""
        totals = {name: getattr(self, name) for name in _TOTALS}
        # JSON has no tuples.
        inputs = {name: list(shape) for name, shape in self.inputs.items()}
        return {**asdict(self), **totals, "inputs": inputs}

    @classmethod
    def from_dict(cls, fields: Mapping[str, object]) -> FlopReport:
        """Return the report that `to_dict` wrote."""
        return from_plain(cls, without(fields, _TOTALS), "flops")

    def summary(self) -> list[str]:
        """Return the main figures, one line each."""
        inputs = []
        for name, shape in self.inputs.items():
            sides = " x ".join(map(str, shape))
            # An input of one number has no sides.
            inputs.append(f"{name} {sides}".rstrip())
        return [
            f"{self.share:.3f} of the dense FLOPs (2 per multiply-add) for {', '.join(inputs)}: "
            f"{_mega(self.routed)} of {_mega(self.dense)} MFLOPs",
            *super().summary(),
            f"{self.parameters:,} parameters, {self.added_parameters:+,} against the dense model",
            f"peak activations in inference: {_mebi(self.activation_bytes)} "
            f"(dense {_mebi(self.dense_activation_bytes)})",
            f"activations held for the backward pass: {_mebi(self.training_bytes)} "
            f"(dense {_mebi(self.dense_training_bytes)})",
        ]


@dataclass(frozen=True)
class PrefillFlops(FlopCounts):
    """The cost of reading one prompt, one row per decoder layer; `rest` is the logits of the last token.

    If the prompt has pixels, the vision tower's blocks come first, and `rest` includes all other costs of images.

    Args:
        image_tokens: Image tokens among the `tokens` of the prompt.
        vision: The part of the cost before the language model reads the images; None for a prompt without pixels.
        cache_bytes: Bytes of the KV cache of the prompt, over all layers, in the model's dtype.
    """

    tokens: int
    image_tokens: int
    cache_bytes: int
    dense_cache_bytes: int
    vision: FlopCounts | None = None

    @property
    def cache_share(self) -> float:
        """KV cache of the prompt over that of the dense model."""
        return self.cache_bytes / self.dense_cache_bytes

    def summary(self) -> list[str]:
        """Return the main figures, one line each."""
        counted = "the FLOPs (2 per multiply-add)"
        if self.vision is None:
            counted = "the language model's FLOPs (2 per multiply-add; no vision tower, without pixels)"
        return [
            f"a prompt of {self.tokens} tokens, {self.image_tokens} of images: {self.share:.3f} of {counted}, "
            f"{self.cache_share:.3f} of the cache, {self.cache_bytes:,} bytes",
            *super().summary(),
        ]


def _mega(count: int) -> str:
    return f"{count / 1e6:,.2f}" if count else "-"


def _mebi(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
