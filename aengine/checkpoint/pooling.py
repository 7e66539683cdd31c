"""How a checkpoint makes a vector of a text, in the files that sentence-transformers writes beside the model.

modules.json                           which steps follow the model: a pooling, dense layers, a normalisation
1_Pooling/config.json                  which hidden states make the vector
2_Dense/config.json                    a matrix that it is multiplied by
config_sentence_transformers.json      prompts, by name
sentence_bert_config.json              the most tokens of a text
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from ..errors import ModelLoadError
from .gguf_file import GgufFile
from .value_reader import ValueReader, inner_path, read_any_json, read_json

_MODES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_OLD_MODES = {"mean_tokens": "mean", "cls_token": "cls"}
_SWITCH = "pooling_mode_"
_MODULES = "modules.json"
_MOST_LABELS = 1 << 16
_GGUF_MODES = {1: "mean", 2: "cls", 3: "last"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """Settings of a checkpoint's vectors and scores. Plain data."""

    mode: str = ""
    """ "mean", "cls" or "last"; "": it does not say."""
    dense: tuple[str, ...] = ()
    """Folders of the layers that follow, in order."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Beginnings of texts, by name."""
    default_prompt: str = ""
    """The beginning of texts for which none is named."""
    max_tokens: int | None = None
    """Most tokens of a text."""
    score_activation: str = ""
    """What makes a score of a cross-encoder's logit, a torch module by name; "": its config does not say."""
    fault: str = ""
    """Why the vectors can't be made, though the checkpoint says how."""

    def to_wire(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as plain data."""
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        return cls(**{**wire, "dense": tuple(wire.get("dense", ()))})


def read_pooling(folder: Path, settings: Mapping[str, Any]) -> PoolingConfig:
    """Read what there is. ``settings``: the content of config.json. Raises ModelLoadError: a file can't be read."""
    keys, prompts = ValueReader(settings), _optional(folder / "config_sentence_transformers.json")
    named = {name: text for name, text in prompts.mapping("prompts").items() if isinstance(text, str)}
    limit = _optional(folder / "sentence_bert_config.json").integer_or_none("max_seq_length", least=0)
    mode, dense, fault = "", [], ""
    for module in _modules(folder):
        kind, path = module.text("type").rpartition(".")[2], module.text("path")
        own = inner_path(folder, path, folder / _MODULES)
        if kind == "Pooling":
            mode, why_none = _mode(_optional(own / "config.json"))
            fault = why_none or fault
        elif kind == "Dense":
            dense.append(path)
        elif kind not in ("Transformer", "Normalize", "LogitScore"):
            fault = f"modules.json has a step of the type {kind!r:.80}, which aengine does not have"
    return PoolingConfig(
        mode=mode,
        dense=tuple(dense),
        prompts=named,
        default_prompt=named.get(prompts.text("default_prompt_name"), ""),
        max_tokens=limit or None,
        score_activation=keys.at("sentence_transformers").text("activation_fn")
        or keys.text("sbert_ce_default_activation_function"),
        fault=fault,
    )


def labels_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the classes of the head that classifies texts; (): there is none.

    ``settings``: the content of config.json.
    """
    keys = ValueReader(settings)
    if not "".join(keys.texts("architectures")[:1]).endswith("ForSequenceClassification"):
        return ()
    labels = keys.mapping("id2label")
    if not labels:
        return tuple(f"LABEL_{i}" for i in range(keys.integer("num_labels", 2, most=_MOST_LABELS)))
    by_id = {int(key): str(label) for key, label in labels.items() if key.isdecimal() and len(key) < 10}
    if len(by_id) < len(labels):
        raise keys.error("id2label", "must have numbers as keys")
    return tuple(label for _, label in sorted(by_id.items()))


def gguf_pooling(file: GgufFile) -> PoolingConfig:
    """Read the kind of pooling from a GGUF's metadata."""
    kind = file.metadata.get(f"{file.metadata.get('general.architecture')}.pooling_type")
    if not isinstance(kind, int) or kind <= 0:
        return PoolingConfig()
    fault = "" if kind in _GGUF_MODES else f"its pooling_type is {kind}, a reranker's head, which of a GGUF is not read"
    return PoolingConfig(mode=_GGUF_MODES.get(kind, ""), fault=fault)


def _mode(config: ValueReader) -> tuple[str, str]:
    """Return the pooling mode, and the reason if there is none."""
    given = config.raw("pooling_mode")
    if given is None:
        names = [name for name in config if name.startswith(_SWITCH) and config.raw(name) is True]
        modes = [_OLD_MODES.get(name := key.removeprefix(_SWITCH), name) for key in names] or ["mean"]
    else:
        modes = [given] if isinstance(given, str) else config.texts("pooling_mode")
    if len(modes) != 1 or modes[0] not in _MODES:
        return "", f"its pooling is {' and '.join(modes):.80}, and aengine has one of {', '.join(_MODES)}"
    if not config.flag("include_prompt", True):
        return "", "its pooling leaves out the tokens of the prompt (include_prompt), which aengine does not"
    return _MODES[modes[0]], ""


def _modules(folder: Path) -> list[ValueReader]:
    path = folder / _MODULES
    modules = read_any_json(path) if path.is_file() else []
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelLoadError(f"{path} must hold a list of JSON objects")
    return [ValueReader(module, str(path)) for module in modules]


def _optional(path: Path) -> ValueReader:
    return ValueReader(read_json(path) if path.is_file() else {}, str(path))
