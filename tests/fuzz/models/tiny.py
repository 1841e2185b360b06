"""The smallest model that a class of transformers builds from its configuration, in float64 with random weights.

Sizes follow from the names of a configuration's fields, also in its sub-configurations. `OTHER` has the values that do
not follow from names. `other_kinds` returns the kinds of layers that such a model lacks although its file defines them.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import re
from collections import OrderedDict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import configuration_utils
from transformers.models.auto import modeling_auto

from tests.fuzz.models.rules import HEAD_DIM, OTHER, small

TASKS = (
    "", "FOR_CAUSAL_LM", "FOR_MASKED_LM", "FOR_SEQUENCE_CLASSIFICATION", "FOR_TOKEN_CLASSIFICATION",
    "FOR_QUESTION_ANSWERING", "FOR_PRETRAINING", "FOR_MULTIPLE_CHOICE", "FOR_NEXT_SENTENCE_PREDICTION",
    "FOR_SEQ_TO_SEQ_CAUSAL_LM", "FOR_IMAGE_TEXT_TO_TEXT", "FOR_MULTIMODAL_LM", "FOR_TEXT_ENCODING",
)  # fmt: skip
"""The mappings of transformers' auto classes with models of text, some of which also take images and sound."""

MOST_PARAMETERS = 25_000_000

PROFILES: tuple[dict[str, int], ...] = (
    {"kv_heads": 2}, {"kv_heads": 4}, {"kv_heads": 2, "every": 1}, {"kv_heads": 4, "every": 1},
    {"kv_heads": 4, "layers": 4}, {"kv_heads": 4, "head_dim": 16, "hidden": 64},
)  # fmt: skip
"""The sizes to build a model with, tried one after the other until a model runs. `every`: also set fields that are
None.
"""


KINDS = {
    "layer_types": getattr(configuration_utils, "ALLOWED_ATTN_LAYER_TYPES", ()),
    "mlp_layer_types": getattr(configuration_utils, "ALLOWED_MLP_LAYER_TYPES", ()),
}
"""The fields of configurations that list the kind of each layer, and the kinds that transformers allows there."""

_LAYERS = ("num_hidden_layers", "n_layers", "num_layers")


class LayerKind(NamedTuple):
    """A kind of layer; `build` adds one layer of this kind to a model's usual layers."""

    config: str
    """The name of the configuration class that has the field."""
    field: str
    kind: str


class NotBuilt(Exception):
    """Raised if a class cannot be imported, or if its configuration does not produce a small model."""


def classes() -> dict[str, str]:
    """Return the names of the classes in transformers' mappings for text (`TASKS`), with their model types."""
    model_types: dict[str, str] = OrderedDict()
    for task in TASKS:
        for kind, names in getattr(modeling_auto, f"MODEL_{task}_MAPPING_NAMES".replace("__", "_")).items():
            for name in names if isinstance(names, (tuple, list)) else (names,):
                model_types.setdefault(name, kind)
    return dict(sorted(model_types.items()))


def class_of(name: str) -> Any:
    """Return the class of transformers with this name. Raises `NotBuilt` if it cannot be imported here."""
    try:
        kind = getattr(transformers, name)
        kind.forward  # noqa: B018  # a placeholder for a class whose libraries are missing raises here
        return kind
    except (ImportError, AttributeError) as error:
        raise NotBuilt(line(error)) from error


def takes_text(kind: Any) -> bool:
    """Return whether the `forward` of a class takes `input_ids`."""
    return "input_ids" in inspect.signature(kind.forward).parameters


def build(name: str, profile: dict[str, int], extra: LayerKind | None = None) -> Any:
    """Build a model with eager attention and random float64 weights, in training mode.

    `extra`: the kind of an additional layer. Errors of the class propagate.
    """
    kind = class_of(name)
    config = _config(kind.config_class, profile, OTHER.get(kind.config_class.model_type, {}), extra)
    for part in _all(config):
        part._experts_implementation = "eager"  # the grouped implementation does not support float64
    _check_size(kind, config)
    return filled(kind._from_config(config, attn_implementation="eager"))


def other_kinds(model: Any) -> list[LayerKind]:
    """Return the kinds of layers that the text part of `model` lacks although its files define them."""
    config: Any = model.config.get_text_config(decoder=True)
    fields, published, strings = _fields(type(config)), type(config)(), _strings_near(inspect.getfile(type(config)))
    missing = []
    for field, allowed in KINDS.items():
        if field in fields:
            kinds = strings | set(getattr(published, field, None) or ())
            kinds -= set(getattr(config, field, None) or ())
            missing += [LayerKind(type(config).__name__, field, kind) for kind in allowed if kind in kinds]
    return missing


@cache
def _strings_near(file: str) -> frozenset[str]:
    """Return all string literals in the configuration and model files next to this file."""
    folder = Path(file).parent
    files = [*folder.glob("modeling_*.py"), *folder.glob("configuration_*.py")]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    return frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def _check_size(kind: Any, config: Any) -> None:
    """Raise `NotBuilt` if the model has more than `MOST_PARAMETERS` parameters."""
    try:
        with torch.device("meta"):
            count = sum(x.numel() for x in kind._from_config(copy.deepcopy(config)).parameters())
    except Exception:  # inconclusive: some models cannot be built without numbers
        return
    if count > MOST_PARAMETERS:
        raise NotBuilt(f"{count:,} parameters at its smallest")


def filled(model: Any) -> Any:
    """Fill the model with random weights that depend only on their shapes and order; none is zero."""
    model = model.double().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):  # some heads have dropout that no configuration names
            module.p = 0.0
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = 0.3 if parameter.dim() < 3 else 0.15
            parameter.copy_(scale * noise + (parameter.dim() == 1))  # norms, biases and sinks around 1
        for buffer in model.buffers():
            if buffer.is_floating_point() and buffer.numel() > 1 and not buffer.any():  # biases of routers
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator, dtype=torch.float64))
    return model


def _config(kind: Any, profile: dict[str, int], options: dict[str, Any], extra: LayerKind | None) -> Any:
    fields = _fields(kind)
    defaults = None
    values: dict[str, Any] = {}
    for name, default in fields.items():
        if name in kind.sub_configs:
            continue
        value_ = small(name, default, fields, profile)
        if value_ is not None:
            values[name] = value_
    for name in kind.sub_configs:
        if name not in fields and not hasattr(kind, name):
            continue
        if defaults is None:
            defaults = kind()
        sub = getattr(defaults, name, None)
        if sub is not None:
            others = OTHER.get(sub.model_type, {}) | dict(options.get(name, {}))
            values[name] = _config(type(sub), profile, others, extra)
    values |= {name: value for name, value in options.items() if name not in kind.sub_configs}
    values = {name: value for name, value in values.items() if value is not ...}
    config = _make_config(kind, values)
    kinds = getattr(config, "layer_types", None)
    if kinds and "layer_types" not in values and "layer_types" in fields:
        layer_kinds = _layer_kinds(kind, kinds)
        if layer_kinds != list(kinds):
            layers = next((name for name in _LAYERS if name in fields), None)
            if layers is not None:
                values |= {layers: len(layer_kinds), "layer_types": layer_kinds}
                config = _make_config(kind, values)
    if extra is None or extra.config != kind.__name__:
        return config
    return _make_config(kind, {**values, **_with_layer(config, fields, extra)})


def _with_layer(config: Any, fields: dict[str, Any], extra: LayerKind) -> dict[str, Any]:
    """Return the configuration values for one additional layer of the kind `extra`."""
    lists = {field: list(getattr(config, field, None) or ()) for field in KINDS if field in fields}
    layers = next(name for name in _LAYERS if name in fields)
    changed: dict[str, Any] = {layers: getattr(config, layers) + 1}
    for field, kinds in lists.items():
        if kinds:
            changed[field] = [*kinds, extra.kind if field == extra.field else kinds[0]]
    if extra.kind == "sliding_attention" and "use_sliding_window" in fields:
        changed["use_sliding_window"] = True
    return changed


def _make_config(kind: Any, values: dict[str, Any]) -> Any:
    """Make a configuration. If needed, add a RoPE base, and sections of image positions that fit small heads."""
    needs_section = "mrope_section" in getattr(kind, "ignore_keys_at_rope_validation", ()) and not _is_nested(kind)
    arguments = values
    if needs_section and "rope_parameters" in _fields(kind):
        default = {"rope_type": "default", "rope_theta": 10000.0}
        dim = values.get("head_dim") or HEAD_DIM
        rope = {**default, **(getattr(kind(), "rope_parameters", None) or {})}
        half = int(dim * rope.get("partial_rotary_factor", 1.0)) // 2
        section = [half - 2 * (half // 3), half // 3, half // 3] if half > 2 else [half, 0, 0]
        arguments = {**values, "rope_parameters": {**rope, "mrope_section": section}}
    try:
        config = kind(**arguments)
    except Exception:  # a class that validates its sections differently: use its own; failures are counted as not built
        config = kind(**values)
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "rope_theta" in rope and rope["rope_theta"] is None:
        config = kind(**{**arguments, "rope_parameters": {**rope, "rope_theta": 10000.0}})
    return config


def _is_nested(kind: Any) -> bool:
    """Return whether a configuration has separate RoPE parameters for each kind of layer."""
    rope = getattr(kind(), "rope_parameters", None)
    return isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values())


def _layer_kinds(kind: Any, kinds: list[str]) -> list[str]:
    """Return the kind of each layer: one layer of each kind in the published configuration, and at least two layers."""
    usual = list(dict.fromkeys(getattr(kind(), "layer_types", None) or kinds))
    return usual if len(usual) > 1 else usual * 2


def _fields(kind: Any) -> dict[str, Any]:
    """Return the names and defaults of a configuration's arguments."""
    if dataclasses.is_dataclass(kind):
        return {
            entry.name: None if entry.default is dataclasses.MISSING else entry.default
            for entry in dataclasses.fields(kind)
            if entry.init
        }
    parameters = inspect.signature(kind.__init__).parameters.values()
    return {entry.name: entry.default for entry in parameters if entry.default is not inspect.Parameter.empty}


def _all(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs:
        if (sub := getattr(config, name, None)) is not None:
            yield from _all(sub)


def line(error: BaseException, most: int = 200) -> str:
    """Return the first lines of an error as one line of at most `most` characters, without memory addresses."""
    lines = [text_line.strip() for text_line in str(error).splitlines() if text_line.strip()]
    text = re.sub(r"0x[0-9a-f]+", "0x", " ".join(lines[:3]))
    return f"{type(error).__name__}: {text}"[:most]
