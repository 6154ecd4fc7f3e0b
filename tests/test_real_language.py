"""The script that skips layers and tokens of a pretrained language model, on a small model of random weights."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mmod.io.store import STORE
from mmod.training.chat.processor import create_bpe_processor
from scripts import real_language


def make_folder(folder: Path, depth: int) -> Path:
    """Write a small language model with its tokeniser, and a table of seven documents; return the table."""
    words = [f"word{number}" for number in range(200)]
    text = folder / "tales.tab"
    lines = ["Title\tContent", "string\tstring", "meta\t"]
    lines += [f"tale {number}\t{' '.join(words[number : number + 150])}" for number in range(7)]
    text.write_text("\n".join(lines))
    tokenizer = create_bpe_processor([" ".join(words)], 28, 14).tokenizer
    tokenizer.save_pretrained(folder)
    fields = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": depth, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **fields)).save_pretrained(folder)
    return text


def test_every_row_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = make_folder(tmp_path, depth=4)
    for name, value in {"LENGTH": 16, "CHUNKS": 2, "ROUNDS": 1, "SHARES": (0.75,)}.items():
        monkeypatch.setattr(real_language, name, value)
    arguments = [str(tmp_path), str(text), "--output", str(tmp_path / "out")]
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["real_language.py", *arguments])
        real_language.main()
    # A line of a store begins with its checksum.
    lines = (tmp_path / "out" / STORE).read_text().splitlines()[1:]
    records = [json.loads(line[9:]) for line in lines]
    losses = {record["identity"]["row"]: record["value"] for record in records if "row" in record["identity"]}
    names = [record["identity"]["row"] for record in records if "row" in record["identity"]]
    assert len(names) == len(set(names))
    rows = json.loads((tmp_path / "out/results.json").read_text())
    assert [row[0] for row in rows] == names
    shares = {name: share for name, share, *_ in rows}
    assert shares["dense"] == 1
    assert all(share < 1 for name, share in shares.items() if name != "dense")
    # Plans are searched on the first and the last document, and all are measured on the others in two pieces each.
    assert all(len(values) == 2 * 5 for values in losses.values())
