"""The folder of a routed model, read by transformers alone: a warning that names the call to use."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import mmod
from tests.adapters.vlm_zoo import LINEAR, make_joint, make_language

ROOT = Path(__file__).parents[2]
MODELS = {"llama": make_language, "llava": make_joint, "qwen2.5-vl": make_joint}
WARNING = "holds a routed model, and from_pretrained has made a dense one"


@pytest.mark.parametrize("router", ["attention", "linear"])
@pytest.mark.parametrize("name", MODELS)
def test_a_dense_model_made_of_a_routed_folder_is_told_of(name: str, router: str, tmp_path: Path) -> None:
    config = mmod.RoutingConfig(router="attention", blocks=(1, 3)) if router == "attention" else LINEAR
    model = mmod.route_(MODELS[name](name), language=config)
    model.save_pretrained(tmp_path / "routed")
    with pytest.warns(UserWarning, match=WARNING) as caught:
        type(model).from_pretrained(tmp_path / "routed")
    # It points at the line that asked for the model.
    assert [warning.filename for warning in caught if WARNING in str(warning.message)] == [__file__]
    with pytest.warns(UserWarning, match=WARNING):
        type(model).from_pretrained(tmp_path / "routed", output_loading_info=True)
    mmod.unroute_(model).save_pretrained(tmp_path / "dense")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*routed model")
        assert mmod.is_routed(mmod.load_pretrained(tmp_path / "routed"))
        type(model).from_pretrained(tmp_path / "dense")


@pytest.mark.parametrize("imports", ["mmod, transformers", "transformers, mmod"])
def test_either_may_be_imported_first(imports: str, tmp_path: Path) -> None:
    mmod.route_(make_language("llama"), LINEAR.replace(tokens="all")).save_pretrained(tmp_path)
    code = f"import {imports}; transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr.count(WARNING) == 1
