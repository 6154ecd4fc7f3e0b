"""The promises of routing over random configs: each is refused with a reason, or keeps all of them.

`MMOD_FUZZ_DRAWS=1000 pytest tests/test_fuzz.py` tries 1000 configs for each model. A failure shows the simplest draw
that breaks the same promises.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import mmod
from mmod.adapters import find_library, find_stacks
from mmod.analysis import Prompt, Trace, flops
from mmod.analysis.counting import needed_shares
from mmod.analysis.flop_report import FlopReport, PrefillFlops
from mmod.routing import Routing, TokenGroups
from tests.kit.counting import flop_counter
from tests.kit.fuzz_draws import HOSTS, Draw, draw
from tests.kit.hosts import Host, Sample
from tests.kit.vlm_zoo import PATCHES

DRAWS = int(os.environ.get("MMOD_FUZZ_DRAWS", "3"))
PACKAGE = Path(mmod.__file__).parent


class Dense(NamedTuple):
    """A dense model and what routing has to give back."""

    model: nn.Module
    classes: list[type]
    keys: list[str]
    outputs: dict[tuple[int, bool], list[Tensor]]


@functools.cache
def dense_model(host: str, dtype: torch.dtype) -> Dense:
    model = HOSTS[host].make()
    # Rotary frequencies stay as they are, in which models are loaded.
    kept = [(module, module.inv_freq) for module in model.modules() if hasattr(module, "inv_freq")]
    model.to(dtype)
    for module, frequencies in kept:
        module.inv_freq = frequencies
    return Dense(model, [type(module) for module in model.modules()], list(model.state_dict()), {})


class Case(NamedTuple):
    """A routed model that runs on samples."""

    draw: Draw
    host: Host
    model: nn.Module
    samples: list[Sample]
    dense: list[Tensor]
    configs: dict[str, mmod.RoutingConfig]

    def run(self, samples: Sequence[Sample] | None = None) -> list[Tensor]:
        return self.host.outputs(self.model, self.samples if samples is None else samples)

    @property
    def exact(self) -> bool:
        return self.draw.dtype == torch.float32


def close(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-5) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected):
        scale = float(b.detach().abs().max().clamp(min=1)) if b.numel() else 1.0
        torch.testing.assert_close(a.detach(), b.detach(), rtol=tolerance, atol=tolerance * scale)


def same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected):
        assert torch.equal(a, b), f"differ by {float((a - b).detach().abs().max())}"


def refusal(case: Draw, invariants: Sequence[Callable[[Case], None]]) -> str | None:
    """Route a model and hold it to its promises; return why that is refused, or None."""
    host, dense = HOSTS[case.host], dense_model(case.host, case.dtype)
    model, samples, key = dense.model.train(case.training), host.samples(case.batch), (case.batch, case.training)
    with torch.no_grad():
        if key not in dense.outputs:
            dense.outputs[key] = host.outputs(model, samples)
    try:
        configs = {part: mmod.RoutingConfig(**fields) for part, fields in case.parts.items()}
        mmod.route_(model, **configs)
        if case.capacity is not None:
            mmod.set_capacity_(model, case.capacity)
        subject = Case(case, host, model, samples, dense.outputs[key], configs)
        with torch.no_grad():
            subject.run()
    except (ValueError, TypeError) as error:
        # What a host or Python raises is no refusal.
        if not Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(PACKAGE):
            raise
        return str(error)
    else:
        for invariant in invariants:
            invariant(subject)
        return None
    finally:
        if mmod.is_routed(model):
            mmod.unroute_(model)
        model.zero_grad()
        model.train(case.training)
        assert [type(module) for module in model.modules()] == dense.classes
        assert list(model.state_dict()) == dense.keys
        with torch.no_grad():
            same(host.outputs(model, samples), dense.outputs[key])


@contextmanager
def watched(model: nn.Module) -> Iterator[list[tuple[str, Tensor, Tensor]]]:
    """Collect what enters each block and what leaves it."""
    records: list[tuple[str, Tensor, Tensor]] = []
    blocks = [pair for stack in find_stacks(model).values() for pair in zip(stack.names, stack.blocks)]

    def look(name: str, args: tuple[Any, ...], output: Any) -> None:
        records.append((name, args[0].clone(), (output[0] if isinstance(output, tuple) else output).clone()))

    handles = [
        block.register_forward_hook(lambda _, args, output, name=name: look(name, args, output))
        for name, block in blocks
    ]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def changes_skipped(config: mmod.RoutingConfig) -> bool:
    """Return whether skipped tokens leave a block otherwise than they came."""
    return config.skipped != "pass" or config.operator != "block"


@torch.no_grad()
def blocks_see_all_tokens_and_copy_skipped_ones(case: Case) -> None:
    expected = case.run()
    with watched(case.model) as records, mmod.trace(case.model) as decisions:
        actual = case.run()
    if case.exact:
        close(actual, expected)
    routed = mmod.routed_blocks(case.model)
    for name, before, after in records:
        stack = name.rpartition(".")[0]
        assert before.shape == after.shape == next(x.shape for other, x, _ in records if other.startswith(stack)), name
        if name in decisions:
            routing: Routing = decisions[name]
            config = routed[name].router.config
            assert routing.keep_BN.shape == before.shape[:2], name
            if not changes_skipped(config):
                skipped = ~routing.keep_BN
                assert torch.equal(after[skipped], before[skipped]), name


@torch.no_grad()
def traces_hold_a_decision_of_every_block_and_change_none(case: Case) -> None:
    expected = case.run()
    recorded = {name: block.mod_state.routing for name, block in mmod.routed_blocks(case.model).items()}
    with mmod.trace(case.model) as decisions:
        same(case.run(), expected)
    can_skip = "language" not in case.configs
    if can_skip:
        assert list(decisions) == list(recorded)
    for name, routing in decisions.items():
        if case.draw.training:
            assert torch.equal(routing.keep_BN, recorded[name].keep_BN), name


@torch.no_grad()
def outputs_do_not_depend_on_the_batch(case: Case) -> None:
    if not case.exact:
        return
    together = case.run()
    close([case.run([sample])[0] for sample in case.samples], together)
    close(case.run(case.samples[::-1])[::-1], together)


def gradients_are_finite_and_change_no_output(case: Case) -> None:
    with torch.no_grad():
        expected = case.run()
    actual = case.run()
    if case.exact:
        close(actual, expected)
    loss = torch.stack([output.float().square().mean() for output in actual if output.numel()]).sum()
    if case.draw.training and any(config.losses for config in case.configs.values()):
        loss = loss + mmod.auxiliary_loss(case.model)
    loss.backward()
    for name, parameter in case.model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


@torch.no_grad()
def saved_models_load_bitwise(case: Case) -> None:
    expected = case.run()
    named = all(config.router.name != "function" for config in case.configs.values())
    with tempfile.TemporaryDirectory() as folder:
        try:
            again = case.host.reload(case.model, Path(folder))
        except ValueError as error:
            if named or "function" not in str(error):
                raise
            return
    assert mmod.capacities(again) == mmod.capacities(case.model)
    assert list(again.state_dict()) == list(case.model.state_dict())
    same(case._replace(model=again).run(), expected)


def at_full_capacity_and_gate_1_it_is_dense(case: Case) -> None:
    mmod.unroute_(case.model)
    mmod.route_(case.model, **{part: full(config) for part, config in case.configs.items()})
    with torch.no_grad():
        close(case.run(), case.dense, 1e-5 if case.exact else 3e-2)


def full(config: mmod.RoutingConfig) -> mmod.RoutingConfig:
    """Return a config that keeps all tokens and weighs none."""
    language = dataclasses.replace(config.language, gate_on="update")
    if language.inference_threshold is not None:
        language = dataclasses.replace(language, inference_threshold=0.0)
    return config.replace(
        capacity=1.0,
        select="topk" if config.select == "topk" else mmod.Threshold(0.0 if config.router.learns else -1e30),
        gate="step" if config.gate.name == "step" else "identity",
        language=language,
        losses={name: weight for name, weight in config.losses.items() if name != "load"},
    )


@contextmanager
def counted_operations(model: nn.Module) -> Iterator[FlopCounterMode]:
    """Count what torch's counter takes: no parameter that asks for a gradient, and no attention written as one op."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    model.requires_grad_(False)
    try:
        with flop_counter() as counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for parameter in learning:
            parameter.requires_grad_()


def counts_are_those_of_a_pass(case: Case) -> None:
    if not case.exact:
        return
    # A caption without padding, as reports assume.
    model, sample = case.model.eval(), case.host.samples(3)[2:]
    with mmod.trace(model) as decisions, torch.no_grad():
        case.run(sample)
    report = (
        _prefill(case, sample[0], decisions) if "language" in case.host.parts else _flops(case, sample[0], decisions)
    )
    with torch.no_grad(), counted_operations(model) as counter:
        if "text" in sample[0]:
            model(*(value.unsqueeze(0) for value in sample[0].values()))
        else:
            case.run(sample)
    counts, root = counter.get_flop_counts(), type(model).__name__
    counted, reported = counter.get_total_flops(), report.routed
    if "language" in case.host.parts:
        counted = sum(sum(counts.get(f"{root}.{row.name}", {}).values()) for row in report.blocks)
        reported = sum(row.routed for row in report.blocks)
    # A CPU takes importance from attention in fp32, which costs nothing more, and torch counts no products of vectors.
    least = reported - sum(row.importance + row.router for row in report.blocks)
    assert 0.99 * least <= counted <= 1.01 * reported, f"{counted} counted, {report}"


def _flops(case: Case, sample: Sample, decisions: Trace) -> FlopReport:
    chosen = any(config.select != "topk" for config in case.configs.values())
    of_transformers = find_library(case.model) == "transformers"
    arguments: Any = {"pixel_values": sample["image"][None]} if of_transformers else sample["image"].shape
    return flops(case.model, arguments, decisions if chosen else None)


def _prefill(case: Case, sample: Sample, decisions: Trace) -> PrefillFlops:
    shares = {
        name: float(routing.keep_BN[routing.tokens.free_BN].float().mean())
        for name, routing in decisions.items()
        if isinstance(routing.tokens, TokenGroups)
    }
    images = [PATCHES] * len(sample.get("pixel_values", ()))
    return flops(
        case.model, Prompt(sample["input_ids"].shape[1] - sum(images), images), needed_shares(case.model, shares)
    )


# What is checked of every draw, and what of every sixth.
CHEAP = (
    blocks_see_all_tokens_and_copy_skipped_ones,
    traces_hold_a_decision_of_every_block_and_change_none,
    outputs_do_not_depend_on_the_batch,
    gradients_are_finite_and_change_no_output,
)
COSTLY = (saved_models_load_bitwise, counts_are_those_of_a_pass, at_full_capacity_and_gate_1_it_is_dense)


def failure(case: Draw, invariants: Sequence[Callable[[Case], None]]) -> str | None:
    """Return how a draw breaks a promise, or None."""
    try:
        refusal(case, invariants)
    except Exception as error:
        dense_model.cache_clear()
        return f"{type(error).__name__}: {error}"
    return None


def simplest(case: Draw, invariants: Sequence[Callable[[Case], None]]) -> Draw:
    """Return the simplest draw that breaks one of the promises, too."""
    simpler = (other for other in case.simpler() if failure(other, invariants))
    return next((simplest(other, invariants) for other in simpler), case)


@pytest.mark.parametrize("host", HOSTS)
def test_a_config_is_refused_or_keeps_every_promise(host: str) -> None:
    for number in range(DRAWS):
        case, invariants = draw(host, number), (*CHEAP, *COSTLY[number % 6 : number % 6 + 1])
        if failure(case, invariants):
            case = simplest(case, invariants)
            pytest.fail(f"draw {number} of {host}: {case}: {failure(case, invariants)}")
