"""Features of images before the classifier, computed once and kept in a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mmod.adapters import find_library, find_part, image_facts, image_output, load_adapter
from mmod.adapters.images import resized_to_labels
from mmod.analysis.modes import in_mode
from mmod.data.loader import BatchStream
from mmod.io.store import Store
from mmod.training.engine.evaluate import decisions_of
from mmod.training.engine.kind import seed_draws
from mmod.training.engine.task import autocast

FeatureKind = Literal["head", "class", "mean", "patches"]
# Batches whose features are kept together.
_CHUNK = 4


class Features(NamedTuple):
    """Features of images.

    Attributes:
        x_ND: Float32 (images, channels); of patches, float16 (images * patches, channels).
        label_N: Classes, int64 (images,) or (images * patches,).
        kept_NL: Kept share of tokens (images, routed blocks).
    """

    x_ND: Tensor
    label_N: Tensor
    kept_NL: Tensor


def extract(
    model: nn.Module,
    stream: BatchStream,
    store: Store,
    identity: Mapping[str, object],
    kind: FeatureKind = "head",
    *,
    precision: str = "fp32",
    callback: Callable[[float], object] = lambda share: None,
) -> Features:
    """Compute the features of a stream's images, every few batches once.

    Random draws are a function of the batch's number, so that features do not depend on interruptions.

    Args:
        store: Keeps the features.
        identity: What stands there for the model, the stream and the kind.
    """
    read = feature_of(model, kind)
    total = stream.steps_per_epoch
    missing = [start for start in range(0, total, _CHUNK) if {**identity, "batch": start} not in store]
    # Everything behind the first missing batch is computed again: streams are read in order.
    first = next(iter(missing), total)
    batches = enumerate(stream.every_batch(0, first), first)
    with in_mode(False, model), torch.no_grad():
        for start in range(first, total, _CHUNK):
            chunk = []
            for number, (images, labels) in islice(batches, _CHUNK):
                # By batch, so that a run that goes on draws what an uninterrupted one would.
                seed_draws(0, number + 1, 0)
                # A batch none of whose images can be read is empty.
                if len(labels):
                    chunk.append(_features_of(model, read, images, labels, precision))
            store.put({**identity, "batch": start}, [torch.cat(column) for column in zip(*chunk)])
            callback(min(start + _CHUNK, total) / total)
    return read_features(store, identity)


def _features_of(
    model: nn.Module, read: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, precision: str
) -> Features:
    """Return the features of a batch, on the CPU."""
    device = next(model.parameters()).device
    with autocast(device, precision), decisions_of(model) as decisions:
        features = read(images.to(device)).float()
    shares = [routing.keep_BN.float().mean(1) for routing in decisions.values()]
    kept = torch.empty(len(labels), 0)
    if shares:
        kept = torch.stack(shares, 1)
    if features.ndim == 3:
        # Half precision: patches of a set take hundreds of times the room of its images' heads.
        features = resized_to_labels(model, features, images, labels.shape[1]).flatten(0, 1).half()
    return Features(features.cpu(), labels.flatten(), kept.cpu())


def read_features(store: Store, identity: Mapping[str, object]) -> Features:
    """Read the features that `extract` kept in a store."""
    starts = count(0, _CHUNK)
    # Ends at the first batch that the store does not have.
    chunks: Iterator[list[Tensor]] = iter(lambda: store.get({**identity, "batch": next(starts)}), None)
    # Those without a readable image are empty.
    parts = [*zip(*filter(None, chunks))]
    if not parts:
        raise ValueError("the images hold none that can be read: choose another split or folder")
    return Features(*map(torch.cat, parts))


def feature_of(model: nn.Module, kind: FeatureKind) -> Callable[[Tensor], Tensor]:
    """Return the function from images (B, C, H, W) to features (B, D), or (B, N, D) of patches.

    Args:
        kind: "head" is the input of the classifier, "class" the class token, "mean" the mean over patches, "patches"
            each patch.

    Example:
        >>> import timm
        >>> feature_of(timm.create_model("test_vit"), "mean")(torch.randn(2, 3, 160, 160)).shape
        torch.Size([2, 64])
    """
    # transformers has a class around models of timm, which says nothing of their tokens.
    host: Any = getattr(model, "timm_model", model)
    if find_library(host) == "transformers":
        return _feature_of_transformers(host, kind)
    if not hasattr(host, "forward_features") or not hasattr(host, "forward_head"):
        raise ValueError(f"{type(model).__name__} has no forward_features and forward_head, as timm's models do")
    _check_class_token(model, kind, getattr(host, "cls_token", None) is not None)

    def read(images: Tensor) -> Tensor:
        tokens: Tensor = host.forward_features(images)
        if kind == "head":
            return host.forward_head(tokens, pre_logits=True)
        return _pooled(tokens, tokens[:, host.num_prefix_tokens :], kind)

    return read


def _check_class_token(model: nn.Module, kind: FeatureKind, has_class_token: bool) -> None:
    if kind == "class" and not has_class_token:
        raise ValueError(f"feature 'class' needs a class token, this {type(model).__name__} has none; use 'mean'")


def _pooled(tokens_BND: Tensor, patches_BPD: Tensor, kind: FeatureKind) -> Tensor:
    """Return the class token (B, D), the mean patch (B, D) or all patches (B, P, D) of an image."""
    if kind == "class":
        return tokens_BND[:, 0]
    if kind == "mean":
        return patches_BPD.mean(1)
    return patches_BPD


def _feature_of_transformers(model: nn.Module, kind: FeatureKind) -> Callable[[Tensor], Tensor]:
    """Return the function from images to features of a model of transformers; see `feature_of`."""
    stack = find_part(model, "image")[1]
    tower: nn.Module = load_adapter("transformers").find_tower(model, stack.block_list)[1]
    _check_class_token(model, kind, stack.class_token)
    head = image_facts(model).head
    suffix = 0
    if stack.proof is not None:
        # Blocks get tokens at the end of a sequence in front; the tower returns them at the end.
        suffix = stack.proof.suffix
    prefix = stack.prefix - suffix

    def read(images: Tensor) -> Tensor:
        if kind == "head":
            if head:
                features = _input_of(model, head[0], images)
            else:
                features = image_output(model, images)
            if features.ndim != 2:
                raise ValueError(f"this {type(model).__name__} has no head and pools no tokens; use feature 'mean'")
            return features
        tokens: Tensor = tower(images).last_hidden_state
        return _pooled(tokens, tokens[:, prefix : tokens.shape[1] - suffix], kind)

    return read


def _input_of(model: nn.Module, head: str, images: Tensor) -> Tensor:
    """Return what the classifier of a model gets for images."""
    inputs: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(args[0])

    # The head's input is what the model itself pools, whatever its way.
    hook = model.get_submodule(head.rstrip(".")).register_forward_pre_hook(keep)
    try:
        model(images)
    finally:
        hook.remove()
    return inputs[0]
