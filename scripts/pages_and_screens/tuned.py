"""Labels of patches by a tower that is fine-tuned in the form in which it is run: dense, on patches without duplicates,
or on fewer pixels.

Axes: C classes, H and W rows and columns of patches, N patches.
"""

import copy
import math
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import mmod
from mmod.io.store import Store
from scripts.pages_and_screens import study
from scripts.pages_and_screens.rows import DENSE, Row
from scripts.photo_attempts import patches_of

ARMS = {DENSE: 1.0, "duplicate": 1.0, "0.75 of the side": 0.75}
"""Share of the image's sides that the tower of each arm gets."""
SEEDS = (0, 1, 2)
STEPS = 100
# The last blocks, which are tuned with the norm and the head behind them. The others stay as they are.
TUNED_BLOCKS = 4
RATE = 1e-4
WEIGHT_DECAY = 0.05
WARMUP = 10


def identity(name: str, arm: str, seed: int) -> dict[str, Any]:
    """Return what names a run of a set."""
    return {"tuned": name, "arm": arm, "seed": seed, "steps": STEPS, "blocks": TUNED_BLOCKS}


def is_done(store: Store, name: str) -> bool:
    """Return whether the store has all runs of a set."""
    return all(identity(name, arm, seed) in store for arm in ARMS for seed in SEEDS)


def tune(store: Store, examples: study.Examples, train: Sequence[study.Example], model: Any) -> None:
    """Put into the store what the tower of each arm and seed predicts for the tested pictures once it is tuned.

    Args:
        examples: The tested pictures, and those that the classifiers are fitted on.
        train: What the towers are tuned on.
    """
    with torch.inference_mode():
        heads = {share: study.head_of(store, examples, share, model) for share in set(ARMS.values())}
    for seed in SEEDS:
        for arm, share in ARMS.items():
            if identity(examples.name, arm, seed) not in store:
                drawn = [train[number] for number in order(len(train), seed)]
                value = run(copy.deepcopy(model), arm, heads[share], drawn, examples.test)
                store.put(identity(examples.name, arm, seed), value)


def run(
    model: Any, arm: str, head: study.Head, train: Sequence[study.Example], test: Sequence[study.Example]
) -> dict[str, Any]:
    """Tune a model on one picture a step, and return its confusion on each tested picture and CPU times in seconds.

    Args:
        head: The classifier that training begins with, fitted on features of as many pixels.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for part in (*model.blocks[-TUNED_BLOCKS:], model.norm):
        part.requires_grad_(True)
    classifier = nn.Linear(*head.weight.shape)
    with torch.no_grad():
        classifier.weight.copy_(head.weight.T)
        classifier.bias.copy_(head.bias)
    if arm == "duplicate":
        mmod.route_(model, "pixelprune")
    forward = patches_of(model)
    row = Row(patches_of, ARMS[arm])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad] + [*classifier.parameters()]
    optimizer = torch.optim.AdamW(trained, RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate)
    # Classes as the head counts them; a class that it was not fitted on is left out.
    number_C = torch.full((len(study.CLASSES),), -100)
    number_C[head.classes] = torch.arange(len(head.classes))
    start = time.process_time()
    for image, label_HW in train:
        logit_NC = classifier(study.features(forward, row, image))
        loss = F.cross_entropy(logit_NC, number_C[label_HW.flatten()])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
    trained_seconds = time.process_time() - start
    confusions = []
    start = time.process_time()
    with torch.inference_mode():
        for image, label_HW in test:
            predicted_N = head.classes[classifier(study.features(forward, row, image)).argmax(1)]
            confusions.append(study.confusion(label_HW.flatten(), predicted_N))
    tested_seconds = time.process_time() - start
    return {"train_seconds": trained_seconds, "seconds": tested_seconds, "confusion": torch.stack(confusions)}


def share_of_rate(step: int) -> float:
    """Return the learning rate of a step as a share of the largest: linear warm-up, then half a cosine."""
    return min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / STEPS))


def order(examples: int, seed: int) -> list[int]:
    """Return the example of each step: all of them in a new order again and again, the same for every arm."""
    draw = random.Random(seed)
    numbers = list[int]()
    while len(numbers) < STEPS:
        numbers += draw.sample(range(examples), examples)
    return numbers[:STEPS]
