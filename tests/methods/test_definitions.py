"""Early exit against its slow definition; test_sources.py defines the other methods."""

from __future__ import annotations

import copy

import torch

from mmod.methods import Exit
from tests.kit.zoo import make_images, make_model


def test_images_leave_where_they_are_sure() -> None:
    dense, images, blocks = make_model("test_vit").double(), make_images("test_vit", 6).double(), (0, 2, 4)
    model = Exit(0.5, blocks).apply_(copy.deepcopy(dense))
    with torch.no_grad():
        for index in blocks:
            model.blocks[index].exit.head.weight.mul_(3)
    ends = []
    with torch.no_grad():
        for image, answer in zip(images, model(images)):
            x = dense.norm_pre(dense._pos_embed(dense.patch_embed(image[None])))
            for index, block in enumerate(dense.blocks):
                x = block(x)
                head = model.blocks[index].exit if index in blocks else dense
                logits = (
                    dense.forward_head(dense.norm(x)) if head is dense else head.head(head.fc_norm(head.norm(x)[:, 0]))
                )
                if (index in blocks and logits.softmax(dim=-1).max() >= 0.5) or index == len(dense.blocks) - 1:
                    break
            ends.append(index)
            torch.testing.assert_close(answer, logits[0], rtol=0, atol=1e-12)
    assert len(set(ends)) > 1


def test_training_deals_a_batch_out_among_exits() -> None:
    model, images = make_model("test_vit").double().train(), make_images("test_vit", 7).double()
    blocks = (1, 3)
    Exit(0.5, blocks).apply_(model)
    count = dict.fromkeys(blocks, 0)
    for index in blocks:
        head = model.blocks[index].exit
        head.register_forward_hook(lambda _, args, out, index=index: count.update({index: len(out)}))
    assert model(images).shape == (7, 7)
    assert count == {1: 3, 3: 2}
