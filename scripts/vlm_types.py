"""Count the image-text-to-text types of transformers that are routed: `python -m scripts.vlm_types`.

A type counts if a tiny model of it finds its image tokens, and with all of them kept computes what the dense model
does, in a pass and in cached generation. A tower counts if it is routed likewise. The counts are written to
`docs/notebook/results/hosts.json` and into the page.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

import mmod
from scripts import doc_tables, pages
from tests.kit.vlm_types import FAMILIES, IMAGE, VIDEO
from tests.kit.vlm_zoo import make_joint, prompt

RESULTS = doc_tables.DOCS / "notebook" / "results" / "hosts.json"
KEEP_ALL = mmod.RoutingConfig(router="stride", capacity=1.0, gate="identity")


class Outcome(NamedTuple):
    """What was routed in a type, and equal to the dense model with all tokens kept."""

    language: bool
    tower: bool


def outputs(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the tokens that are not padding, and generated ids."""
    ids = model.generate(
        **batch,
        max_new_tokens=4,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        suppress_tokens=[IMAGE, VIDEO],
    )
    return model(**batch).logits[batch["attention_mask"].bool()], ids


@torch.no_grad()
def check(kind: str) -> Outcome:
    """Return what of a type is routed."""
    batch = prompt(kind, (1, 2))
    images = batch["input_ids"] == IMAGE
    dense = outputs(make_joint(kind), batch)
    equal = {}
    for part, blocks in (("language", (1, 3)), ("image", (0,))):
        model = make_joint(kind)
        try:
            mmod.route_(model, **{part: KEEP_ALL.replace(blocks=blocks)})
        except ValueError:
            equal[part] = False
            continue
        logits, ids = outputs(model, batch)
        equal[part] = torch.equal(ids, dense[1]) and torch.allclose(logits, dense[0], atol=2e-5, rtol=1e-4)
        if part == "language":
            mmod.set_capacity_(model, 0.5)
            with mmod.trace(model) as decisions:
                model(**batch)
            skipped = [~routing.keep_BN & batch["attention_mask"].bool() for routing in decisions.values()]
            equal[part] &= all(bool(skips.any()) and not bool((skips & ~images).any()) for skips in skipped)
    return Outcome(equal["language"], equal["image"])


def table(outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """Return the table of the docs."""
    parts = [("language model", [kind for kind in outcomes if outcomes[kind].language])]
    parts.append(("vision tower", [kind for kind in outcomes if outcomes[kind].tower]))
    types = len(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return {
        "commands": ["python -m scripts.vlm_types"],
        "columns": ["routed", f"of {types} types in transformers {transformers.__version__}", "types"],
        "formats": ["{}", "{:d}", "{}"],
        "rows": [[part, len(kinds), ", ".join(f"`{kind}`" for kind in kinds)] for part, kinds in parts],
    }


def main() -> None:
    """Count, write the figures, and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    transformers.logging.set_verbosity_error()
    outcomes = {kind: check(kind) for kind in sorted(FAMILIES)}
    RESULTS.write_text(json.dumps({"types": table(outcomes)}, indent=1) + "\n")
    pages.update()
    print(Path(RESULTS).read_text())


if __name__ == "__main__":
    main()
