"""Adapters of LoRA in PEFT's format: which matrices of a model they change, by how much, and of what rank.

    adapter_config.json        r, lora_alpha, use_rslora, alpha_pattern, ...
    adapter_model.safetensors  base_model.model.<matrix>.lora_A.weight [rank, in], lora_B.weight [out, rank]
                               of the experts of a layer, where one parameter has the matrices of all of them,
                               lora_A.weight [experts * rank, in], lora_B.weight [out, rank * experts]

With an adapter a product by the matrix W is x W^T + scale (x A^T) B^T; scale = lora_alpha / r, with use_rslora
lora_alpha / sqrt(r), where alpha_pattern and rank_pattern give some matrices other numbers. Hu et al. 2021,
arXiv:2106.09685; rsLoRA: arXiv:2312.03732. The files are read as checkpoints are: their headers here, without torch.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ModelLoadError
from . import hub
from .name_patterns import NamePatterns
from .safetensors_files import json_of_metadata, tensor_places, text_name
from .value_reader import ValueReader, read_json

MOST_RANK = 512  # the most that max_lora_rank may be
MOST_ADAPTERS = 1 << 16
"""Adapters that an engine can know."""
MOST_TENSORS = 1 << 17
CONFIG_IN_HEADER = "adapter_config"
"""Where the head of a safetensors file has the settings, if the adapter is no folder."""
_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_FILES = [_CONFIG, _WEIGHTS]
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<matrix>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")
_PLAIN = re.compile(r"[\w.]+")
_MOST_PATTERNS = 64  # regular expressions in alpha_pattern
_REFUSED = {
    "use_dora": "DoRA, which normalises the changed matrices",
    "fan_in_fan_out": "matrices that are stored the other way round",
    "lora_bias": "biases of the factors",
    "modules_to_save": "whole modules beside the factors",
    "trainable_token_indices": "embeddings of single tokens",
    "layer_replication": "layers that are repeated",
    "alora_invocation_tokens": "an adapter that is active from some tokens on",
    "arrow_config": "a choice among adapters by each token",
    "use_qalora": "inputs that are pooled by the base's groups",
}
"""Settings of adapters that change more than products, and what they stand for."""
_CHANGING_BASES = "pissa", "olora", "corda", "loftq", "lora_ga"
"""Beginnings of what init_lora_weights says where PEFT changes the base's weights before it adds the factors."""


_OF_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<expert>[0-9]{1,6})\.(?P<matrix>\w+)")
GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""transformers' parameters that have the matrices of all experts of a layer."""

Matrices = Mapping[str, Sequence[int]]
"""Output and input features of the matrices of a model that adapters can change, by name. Of experts how many there
are, too: of a matrix each, with "*" in place of the expert's number, and of parameters that have those of all."""


class LoraMatrix(NamedTuple):
    """The change of one matrix [out_features, in_features]."""

    rank: int
    in_features: int
    out_features: int
    scale: float
    names: tuple[str, str]  # A's and B's name in the file
    num_experts: int = 0  # experts whose matrices these are; 0: it is one matrix


@dataclass(frozen=True, slots=True)
class LoraFiles:
    """An adapter whose headers are sound. Compared by identity of its place alone."""

    path: str  # absolute path of the folder, or of the one file that has all
    rank: int  # the largest of its matrices, those of experts apart; 0: it has no others
    expert_rank: int  # the largest of experts' matrices; 0: it has none
    matrices: Mapping[str, LoraMatrix]  # keys are the matrices' names in transformers' spelling, without ".weight"

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def weights(self) -> Path:
        """The file of its tensors."""
        path = Path(self.path)
        return path / _WEIGHTS if path.is_dir() else path


def find_lora(source: str, max_rank: int = MOST_RANK, max_expert_rank: int = MOST_RANK) -> LoraFiles:
    """Return the adapter in a folder, or of a hub id, which is fetched. Blocking.

    Raises ModelLoadError: there is none, it is damaged, or of a kind that can't be served; the message says what helps.
    """
    try:
        folder = Path(source).expanduser()
        is_folder = folder.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a null character, a ~user that is none
        raise ModelLoadError(f"{source[:200]!r} can't be an adapter's folder: {error}") from error
    if not is_folder:
        if not hub.is_hub_id(source) or folder.parent.is_dir():
            raise ModelLoadError(f"{source[:200]!r} is no folder: give the one that has {_CONFIG} and {_WEIGHTS}")
        folder = hub.fetch_files(source, _FILES)
    return read_lora(folder.resolve(), max_rank, max_expert_rank)


def read_lora(place: Path, max_rank: int = MOST_RANK, max_expert_rank: int = MOST_RANK) -> LoraFiles:
    """Return the adapter in a folder, or in a file with its settings. Raises as `find_lora`."""
    weights, where = (place, str(place)) if place.is_file() else (place / _WEIGHTS, str(place / _CONFIG))
    config = ValueReader(json_of_metadata(place, CONFIG_IN_HEADER) if place.is_file() else _config_of(place), where)
    _check_kind(config)
    reader = _MatrixReader(config, where, weights)
    shapes = {name: place.shape for name, place in tensor_places(weights).items()}
    if len(shapes) > MOST_TENSORS:
        raise ModelLoadError(f"{weights} has {len(shapes)} tensors: {MOST_TENSORS} at most are possible")
    factors: dict[str, dict[str, str]] = {}
    for name in shapes:
        match = _NAME.fullmatch(name)
        if match is None:
            raise ModelLoadError(
                f"{weights} has the tensor {name:.200}, which is no lora_A or lora_B of a linear layer: "
                f"train the adapter for linear layers alone, without biases and modules_to_save"
            )
        factors.setdefault(match["matrix"], {})[match["factor"]] = name
    matrices, targets = {}, set(config.texts("target_parameters"))
    for matrix, names in factors.items():
        name = _parameter(weights, matrix, factors, targets)
        if name in matrices:
            raise ModelLoadError(f"{weights} changes {name:.200} twice, by two of its names")
        matrices[name] = reader.read(name, names, shapes)
    ranks = dict.fromkeys((False, True), 0)
    for name, own in matrices.items():
        of_experts = is_of_experts(name)
        ranks[of_experts] = max(ranks[of_experts], own.rank)
        most, setting = (max_expert_rank, "max_lora_expert_rank") if of_experts else (max_rank, "max_lora_rank")
        if own.rank > most:
            raise ModelLoadError(
                f"{place}: {name:.200} has the rank {own.rank}, and the engine takes at most {setting}={most}: start "
                f"it with a larger one"
            )
    if not matrices:
        raise ModelLoadError(f"{weights} has no tensors")
    return LoraFiles(str(place), ranks[False], ranks[True], matrices)


def is_of_experts(name: str) -> bool:
    """Return whether a matrix is one of experts', by its name."""
    return ".experts." in name


def _parameter(file: Path, matrix: str, factors: Container[str], targets: Container[str]) -> str:
    """Return the name of what is changed. Of experts whose matrices are parameters of one module PEFT writes the
    module's name, and behind it ".base_layer" for the first of two."""
    module, _, last = matrix.rpartition(".")
    if last == "base_layer" and module.endswith(".experts"):
        return f"{module}.{GATE_UP}"
    if last != "experts":
        return matrix
    if f"{matrix}.base_layer" in factors:
        return f"{matrix}.{DOWN}"
    found = [name for name in (f"{matrix}.{GATE_UP}", f"{matrix}.{DOWN}") if any(end in targets for end in _ends(name))]
    if len(found) != 1:
        raise ModelLoadError(f"{file} has factors of {matrix:.200}, and target_parameters does not say of which matrix")
    return found[0]


def _ends(name: str) -> Iterator[str]:
    """Yield the name and each of its ends after a dot."""
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name


def _config_of(folder: Path) -> dict[str, Any]:
    """Return the settings of the adapter in a folder, which has its weights, too. Raises as `find_lora`."""
    if not (folder / _CONFIG).is_file():
        raise ModelLoadError(f"{folder} has no {_CONFIG}: give the folder of an adapter in PEFT's format")
    if not (folder / _WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        why = "adapter_model.bin alone, a pickle, which can run any code: save it" if pickled else "no weights: save it"
        raise ModelLoadError(f"{folder} has {why} as {_WEIGHTS} (PEFT's save_pretrained does)")
    return read_json(folder / _CONFIG)


def named_as(files: LoraFiles, matrices: Matrices) -> LoraFiles:
    """Return an adapter with the model's own names of the matrices. Raises ModelLoadError: it changes others than the
    model has, or one of them twice."""
    own = {model_name(name, matrices): matrix for name, matrix in files.matrices.items()}
    if len(own) < len(files.matrices):
        raise ModelLoadError(f"{files.path} changes a matrix twice, by two of its names")
    files = replace(files, matrices=own)
    check_matrices(files, matrices)
    return files


def model_name(name: str, known: Container[str]) -> str:
    """Return a matrix' name as a model has it, in which it may be part of another: ``known`` are those of the model."""
    stack, expert = stack_of(name)
    own = next((one for one in (stack, text_name(stack), f"model.{stack}") if one in known), None)
    if own is None:
        return name
    return own if expert is None else name_of_expert(own, expert)


def stack_of(name: str) -> tuple[str, int | None]:
    """Return the name with "*" in place of an expert's number, and that number, if it has one."""
    match = _OF_EXPERT.fullmatch(name)
    return (name, None) if match is None else (f"{match['experts']}.*.{match['matrix']}", int(match["expert"]))


def name_of_expert(stack: str, expert: int) -> str:
    """Return the name of one expert's matrix, for the name with "*"."""
    return stack.replace(".*.", f".{expert}.")


def check_matrices(files: LoraFiles, matrices: Matrices) -> None:
    """Raise ModelLoadError for an adapter that changes other matrices than a model has, or those of a layer's experts
    in two forms."""
    forms: dict[str, bool] = {}
    for name, own in files.matrices.items():
        stack, expert = stack_of(name)
        if is_of_experts(name):
            layer = name.partition(".experts.")[0].rpartition(".")[0]
            if forms.setdefault(layer, expert is None) != (expert is None):
                raise ModelLoadError(f"{files.path} changes experts of {layer:.200} one by one and all together")
        shape = None if "*" in name else matrices.get(stack)
        if shape is None or (expert is not None and expert >= shape[2]):
            there = sorted({known.rpartition(".")[2] for known in matrices})
            raise ModelLoadError(
                f"{files.path} changes {name:.200}, which is none of the matrices of this model that adapters can "
                f"change ({', '.join(there[:20])} of its layers): is the adapter of another base model?"
            )
        found = [own.out_features, own.in_features, *([own.num_experts] if own.num_experts else [])]
        wanted = list(shape[: 2 if expert is not None else None])
        if found != wanted:
            raise ModelLoadError(
                f"{files.path} changes {name:.200} as a matrix of {_shown(found)}, and it has {_shown(wanted)} in this "
                f"model: the adapter is of another base model"
            )


def _shown(shape: Sequence[int]) -> str:
    """Return output and input features, and of how many experts, as text."""
    return " x ".join(map(str, shape))


def _check_kind(config: ValueReader) -> None:
    kind = config.name("peft_type") or "LORA"
    if kind != "LORA":
        raise config.error("peft_type", "is not served: of PEFT's adapters LORA alone is")
    for key, what in _REFUSED.items():
        if config.raw(key):
            raise config.error(key, f"is not served ({what}): train the adapter without it")
    start = config.raw("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGING_BASES):
        why = "is not served, as it changes the base's own weights: save the adapter with PEFT's"
        raise config.error("init_lora_weights", f"{why} path_initial_model_for_weight_conversion")
    if config.name("bias") not in ("", "none"):
        raise config.error("bias", "is not served: train the adapter with bias='none'")


class _ByName:
    """A number of a matrix: that of the first of the setting's patterns that fits its name, as PEFT finds it."""

    def __init__(self, config: ValueReader, where: str, patterns: str, otherwise: float) -> None:
        """``patterns``: name of the setting."""
        self._otherwise = otherwise
        self._values: list[float] = []
        self._names: dict[str, int] = {}  # ends of names, or with "^" whole ones, to the place in that list
        self._patterns: list[tuple[int, NamePatterns]] = []
        where = f"{where}: {patterns}"
        for place, pattern in enumerate(config.mapping(patterns)):
            self._values.append(config.at(patterns).number(pattern))
            inner = pattern.removeprefix("^").removesuffix("$")
            if _PLAIN.fullmatch(inner):
                self._names.setdefault(pattern.removesuffix("$"), place)
            elif len(self._patterns) < _MOST_PATTERNS:
                beginning = "" if pattern.startswith("^") else r"(?:.*\.)?"
                self._patterns.append((place, NamePatterns([f"re:{beginning}(?:{inner})$"], where)))
            else:
                raise ModelLoadError(f"{where} has more than {_MOST_PATTERNS} regular expressions")

    def __call__(self, matrix: str) -> float:
        place = min(self._places(matrix), default=None)
        return self._otherwise if place is None else self._values[place]

    def _places(self, matrix: str) -> Iterator[int]:
        """Yield the places of what fits the name: its end after a dot, or the whole."""
        for name in (f"^{matrix}", *_ends(matrix)):
            yield from [self._names[name]] if name in self._names else []
        yield from (place for place, pattern in self._patterns if matrix in pattern)


class _MatrixReader:
    """Reads of the shapes of factors what they change, and by how much."""

    def __init__(self, config: ValueReader, where: str, file: Path) -> None:
        self._config, self._file = config, file
        self._alpha_of = _ByName(config, where, "alpha_pattern", config.number("lora_alpha", 8.0))
        self._rank_of = _ByName(config, where, "rank_pattern", config.number("r", 8.0))
        self._divides_by_root = config.flag("use_rslora")
        self._targets = frozenset(config.texts("target_parameters"))

    def read(self, matrix: str, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> LoraMatrix:
        if len(names) < 2:
            there, lacking = *names, "B" if "A" in names else "A"
            raise ModelLoadError(
                f"{self._file} has lora_{there} of {matrix:.200}, and no lora_{lacking}: save the adapter again"
            )
        a, b = shapes[names["A"]], shapes[names["B"]]
        rank, num_experts = a[0] if a else 0, 0
        if is_of_experts(matrix) and stack_of(matrix)[1] is None:  # the factors of all experts are in one tensor
            rank = int(self._rank_of(matrix))
            num_experts = a[0] // rank if a and rank > 0 else 0
        is_right = len(a) == len(b) == 2 and a[0] == b[1] == rank * (num_experts or 1) and a[1] and b[0]
        if not is_right or not 0 < rank <= MOST_RANK:
            raise ModelLoadError(
                f"{self._file}: lora_A of {matrix:.200} has the shape {list(a)} and lora_B {list(b)}: they must be "
                f"[rank, in] and [out, rank], of a rank from 1 to {MOST_RANK}; of stacked experts rank times as many"
            )
        parameter = f"{matrix}.weight"
        is_parameter = any(end in self._targets for end in _ends(parameter))  # PEFT's patterns are of its name then
        scale = self._alpha_of(parameter if is_parameter else matrix) / (sqrt(rank) if self._divides_by_root else rank)
        if not isfinite(scale):
            raise self._config.error("lora_alpha", "must be a finite number")
        return LoraMatrix(rank, a[1], b[0], scale, (names["A"], names["B"]), num_experts)
