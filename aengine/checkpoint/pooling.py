"""How a checkpoint makes a vector of a text, in the files that sentence-transformers writes beside the model.

modules.json                           which steps follow the model: a pooling, dense layers, a normalisation
1_Pooling/config.json                  which hidden states make the vector
2_Dense/config.json                    a matrix that it is multiplied by
config_sentence_transformers.json      prompts, by name
sentence_bert_config.json              the most tokens of a text
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from ..errors import ModelLoadError
from .gguf_file import GgufFile

__all__ = ["PoolingConfig", "gguf_pooling", "labels_of", "read_pooling"]

_MODES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_OLD_MODES = {"mean_tokens": "mean", "cls_token": "cls"}
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
        """Return what is not as it is by default."""
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        return cls(**{**wire, "dense": tuple(wire.get("dense", ()))})


def read_pooling(folder: Path, settings: Mapping[str, Any]) -> PoolingConfig:
    """Read what there is. ``settings``: the content of config.json. Raises ModelLoadError: a file can't be read."""
    prompts = _optional(folder / "config_sentence_transformers.json")
    named = {str(name): str(text) for name, text in (prompts.get("prompts") or {}).items()}
    limit = _optional(folder / "sentence_bert_config.json").get("max_seq_length")
    own = settings.get("sentence_transformers") or {}
    mode, dense, fault = "", [], ""
    for module in _modules(folder):
        kind = str(module.get("type", "")).rpartition(".")[2]
        path = str(module.get("path", ""))
        if kind == "Pooling":
            mode, why_none = _mode(_optional(folder / path / "config.json"))
            fault = why_none or fault
        elif kind == "Dense":
            dense.append(path)
        elif kind not in ("Transformer", "Normalize", "LogitScore"):
            fault = f"modules.json has a step of the type {module.get('type')!r}, which aengine does not have"
    return PoolingConfig(
        mode=mode,
        dense=tuple(dense),
        prompts=named,
        default_prompt=named.get(str(prompts.get("default_prompt_name")), ""),
        max_tokens=limit if isinstance(limit, int) and limit > 0 else None,
        score_activation=str(own.get("activation_fn") or settings.get("sbert_ce_default_activation_function") or ""),
        fault=fault,
    )


def labels_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the classes of the head that classifies texts; (): there is none.

    ``settings``: the content of config.json.
    """
    architecture = str((settings.get("architectures") or [""])[0])
    if not architecture.endswith("ForSequenceClassification"):
        return ()
    labels = settings.get("id2label") or {str(i): f"LABEL_{i}" for i in range(int(settings.get("num_labels") or 2))}
    return tuple(str(labels[key]) for key in sorted(labels, key=int))


def gguf_pooling(file: GgufFile) -> PoolingConfig:
    """Read the kind of pooling from a GGUF's metadata."""
    kind = file.metadata.get(f"{file.metadata.get('general.architecture')}.pooling_type")
    if not isinstance(kind, int) or kind <= 0:
        return PoolingConfig()
    fault = "" if kind in _GGUF_MODES else f"its pooling_type is {kind}, a reranker's head, which of a GGUF is not read"
    return PoolingConfig(mode=_GGUF_MODES.get(kind, ""), fault=fault)


def _mode(config: dict[str, Any]) -> tuple[str, str]:
    """Return the pooling, and why there is none."""
    given = config.get("pooling_mode")
    if given is None:
        switches = [name for name, is_on in config.items() if name.startswith("pooling_mode_") and is_on is True]
        names = [name.removeprefix("pooling_mode_") for name in switches]
        given = [_OLD_MODES.get(name, name) for name in names] or "mean"
    modes = [given] if isinstance(given, str) else list(given)
    if len(modes) != 1 or modes[0] not in _MODES:
        return "", f"its pooling is {' and '.join(map(str, modes))}, and aengine has one of {', '.join(_MODES)}"
    if config.get("include_prompt") is False:
        return "", "its pooling leaves out the tokens of the prompt (include_prompt), which aengine does not"
    return _MODES[modes[0]], ""


def _modules(folder: Path) -> list[dict[str, Any]]:
    path = folder / "modules.json"
    modules = _read(path) if path.is_file() else []
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelLoadError(f"{path} must hold a list of JSON objects")
    return modules


def _optional(path: Path) -> dict[str, Any]:
    value = _read(path) if path.is_file() else {}
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"can't read {path}: {error}") from error
