"""Routed models on the Hugging Face hub, with cards; `mmod.load_pretrained("hf-hub:owner/name")` gets them back."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from mmod.adapters import ADAPTERS, find_library
from mmod.analysis.flop_report import FlopCounts
from mmod.methods.base import as_evaluated, methods_of
from mmod.pretrained import save_pretrained
from mmod.values import check_value

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

_LOADING = 'import mmod\n\nmodel = mmod.load_pretrained("hf-hub:{repo}")'


def push_to_hub(
    model: nn.Module,
    repo: str,
    flops: FlopCounts,
    *,
    about: str = "",
    architecture: str | Mapping[str, object] | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    message: str = "Upload routed model",
) -> str:
    """Upload a routed model with its card.

    Args:
        model: A routed model of timm, open_clip or transformers.
        repo: "owner/name"; created if missing.
        flops: FLOPs by `mmod.flops` for an input of your choice.
        about: Markdown for the card: data, training, results with the command that makes them.
        architecture: For open_clip, see `mmod.save_pretrained`.
        private: Whether a new repository is private.
        token: Token of the hub; None takes that of the login.
        revision: Branch.
        message: Message of the commit.

    Returns:
        The address of the commit.
    """
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as folder:
        # Complete before anything is made on the hub.
        write_hub_folder(model, folder, repo, flops, about=about, architecture=architecture)
        hub = HfApi(token=token)
        made = hub.create_repo(repo, private=private, exist_ok=True).repo_id
        commit = hub.upload_folder(repo_id=made, folder_path=folder, revision=revision, commit_message=message)
    return str(commit.commit_url)


def write_hub_folder(
    model: nn.Module,
    folder: str | Path,
    repo: str,
    flops: FlopCounts,
    *,
    about: str = "",
    architecture: str | Mapping[str, object] | None = None,
) -> None:
    """Write what `push_to_hub` uploads into an empty folder: the saved model and its card, README.md."""
    with as_evaluated(model):
        card = model_card(model, repo, flops, about=about)
    if find_library(model) == "transformers":
        transformer: Any = model
        transformer.save_pretrained(folder)
    else:
        save_pretrained(model, folder, architecture=architecture)
    card.save(Path(folder) / "README.md")


def model_card(model: nn.Module, repo: str, flops: FlopCounts, *, about: str = "") -> ModelCard:
    """Return the card of a changed model: its methods, FLOPs and how they were counted; see `push_to_hub`."""
    from huggingface_hub import ModelCard, ModelCardData
    from huggingface_hub.utils import validate_repo_id

    methods = methods_of(model)
    library = find_library(model)
    if not methods or library is None:
        raise ValueError(
            f"a card is for models of {', '.join(ADAPTERS)} that methods changed, and not for this "
            f"{type(model).__name__}: upload the model itself"
        )
    check_value("about", about, str)
    check_value("repo", repo, str)
    validate_repo_id(repo)
    modules = dict(model.named_modules())
    counted = {row.name for row in flops.blocks}
    foreign = sorted(counted - set(modules))
    if foreign:
        raise ValueError(f"the FLOPs are of other blocks: this model has no {', '.join(foreign)}")
    data = ModelCardData(library_name="mmod", tags=["mmod", "mixture-of-depths", library])
    sections = [
        f"# {repo.rpartition('/')[2]}",
        f"A {type(model).__name__} of {library}, made cheaper by {', '.join(method.kind for method in methods)}.",
        about.strip(),
        f"## Use\n\n```python\n{_LOADING.format(repo=repo)}\n```",
        *(f"## Method: {method.kind}\n\n{method.card(model)}" for method in methods),
        f"## Cost\n\n```\n{flops}\n```",
        "Counted, not timed: 2 FLOPs per multiplication and addition, by `mmod.flops`, for the "
        "input named above. Time depends on the machine; `mmod evaluate` measures it.",
    ]
    text = "\n\n".join(section for section in sections if section)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n")
