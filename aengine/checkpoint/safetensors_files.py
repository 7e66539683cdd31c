"""The safetensors files of a folder, and the names of the tensors in them: read, never mapped, since a map of a file
that is cut short under way ends the process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ModelLoadError
from .value_reader import inner_path, read_json

_INDEX = "model.safetensors.index.json"
_MOST_HEADER = 1 << 25
"""Bytes of a file's header: 200,000 tensors."""
_PIECE = 1 << 16  # characters of a header that are parsed at once


def has_safetensors(folder: Path) -> bool:
    return any(path.is_file() for path in folder.glob("*.safetensors"))


def safetensors_files(folder: Path) -> list[Path]:
    """Return the files of the checkpoint: those that its index names, else all.

    Raises ModelLoadError: there is none, one is missing or lies elsewhere, the index can't be read.
    """
    if not (folder / _INDEX).is_file():
        files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
        if not files:
            raise ModelLoadError(f"{folder} has no .safetensors file")
        return files
    names = sorted({str(name) for name in _weight_map(folder).values()})
    files = [inner_path(folder, name, folder / _INDEX) for name in names]
    missing = [path.name for path in files if not _is_file(path)]
    if missing:
        shown = ", ".join(f"{name:.80}" for name in missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelLoadError(f"{folder} lacks {len(missing)} of the files that {_INDEX} names: {shown}")
    return files


def check_whole(folder: Path) -> None:
    """Raise ModelLoadError as `safetensors_files`, and for a file that ends before its last tensor does."""
    for path in safetensors_files(folder):
        _whole_header(path)


class TensorPlace(NamedTuple):
    """Where a tensor lies in its file."""

    dtype: str  # as the file says: "BF16"
    shape: tuple[int, ...]
    begin: int  # its first byte, and the one behind its last
    end: int


def tensor_places(path: Path) -> dict[str, TensorPlace]:
    """Return the places of a file's tensors, by name. Raises ModelLoadError for a file that is none, or ends before its
    last tensor does."""
    places, needed = {}, 0
    for entries, start in _pieces_of(path):  # all entries at once would be a lot of garbage to collect
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            own: dict[str, Any] = entry if isinstance(entry, dict) else {}
            dtype, shape, offsets = own.get("dtype"), own.get("shape"), own.get("data_offsets")
            if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
                raise ModelLoadError(f"{path} is truncated or corrupt: {name:.200} has no shape; fetch it again")
            if not (isinstance(offsets, list) and [type(place) for place in offsets] == [int, int]):
                offsets = [-1, 0]
            begin, end = offsets
            if not 0 <= begin <= end or not isinstance(dtype, str):
                raise ModelLoadError(f"{path} is truncated or corrupt: {name:.200} has no place; fetch it again")
            places[name] = TensorPlace(dtype, tuple(shape), start + begin, start + end)
            needed = max(needed, start + end)
    _check_size(path, needed)
    return places


def _whole_header(path: Path) -> dict[str, object]:
    """Return what the file says of its tensors. Raises ModelLoadError for a file that ends before its last tensor."""
    header, begin = _header_of(path)
    _check_size(path, begin + _end_of(header))
    return header


def _end_of(entries: Mapping[str, object]) -> int:
    """Return where the last of the tensors ends in the file's data."""
    offsets = [entry.get("data_offsets") for entry in entries.values() if isinstance(entry, dict)]
    ends = [own[1] for own in offsets if isinstance(own, list) and len(own) == 2 and type(own[1]) is int]
    return max(ends, default=0)


def _check_size(path: Path, needed: int) -> None:
    if needed > (size := path.stat().st_size):
        raise ModelLoadError(f"{path} is truncated or corrupt: it has {size} of its {needed} bytes; fetch it again")


def stored_names(folder: Path) -> list[str]:
    """Return the tensors' names, from the index or from the files' headers. Raises ModelLoadError as
    `safetensors_files`, or for a file that is no safetensors file."""
    if (folder / _INDEX).is_file():
        return list(_weight_map(folder))
    return [name for path in safetensors_files(folder) for name in _header_of(path)[0]]


def _weight_map(folder: Path) -> Mapping[str, object]:
    found = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(found, dict):
        raise ModelLoadError(f"{folder / _INDEX} has no weight_map")
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, a link to itself
        return False


def json_of_metadata(path: Path, key: str) -> dict[str, object]:
    """Return the JSON object that a file has under a key of its metadata. Raises ModelLoadError: it has none."""
    metadata = _whole_head_of(path)[0].get("__metadata__")
    try:
        found = json.loads(metadata[key])  # type: ignore[index]
    except (KeyError, TypeError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path} has no {key} in its head")
    return found


def _header_of(path: Path) -> tuple[dict[str, object], int]:
    """Return what the file says of its tensors, by name, and the byte at which their data begin."""
    header, begin = _whole_head_of(path)
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, begin


def _whole_head_of(path: Path) -> tuple[dict[str, object], int]:
    pieces = list(_pieces_of(path))
    header: dict[str, object] = {}
    for entries, _ in pieces:
        header |= entries
    return header, pieces[-1][1]


def _pieces_of(path: Path) -> Iterator[tuple[dict[str, object], int]]:
    """Yield entries of a file's header, and the byte at which its data begin."""
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            for entries in _parsed(file.read(size).decode()) if size <= _MOST_HEADER else [None]:
                if not isinstance(entries, dict):
                    raise ModelLoadError(f"{path} is truncated or corrupt: its header is none; fetch it again")
                yield entries, 8 + size
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is truncated or corrupt: {error}; fetch it again") from error


def _parsed(text: str) -> Iterator[object]:
    """Yield what `json.loads` returns, which keeps all other threads waiting: of a long object a part at a time. A part
    ends where an entry may: if it does not end there, its brackets don't match, and the whole comes at once."""
    text = text.strip()
    begin = 1
    try:
        while (end := text.find('},"', begin + _PIECE)) >= 0 and text[0] == "{":
            yield json.loads(f"{{{text[begin : end + 1]}}}")
            begin = end + 2
        yield json.loads(text if begin == 1 else f"{{{text[begin:]}")
    except ValueError:
        yield json.loads(text)


def text_name(name: str) -> str:
    """Name of a tensor in the text model alone; in a model for images and text it may be below ``language_model.`` or
    ``model.language_model.`` (transformers 5)."""
    if name.startswith("model.language_model."):
        return name.replace("language_model.", "", 1)
    return name.removeprefix("language_model.")
