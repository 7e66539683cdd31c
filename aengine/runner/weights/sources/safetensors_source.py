"""Weights from the safetensors files of a folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch

from ....checkpoint.safetensors_files import safetensors_files, text_name
from ....errors import ModelLoadError
from ..quantised.matrices import STACKED, UNQUANTISED
from .leftovers import is_idle
from .reading import NUMBERS, Named, Source, Target, in_threads

READERS = 8
"""Threads that read files. One copies 2 to 4 GB/s out of the page cache to a GPU; from a disk the more are better."""
DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def read_safetensors(folder: Path, target: Target) -> Source:
    """Raises ModelLoadError: a file is missing, truncated or corrupt; a tensor is not stored as its place needs it."""
    files = safetensors_files(folder)
    return Source(_read(files, target), sum(path.stat().st_size for path in files))


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors. Raises ModelLoadError: a file is missing, truncated or corrupt."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in safetensors_files(folder):
        with _corrupt(path), safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def read_tensor(folder: Path, name: str, most_rows: int | None = None) -> torch.Tensor:
    """Return one tensor, or its first rows. Raises ModelLoadError: there is none of this name, or a file is missing or
    corrupt."""
    from safetensors import safe_open

    for path in safetensors_files(folder):
        with _corrupt(path), safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118
                tensor: torch.Tensor = file.get_slice(name)[:most_rows] if most_rows else file.get_tensor(name)
                return tensor
    raise ModelLoadError(f"{folder} lacks the tensor {name!r}")


def read_matching(folder: Path, name: re.Pattern[str]) -> dict[str, torch.Tensor]:
    """Return the tensors in whose names the pattern is found. Raises ModelLoadError as `read_shapes`."""
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    for path in safetensors_files(folder):
        with _corrupt(path), safe_open(path, framework="pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys() if name.search(key)}  # noqa: SIM118
    return found


def _read(files: list[Path], target: Target) -> Iterator[Named]:
    """Take a tensor of each file in turn, so that several files are read at once."""
    from safetensors import safe_open

    with ExitStack() as stack:
        opened: list[tuple[Path, Any, list[str]]] = []
        for path in files:
            with _corrupt(path):
                file = stack.enter_context(safe_open(path, framework="pt"))
                opened.append((path, file, list(file.keys())))
        of_text = _text_tensors([name for _, _, names in opened for name in names], target)
        jobs = [
            [job for name in names if name in of_text for job in jobs_of(path, file, name, target)]
            for path, file, names in opened
        ]
        in_turn = chain.from_iterable(zip_longest(*jobs))
        yield from in_threads((job for job in in_turn if job is not None), READERS)


def _text_tensors(names: list[str], target: Target) -> set[str]:
    """Leave out what a model for images and text has beside its text model."""
    below = {name for name in names if text_name(name) != name}
    return below | (target.places.keys() & set(names)) if below else set(names)


def _place_of(name: str, target: Target) -> str:
    """Return the model's name of a tensor; a decoder that was saved without its output matrix lacks the prefix."""
    if name in target.places:
        return name
    name = text_name(name)
    return f"model.{name}" if f"model.{name}" in target.places else name


def jobs_of(path: Path, file: Any, name: str, target: Target) -> list[Callable[[], Named]]:
    """What reads a tensor; where the model wants each expert's matrices, or scales of blocks, all that are in it."""
    own_name = _place_of(name, target)
    stem, _, last = own_name.rpartition(".")
    stack = last.removesuffix("_scale_inv")
    parts, suffix = STACKED.get(stack, ()), f"weight{last.removeprefix(stack)}"
    if own_name in target.places or not parts or f"{stem}.0.{parts[0]}.{suffix}" not in target.places:
        return [partial(_read_tensor, path, file, name, own_name, target)]
    num_experts, num_rows, _ = file.get_slice(name).get_shape()
    size = num_rows // len(parts)
    rows = {part: slice(i * size, (i + 1) * size) for i, part in enumerate(parts)}
    return [
        partial(_read_tensor, path, file, name, f"{stem}.{expert}.{part}.{suffix}", target, (expert, own))
        for expert in range(num_experts)
        for part, own in rows.items()
    ]


def _read_tensor(
    path: Path, file: Any, name: str, own_name: str, target: Target, part: tuple[int, slice] | None = None
) -> Named:
    """``part``: an expert and its rows, of all in the tensor."""
    if own_name not in target.places:
        read = partial(file.get_tensor, name) if target.has_numbers else None
        with _corrupt(path):
            return Named(name, None, is_idle=is_idle(own_name, target.places, read, f"{path}: {name}"))
    with _corrupt(path):
        stored = file.get_slice(name)
        stored_as = stored.get_dtype()
    _check_dtype(path, name, stored_as, target.places[own_name].dtype)
    with _corrupt(path):
        if not target.has_numbers:
            whole = torch.empty(stored.get_shape(), dtype=DTYPES[stored_as], device="meta")
            tensor = whole if part is None else whole[part]
        else:  # a view of the mapped file, of which nothing is read yet; a copy of a part
            tensor = file.get_tensor(name) if part is None else stored[part]
    if tensor.dtype == torch.float64:  # numbers as well, which nothing computes with
        tensor = tensor.float()
    return target.named(own_name, tensor, keep=True)


def _check_dtype(path: Path, name: str, stored_as: str, wanted: torch.dtype) -> None:
    dtype = DTYPES.get(stored_as)
    is_numbers = dtype in NUMBERS or dtype == torch.float64
    if wanted in NUMBERS and not is_numbers and "scale" in name.rpartition(".")[2]:
        raise ModelLoadError(f"{path}: {name} is stored as {stored_as}, and scales are numbers: fetch the model again")
    if wanted in NUMBERS and not is_numbers:
        raise ModelLoadError(
            f"{path}: {name} is stored as {stored_as}, the codes of a quantised checkpoint, and what they mean is not "
            f"known: config.json has no quantization_config that says so of it, or its scale is missing: give the "
            f"checkpoint in 16 or 32 bits that it was made from, or a .gguf file of the model"
        )
    if wanted not in NUMBERS and dtype != wanted:
        expected = next(key for key, value in DTYPES.items() if value == wanted)
        raise ModelLoadError(
            f"{path}: {name} is stored as {stored_as}, but by the quantization_config of config.json it is {expected}"
            f"; of experts all are as the first one: {UNQUANTISED}"
        )


@contextmanager
def _corrupt(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is truncated or corrupt: {error!s:.300}; fetch it again") from error
