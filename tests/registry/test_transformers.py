"""Folders of routed transformers models: the doors that open them, and what stands before the others."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

import mmod
from mmod.blocks import host_class
from mmod.methods.route import routing_configs
from mmod.registry.transformers import open_routed_folders
from tests.kit.bad_configs import nested
from tests.kit.cover import in_turn
from tests.kit.folders import make_image_model, save_image_model, side_of
from tests.kit.processes import run_processes
from tests.kit.vlm_zoo import LANGUAGE, LINEAR, make_joint, make_language, prompt, words

ROOT = Path(__file__).parents[2]
TEXT = LINEAR.replace(language={"tokens": "all"})
REFUSED = r"\n\nOpen this folder with mmod\.load_pretrained, or with an Auto class and trust_remote_code=True"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `from_pretrained` opens routed folders, in this test alone."""
    plain = vars(transformers.PreTrainedModel)["from_pretrained"]
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", plain)
    open_routed_folders()


def save(name: str, folder: Path) -> Any:
    model = make_language(name) if name in LANGUAGE else make_joint(name)
    mmod.route_(model, language=TEXT if name in LANGUAGE else LINEAR).save_pretrained(folder)
    return model


def same(again: Any, model: Any, batch: dict[str, Any]) -> bool:
    assert routing_configs(again) == routing_configs(model)
    with torch.no_grad():
        return torch.equal(again(**batch)[0], model(**batch)[0])


def auto_of(name: str) -> Any:
    return transformers.AutoModelForCausalLM if name in LANGUAGE else transformers.AutoModelForImageTextToText


# The doors stand before models of all types, and are the same.
DOORS = ("llama", "llava", "qwen2.5-vl")


@pytest.mark.parametrize("name", DOORS)
def test_routed_folders_give_routed_models(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    batch = words() if name in LANGUAGE else prompt(name, (1, 2))
    for again in (mmod.load_pretrained(tmp_path), auto_of(name).from_pretrained(tmp_path, trust_remote_code=True)):
        assert type(again) is type(model)
        assert same(again, model, batch)
        # A config is shared by models, dense ones too.
        assert not {"mmod", "auto_map", "transformers_weights"} & set(vars(again.config))
    for door in (auto_of(name), host_class(model), type(model)):
        with pytest.raises(ValueError, match=REFUSED):
            door.from_pretrained(tmp_path)


AUTOS = ("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSequenceClassification")
CLASSES = {
    "llama": ("LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification", *AUTOS),
    "llava": ("LlavaForConditionalGeneration", "LlavaModel", "LlamaForCausalLM", "CLIPVisionModel", *AUTOS),
}


def forget_mmod() -> None:
    """Let this process find no mmod."""
    sys.modules.update({name: None for name in sys.modules if name.partition(".")[0] == "mmod"})  # type: ignore[misc]


def open_with_every_class(folder: Path) -> None:
    """Check in a process that has no mmod that no class opens routed folders; above, its doors have it."""
    forget_mmod()
    for name, kinds in CLASSES.items():
        for kind, options in in_turn(kinds, ({}, {"attn_implementation": "eager"}, {"dtype": "auto"})):
            with pytest.raises(ValueError, match=r"no dense one|Unrecognized configuration class"):
                getattr(transformers, kind).from_pretrained(folder / name, **options)
        assert len(transformers.AutoConfig.from_pretrained(folder / name).to_dict()) > 10


def test_no_class_opens_a_routed_folder_as_a_dense_model(tmp_path: Path) -> None:
    for name in CLASSES:
        save(name, tmp_path / name)
    log = tmp_path / "log"
    assert run_processes(open_with_every_class, tmp_path, log=log) == [0], log.read_text()


def open_without_mmod(folder: Path) -> None:
    """Run the code of a routed folder in a process that has no mmod."""
    forget_mmod()
    transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def test_without_mmod_its_code_says_what_to_install(tmp_path: Path) -> None:
    save("llama", tmp_path)
    log = tmp_path / "log"
    assert run_processes(open_without_mmod, tmp_path, log=log) == [1]
    last = log.read_text().splitlines()[-1]
    assert "mmod" in last
    assert "Error" in last


def test_arguments_mean_what_they_always_do(tmp_path: Path) -> None:
    model = save("llama", tmp_path)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.bfloat16,
        attn_implementation="eager",
        device_map={"": "cpu"},
        output_loading_info=True,
        trust_remote_code=True,
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert (again.dtype, again.config._attn_implementation) == (torch.bfloat16, "eager")
    assert mmod.capacities(again) == mmod.capacities(model)
    # An argument that is an option of the config changes it.
    assert mmod.load_pretrained(tmp_path, rms_norm_eps=0.5).config.rms_norm_eps == 0.5


def test_auto_classes_open_parts_and_other_heads(tmp_path: Path) -> None:
    model = save("llama", tmp_path)
    with pytest.raises(
        TypeError, match="returns the model alone: with output_loading_info, call from_pretrained of its Auto"
    ):
        mmod.load_pretrained(tmp_path, output_loading_info=True)
    base = transformers.AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    assert isinstance(base, transformers.LlamaModel)
    batch = words()
    with torch.no_grad():
        assert torch.equal(base(**batch)[0], model.model(**batch)[0])
    base.save_pretrained(tmp_path / "base")
    heads = {"CausalLM": "lm_head", "SequenceClassification": "score", "TokenClassification": "score"}
    for task, head in heads.items():
        auto = getattr(transformers, f"AutoModelFor{task}")
        for folder in (tmp_path, tmp_path / "base"):
            other, report = auto.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
            known = task == "CausalLM" and folder == tmp_path
            assert {name.partition(".")[0] for name in report["missing_keys"]} == (set() if known else {head})
            assert all(bool(p.isfinite().all()) and not p.is_meta for p in other.parameters())
            kept = {name: p for name, p in other.state_dict().items() if ".router." in name}
            assert kept
            assert all(torch.equal(p, model.state_dict()[name]) for name, p in kept.items())


def test_pipelines_run_the_routed_model(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = mmod.route_(make_language("llama"), language=TEXT.replace(select=mmod.Threshold(0.5)))
    model.save_pretrained(tmp_path)
    tokenizer = Tokenizer(
        models.WordLevel({f"w{index}": index for index in range(model.config.vocab_size)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w1")
    tokens.save_pretrained(tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("w5 w9")["input_ids"] == [5, 9]
    options, text = {"max_new_tokens": 8, "do_sample": False}, "w5 w9 w11 w5 w7 w3"
    with torch.no_grad():
        expected = model.generate(**tokens(text, return_tensors="pt"), **options)
    run = transformers.pipeline("text-generation", model=str(tmp_path), trust_remote_code=True)
    assert run(text, return_tensors=True, **options)[0]["generated_token_ids"] == expected[0].tolist()


def test_weights_without_routers_are_refused(tmp_path: Path) -> None:
    model = save("llama", tmp_path)
    state = {name: value for name, value in model.state_dict().items() if ".router." not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    for load, options in (
        (mmod.load_pretrained, {}),
        (transformers.AutoModelForCausalLM.from_pretrained, {"trust_remote_code": True}),
    ):
        with pytest.raises(
            ValueError, match=r"do not fit: missing \['.*router.*Save the routed model with its added weights"
        ):
            load(tmp_path, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mmod.methods": None}, r"config\.json: mmod\.methods "),
        ({"mmod.methods": "text"}, r"config\.json: mmod\.methods "),
        ({"mmod.methods": []}, r"mmod\.methods must list"),
        ({"mmod.version": 99}, "saved as version 99"),
        ({"architectures": None}, r"names None, which is no model"),
        ({"architectures": ["os"]}, r"names 'os', which is no model"),
        # Names that transformers has, of no model.
        ({"architectures": ["pipeline"]}, r"names 'pipeline', which is no model"),
        ({"architectures": ["Trainer"]}, r"names 'Trainer', which is no model"),
    ],
)
def test_a_description_that_does_not_describe_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save("llama", tmp_path)
    described = nested(json.loads((tmp_path / "config.json").read_text()), change)
    # None stands for a field that is missing.
    described["mmod"] = {key: value for key, value in described["mmod"].items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=message):
        mmod.load_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["llama", "llava"])
@pytest.mark.usefixtures("opened")
def test_every_class_opens_routed_folders_where_a_program_asks(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    batch = words() if name in LANGUAGE else prompt(name, (1, 2))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    for made_by in (auto_of(name), host_class(model), type(model)):
        for options in ({}, {"config": config}, {"config": str(tmp_path)}):
            again = made_by.from_pretrained(pretrained_model_name_or_path=tmp_path, **options)
            assert type(again) is type(model)
            assert same(again, model, batch)
    with pytest.raises(OSError, match="elsewhere"):
        host_class(model).from_pretrained(tmp_path / "elsewhere")


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("name", ["llama", "llava"])
def test_dense_models_are_what_they_were(
    name: str, asked: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    plain = inspect.signature(transformers.PreTrainedModel.from_pretrained)
    if asked:
        request.getfixturevalue("opened")
    assert inspect.signature(transformers.PreTrainedModel.from_pretrained) == plain
    model = make_language(name) if name in LANGUAGE else make_joint(name)
    model.save_pretrained(tmp_path)
    for again in (
        auto_of(name).from_pretrained(pretrained_model_name_or_path=tmp_path),
        type(model).from_pretrained(pretrained_model_name_or_path=tmp_path),
        type(model).from_pretrained(tmp_path, config=model.config),
        auto_of(name).from_config(model.config),
    ):
        assert [type(module) for module in again.modules()] == [type(module) for module in model.modules()]
        assert all(type(module).__module__.partition(".")[0] != "mmod" for module in again.modules())
    assert auto_of(name).from_pretrained(tmp_path, dtype=torch.float16).dtype == torch.float16


def hosts_after(folder: Path, *codes: str) -> list[str]:
    """Run pieces of code in a process in a folder and return what each changed in other libraries, or printed."""
    watch = (
        "import sys, importlib\n"
        # What peft imports with it takes as long as peft, and nothing below looks at it.
        "sys.modules['bitsandbytes'] = None\n"
        "import torch, timm, open_clip, transformers, peft, accelerate\n"
        "from transformers.models.auto import modeling_auto\n"
        "import transformers.trainer, timm.models._registry as registry, open_clip.factory as factory\n"
        "kinds = [transformers.PreTrainedModel, transformers.PreTrainedConfig, transformers.Trainer, peft.PeftModel,\n"
        "         transformers.GenerationMixin, transformers.LlamaForCausalLM, torch.nn.Module]\n"
        "modules = [registry, factory, transformers.utils, transformers.modeling_utils, torch.nn.functional, torch]\n"
        "def plain(value):\n"
        "    return sorted(map(str, value)) if isinstance(value, (dict, set, list, tuple)) else id(value)\n"
        "def look():\n"
        "    autos = {k: v for k, v in vars(modeling_auto).items() if k.startswith('AutoModel')}\n"
        "    return {'meta_path': list(map(id, sys.meta_path)), 'hooks': list(map(id, sys.path_hooks)),\n"
        "        'none': [k for k, v in sys.modules.items() if v is None],\n"
        "        'autos': {k: len(getattr(v._model_mapping, '_extra_content', ())) for k, v in autos.items()},\n"
        "        **{str(each): {k: plain(v) for k, v in vars(each).items() if k[:2] != '__'} for each in kinds},\n"
        "        **{str(each): {k: plain(v) for k, v in vars(each).items() if k[:2] != '__'} for each in modules}}\n"
        f"for code in {codes!r}:\n"
        "    before = look()\n"
        "    exec(code)\n"
        "    after = look()\n"
        "    for key, value in before.items():\n"
        "        now = after[key]\n"
        "        if isinstance(value, dict):\n"
        "            now = {name: now.get(name) for name in value}\n"
        "        if now != value:\n"
        "            is_dict = isinstance(value, dict)\n"
        "            print(key, [name for name in value if now[name] != value[name]] if is_dict else now)\n"
        "    print('---')\n"
    )
    command, path = [sys.executable, "-c", watch], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=path)
    assert not done.returncode, done.stderr
    *changes, _ = done.stdout.split("---\n")
    return changes


def test_importing_mmod_changes_no_other_library(tmp_path: Path) -> None:
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "mmod").rglob("*.py")]
    # Those that are left out are imported to register names with timm and open_clip, or run a program.
    asked = ("registry.timm", "registry.open_clip")
    left_out = tuple(f"mmod.{name}" for name in asked)
    names = sorted(name for name in names if not name.startswith(left_out) and not name.endswith("__main__"))
    everything = (
        f"for name in {names!r}:\n"
        "    try:\n"
        "        importlib.import_module(name.removesuffix('.__init__'))\n"
        "    except ModuleNotFoundError as error:\n"
        "        assert error.name.partition('.')[0] != 'mmod', error\n"
    )
    # What the test looks at does show a change.
    called = "import mmod.registry.transformers as routed; routed.open_routed_folders()"
    # A folder beside a program is not taken for the library of its name.
    (tmp_path / "datasets").mkdir()
    available = "import transformers.utils; print(transformers.utils.is_datasets_available())"
    by_imports, by_call, hosts = hosts_after(tmp_path, everything, called, available)
    assert by_imports == ""
    assert "from_pretrained" in by_call
    assert hosts.split() == [str(any(distributions(name="datasets")))]


CLASSIFIER_DOORS = ["vit", "dinov2", "timm wrapper"]


@pytest.mark.parametrize("name", CLASSIFIER_DOORS)
def test_auto_classes_and_pipelines_open_routed_classifiers(name: str, tmp_path: Path) -> None:
    dense = save_image_model(name, tmp_path / "dense")
    model = mmod.route_(dense, "gradual")
    model.save_pretrained(tmp_path / "routed")
    auto = transformers.AutoModelForImageClassification.from_pretrained
    again = auto(tmp_path / "routed", trust_remote_code=True)
    images = torch.randn(2, 3, side_of(name), side_of(name))
    assert same(again, model, {"pixel_values": images})
    assert same(mmod.load_pretrained(tmp_path / "routed"), model, {"pixel_values": images})
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "dense")
    picture = Image.effect_noise((50, 40), 60).convert("RGB")
    pipeline = transformers.pipeline("image-classification", model=again, image_processor=processor)
    with torch.no_grad():
        expected = model(**processor(picture, return_tensors="pt")).logits.softmax(-1)[0]
    answers = {answer["label"]: answer["score"] for answer in pipeline(picture)}
    assert answers == pytest.approx({"cat": float(expected[0]), "dog": float(expected[1])})


@pytest.mark.parametrize("name", CLASSIFIER_DOORS)
def test_the_trainer_trains_and_saves_routed_classifiers(name: str, tmp_path: Path) -> None:
    model = mmod.route_(make_image_model(name), mmod.RoutingConfig(router="linear", capacity=0.5))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    side = side_of(name)
    pixels = [torch.randn(3, side, side, generator=generator) for _ in range(8)]
    samples = [{"pixel_values": image, "labels": place % 2} for place, image in enumerate(pixels)]
    options = {"max_steps": 2, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(tmp_path), save_strategy="no", **options)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=samples, eval_dataset=samples)
    trainer.train()
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert any(".router." in key for key in changed)
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.save_model(tmp_path / "saved")
    assert same(mmod.load_pretrained(tmp_path / "saved"), model.eval(), {"pixel_values": torch.stack(pixels)})
