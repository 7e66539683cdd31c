"""Which of a checkpoint's matrices are quantised, and what a reader of a quantization_config is told."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from ....checkpoint.name_patterns import NamePatterns
from ....checkpoint.value_reader import ValueReader
from ....errors import ModelLoadError
from ..weight import WeightFormat

T = TypeVar("T")
U = TypeVar("U")

UNQUANTISED = "give the checkpoint in 16 or 32 bits that they were made from, or a .gguf file of the model"
"""The cure where weights can't be read as they are."""
NEVER_QUANTISED = re.compile(r"(^|\.)(lm_head|embed_tokens|router|gate|shared_expert_gate)$")
"""Matrices that are plain where nothing says which are quantised: the head, and those that choose experts."""
_IGNORED = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")
"""Keys of a quantization_config for the names of matrices that are left plain."""
_SCALES = ("_scale", "_scale_inv")
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Matrices of all experts in one tensor [num_experts, out_features, in_features], and what is in each from the top."""
_STACK_OF = {part: stack for stack, parts in STACKED.items() for part in parts}
_EXPERT_NUMBER = re.compile(r"\.experts\.\d+\.")
_EXPERT = re.compile(r"(.*\.experts)\.(\d{1,9})\.(\w+)")
_MOST_RULES = 256
"""Each is an automaton of its own, which takes some 10 ms to make."""


class QuantisedMatrices(Protocol):
    """Which of a checkpoint's matrices are quantised, and how."""

    @property
    def name(self) -> str:
        """Name of their format, or names of their formats, for messages."""

    def of(self, name: str) -> WeightFormat | None:
        """Return the format of the matrix of this name, as transformers spells it; None: it is kept as plain
        numbers."""


class PlainMatrices(NamedTuple):
    """The names of the matrices that are left plain.

    Those are in the list, and those of which the files have a "weight" without a scale, whatever the list says: some
    writers (transformers' FP8) never quantise the head or the routers, and list neither, or list a module for all that
    is below it; a stack of experts is no Linear, which writers would list. Of an expert alone the scale may be missing:
    where the next one has it, it is.
    """

    listed: NamePatterns
    stored: Collection[str] | None  # names of the tensors in the files; None: there are no files

    def __contains__(self, name: object) -> bool:
        expert = _EXPERT.fullmatch(str(name))
        if expert is None:
            is_stored = self._has_numbers(f"{name}.weight")
        else:
            stem, number, part = expert.groups()
            stack, following = f"{stem}.{_STACK_OF.get(part)}", f"{stem}.{int(number) + 1}.{part}.weight"
            is_stored = self._has_numbers(stack) or (
                self._has_numbers(f"{name}.weight") and not self._has_scale(following)
            )
        return is_stored or any(own in self.listed for own in whole_names(str(name)))

    def _has_numbers(self, tensor: str) -> bool:
        return tensor in (self.stored or ()) and not self._has_scale(tensor)

    def _has_scale(self, tensor: str) -> bool:
        """Return whether the files have a scale of this tensor: "a.weight_scale" of "a.weight"."""
        return any(f"{tensor}{kind}" in (self.stored or ()) for kind in _SCALES)


class AllButIgnored(NamedTuple):
    """`QuantisedMatrices` by a quantization_config: one format, and the names of those that are left plain."""

    format: WeightFormat
    ignored: PlainMatrices

    @property
    def name(self) -> str:
        return self.format.name

    def of(self, name: str) -> WeightFormat | None:
        return None if name in self.ignored else self.format


class StoredMatrices(NamedTuple):
    """`QuantisedMatrices` by the files: those that have a tensor "qweight"."""

    name: str
    stored: Collection[str] | None  # names of the tensors in the files; None: there are no files
    format_of: Callable[[str], WeightFormat | None]  # the format of the matrix of a name, if it is quantised

    def of(self, name: str) -> WeightFormat | None:
        if self.stored is None:
            return None if NEVER_QUANTISED.search(name) else self.format_of(name)
        return self.format_of(name) if f"{name}.qweight" in self.stored else None


Rules = list[tuple[NamePatterns, T]]
"""What is for names by patterns, of which the first that has a name counts."""


class Asked(NamedTuple):
    """What a reader is given: a quantization_config, and what its formats are to become."""

    config: Mapping[str, Any]
    where: str  # for messages: "config.json: quantization_config"
    plain: WeightFormat  # the format of what becomes plain numbers
    device: torch.device
    stored: Collection[str] | None = ()  # names of the tensors in the files, as transformers spells them; or no files
    dequantises: bool = False  # what the device can't multiply becomes plain numbers; else it is an error

    @property
    def values(self) -> ValueReader:
        return ValueReader(self.config, self.where)

    def rules(self, key: str, patterns: Mapping[str, T]) -> Rules[T]:
        """Return what is for names by regular expressions, those of ``key``. Raises ModelLoadError: they are too
        many, or wrong."""
        if len(patterns) > _MOST_RULES:
            raise ModelLoadError(f"{self.where}: {key} has {len(patterns)} patterns: {_MOST_RULES} at most are read")
        where = f"{self.where}: {key}"
        return [(NamePatterns([f"re:{pattern}"], where), value) for pattern, value in patterns.items()]

    def refusal(self, problem: str) -> ModelLoadError:
        """Return the error of weights that no format reads."""
        return ModelLoadError(f"{self.where}: {problem:.300}, which aengine does not read: {UNQUANTISED}")


def of_first_expert(name: str) -> str:
    """Return what the same tensor of a layer's first expert is called; of no expert's the name itself."""
    return _EXPERT_NUMBER.sub(".experts.0.", name)


def whole_names(name: str) -> tuple[str, ...]:
    """Return a matrix' name, and what it is called in a model for images and text, as its quantization_config has it
    (the opposite of `text_name`)."""
    return name, f"language_model.{name}", f"model.language_model.{name.removeprefix('model.')}"


def first_rule(rules: Rules[T], name: str, otherwise: U) -> T | U:
    """Return what is for the matrix of this name by the first pattern that has it."""
    names = whole_names(name)
    return next((value for patterns, value in rules if any(own in patterns for own in names)), otherwise)


def ignored_matrices(asked: Asked) -> PlainMatrices:
    """Return the names that are left plain. In ModelOpt's, a star stands for any letters. Raises ModelLoadError."""
    key = next((name for name in _IGNORED if asked.config.get(name)), "ignore")
    names = asked.values.texts(key)
    if asked.config.get("quant_method") in ("modelopt", "modelopt_fp4"):
        names = [_of_stars(name) for name in names]
    return PlainMatrices(NamePatterns(names, f"{asked.where}: {key}"), asked.stored)


def _of_stars(name: str) -> str:
    """A pattern of `NamePatterns` for a name with stars."""
    if "*" not in name:
        return name
    letters = [
        letter if letter.isalnum() or letter == "_" else ".*" if letter == "*" else f"[{letter}]" for letter in name
    ]
    return f"re:{''.join(letters)}$"
