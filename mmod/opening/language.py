"""Models of transformers that read text, with images or without: from folders, from the hub, or from a config."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers.models.auto import modeling_auto

from mmod.adapters.saving import KEY
from mmod.io.sums import check_weights
from mmod.io.tensors import check_complete
from mmod.names import one_line, similar
from mmod.opening.opened import Opened, Options
from mmod.opening.runs import check_source
from mmod.opening.transformers import hidden_bars
from mmod.pretrained import HUB, load_pretrained, make_transformers


def reads_text(model_type: str) -> bool:
    """Return whether transformers has a model of a type that continues text, of images or of text alone."""
    names = (modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return any(model_type in mapping for mapping in names)


def open_language(source: str, options: Options) -> Opened:
    """Open a model by a folder or by its name on the hub; see `mmod.open_model`.

    Without weights, `options.dense` asks for the architecture of the dense model.
    """
    options.refuse(repr(source), "checkpoint", "image_size")
    check_source(source, owned=False)
    is_local = Path(source).exists()
    if options.pretrained:
        check_complete(source)
    config = AutoConfig.from_pretrained(source, local_files_only=is_local, trust_remote_code=False)
    is_changed = isinstance(getattr(config, KEY, None), dict)
    prepare = partial(open_processor, source)
    if not options.pretrained:
        make = partial(_drawn, args=options.args)
        if is_changed:
            # Of a changed model, a dense one is made dense: methods may replace weights that it has.
            model = make_transformers(config, source, make, options.dense)
        else:
            model = make(config)
        return Opened(model, f"the architecture of {source} with random weights", prepare)
    with hidden_bars():
        if is_changed:
            folder = source if is_local else f"{HUB}{source}"
            model = load_pretrained(folder, **options.args)
        else:
            check_weights(source)
            model = _auto(config).from_pretrained(source, **options.args)
    return Opened(model, f"the model of transformers in {source}", prepare)


def open_described(fields: Mapping[str, object], args: Mapping[str, object]) -> Opened:
    """Make a model with random weights from fields of a transformers config."""
    model = _drawn(config_of(fields), args)
    return Opened(model, f"a {type(model).__name__} with random weights")


def _drawn(config: object, args: Mapping[str, object]) -> Any:
    return _auto(config).from_config(config, **args)


def _auto(config: Any) -> Any:
    # A model that reads images may have a class for text alone as well, without its tower.
    if config.model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def open_processor(source: str | Path, **args: object) -> Any:
    """Return the processor of a folder or of a name on the hub, or the tokeniser of a model that reads text alone."""
    check_source(source, owned=False)
    try:
        return AutoProcessor.from_pretrained(source, **args)
    except (OSError, ValueError) as error:
        # The first sentence: others advise what transformers alone would need.
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(" :")
        fault = "is no processor on the hub"
        if Path(source).is_dir():
            fault = f"holds no whole processor: save it there too, `processor.save_pretrained({str(source)!r})`"
        raise ValueError(f"{str(source)!r} {fault}: {reason}") from error


def open_tokenizer(folder: str | Path) -> tuple[object, int]:
    """Return the tokeniser of a folder of an image-text model, and the length of its captions in tokens."""
    # Without this file transformers makes a tokeniser that knows no word.
    if not (Path(folder) / "tokenizer_config.json").is_file():
        raise ValueError(
            f"{str(folder)!r} holds no tokeniser of its captions: save it there too, "
            f"`processor.save_pretrained({str(folder)!r})`"
        )
    length = AutoConfig.from_pretrained(folder).text_config.max_position_embeddings
    return AutoTokenizer.from_pretrained(folder), int(length)


def config_of(fields: Mapping[str, Any]) -> object:
    """Return the transformers config with these fields, among them `model_type`; misspelled ones are refused.

    Example:
        >>> config_of({"model_type": "llama", "hiden_size": 32})
        Traceback (most recent call last):
        ValueError: model.config.hiden_size is no field of a LlamaConfig: is hidden_size meant?
    """
    try:
        config = AutoConfig.for_model(**fields)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise ValueError(f"model.config describes no model of transformers: {one_line(error)}") from error
    _check_names(config, fields, "model.config")
    return config


def _check_names(config: Any, fields: Mapping[str, object], name: str) -> None:
    # The fields of the class: an instance also holds whatever it was given.
    known = [*vars(type(config)()), *config.attribute_map]
    for key, value in fields.items():
        if key not in known:
            # Models read some fields that their configs do not declare, so only names that look misspelled are refused.
            near = similar(key, known, cutoff=0.8)
            if near:
                raise ValueError(f"{name}.{key} is no field of a {type(config).__name__}: is {near[0]} meant?")
        part = getattr(config, key, None)
        if isinstance(value, Mapping) and hasattr(part, "attribute_map"):
            _check_names(part, value, f"{name}.{key}")
