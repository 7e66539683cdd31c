"""`GgufFile`: a GGUF header, and views of its tensors.

The bytes, little-endian throughout (format versions 2 and 3; ggml-org/ggml, docs/gguf.md):

    magic "GGUF" | version u32 | num_tensors u64 | num_pairs u64
    num_pairs   x  key string | type u32 | value          string: length u64 | UTF-8 bytes
    num_tensors x  name string | num_dims u32 | dims u64 x num_dims | ggml type u32 | offset u64
    padding to general.alignment (32 when not given)
    tensor data: each tensor at (start of data + its offset): padded to the alignment, without holes

A value of type array is: element type u32 | count u64 | elements. Arrays are only stepped over while the
header is read; they are decoded when asked for. Every length and count is checked against the bytes that are
left before it is used, so a damaged file costs no more than its own size, and is always a `ModelLoadError`.

The header is read, not mapped: a map of a file that is cut short meanwhile ends the process, and it is the host that
reads headers. Tensors are mapped when they are first asked for, which workers do.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..errors import ModelLoadError
from .file_bytes import FileBytes

if TYPE_CHECKING:
    import numpy as np


class GgmlType(NamedTuple):
    """A storage format of tensor elements: blocks of ``block_len`` elements in ``block_bytes`` bytes."""

    name: str
    block_len: int
    block_bytes: int


GGML_TYPES: Final[dict[int, GgmlType]] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 40),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
}
# The types that numpy has; all others are seen as bytes.
_NUMPY_TYPES = {
    "F32": "<f4",
    "F16": "<f2",
    "F64": "<f8",
    "I8": "<i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
}

_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {code: struct.Struct("<" + letter) for code, letter in _SCALAR_FORMATS.items()}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4
_MOST_ENTRIES = 1 << 16
"""Of metadata pairs, tensors, arrays within arrays: each costs a round of Python. Models have some thousands."""
_MOST_HEADER = 1 << 28
"""Bytes of a header. A vocabulary of 300,000 tokens and its merges take 20 MB."""
_MOST_NAME = 1 << 8  # bytes of a key's or a tensor's name, which errors show whole
_MOST_FLOATS = 1 << 16  # most numbers that are read as a setting
_MIN_PAIR_BYTES = 8 + 4 + 1  # an empty key, the type, a one-byte value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension
SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a file: ``offset`` bytes from the start of file ``shard`` (0 unless split)."""

    name: str
    type: GgmlType
    type_code: int  # == gguf.GGMLQuantizationType
    shape: tuple[int, ...]  # row-major as in numpy and torch: the reverse of the order in the file
    offset: int
    nbytes: int
    shard: int = 0


class GgufMetadata(Mapping[str, Any]):
    """The key-value pairs. Arrays become lists at each look-up: keep the list if you need it twice."""

    __slots__ = ("_pairs", "_reader")

    def __init__(self, reader: _HeaderReader, pairs: dict[str, tuple[int, int]]) -> None:
        self._reader = reader
        self._pairs = pairs  # key -> (type code, position of the value)

    def __getitem__(self, key: str) -> Any:
        code, position = self._pairs[key]
        return self._reader.decode(code, position, f"the value of {key!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __contains__(self, key: object) -> bool:
        return key in self._pairs


class GgufFile:
    """One model in GGUF: ``metadata`` and ``tensors`` (in file order).

    A model split into ``-00001-of-0000N.gguf`` files is opened by any one of them. Raises ModelLoadError,
    naming the file and what is wrong with it. The map lives until `close` was called and the last view of
    `tensor_data` is gone.
    """

    def __init__(self, path: str | Path) -> None:
        paths = shard_paths(Path(path))
        readers = [_HeaderReader(p) for p in paths]
        headers = [reader.read_header() for reader in readers]
        self.path = paths[0]
        self.metadata = GgufMetadata(readers[0], headers[0][0])
        self.tensors: dict[str, GgufTensor] = {}
        for shard, (_, tensors) in enumerate(headers):
            for tensor in tensors:
                if tensor.name in self.tensors:
                    raise readers[shard].error(f"two tensors are called {tensor.name!r}")
                self.tensors[tensor.name] = replace(tensor, shard=shard) if shard else tensor
        self._readers = readers
        self._check_split(len(paths))

    def tensor_data(self, name: str) -> np.ndarray:
        """Return a read-only view of a tensor's bytes in the map, shaped as ``gguf.quants.dequantize`` takes it.

        F32, F16, F64 and integers: their numpy type and the tensor's shape. Everything else (BF16 too):
        uint8, the last dimension in bytes instead of elements.
        """
        import numpy as np

        tensor = self.tensors[name]
        dtype = np.dtype(_NUMPY_TYPES.get(tensor.type.name, "u1"))
        last = tensor.shape[-1] // tensor.type.block_len * tensor.type.block_bytes // dtype.itemsize
        reader = self._readers[tensor.shard]
        data = np.frombuffer(reader.file.mapped(), dtype, tensor.nbytes // dtype.itemsize, tensor.offset)
        return data.reshape(*tensor.shape[:-1], last)

    def read_floats(self, name: str) -> list[float]:
        """Return the numbers of a small F32 tensor, read from the file. Raises ModelLoadError if it is none."""
        tensor = self.tensors[name]
        if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.nbytes > 4 * _MOST_FLOATS:
            raise ModelLoadError(f"{self.path}: {name!r} must be a row of float32")
        return list(
            struct.unpack(f"<{tensor.shape[0]}f", self._readers[tensor.shard].file.read(tensor.offset, tensor.nbytes))
        )

    def close(self) -> None:
        """Close the file. Views that are still in use keep their map alive. Idempotent."""
        for reader in self._readers:
            reader.file.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_split(self, found: int) -> None:
        count = self.metadata.get("split.count", 1)
        if isinstance(count, int) and count > found:
            raise ModelLoadError(
                f"{self.path} is one of {count} files of a split model, which are recognised by their names "
                f"(NAME-00001-of-{count:05d}.gguf): restore them, or merge with `llama-gguf-split --merge`"
            )
        wanted = self.metadata.get("split.tensors.count")
        if isinstance(wanted, int) and wanted != len(self.tensors):
            raise ModelLoadError(f"{self.path}: {wanted} tensors are announced and {len(self.tensors)} there")


def shard_paths(path: Path) -> list[Path]:
    """Return all files of the model that ``path`` is one of, in order. Raises ModelLoadError if one is missing."""
    match = SHARD_NAME.fullmatch(path.name)
    if match is None or not (count := int(match["count"])):
        return [path]
    paths = [path.with_name(f"{match['stem']}-{i:05d}-of-{match['count']}.gguf") for i in range(1, count + 1)]
    there = set(os.listdir(path.parent))  # asked once, and not for each of 99,999
    missing = [p.name for p in paths if p.name not in there]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelLoadError(f"{path} is one of {count} files, of which {len(missing)} are missing: {shown}")
    return paths


class _HeaderReader:
    """A cursor over the beginning of one file, read as far as is needed: nothing is read past the end, no count
    believed before it is checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = len(_MAGIC)
        self._nested = 0  # arrays within arrays so far
        self.file = FileBytes(path, _MOST_HEADER)
        self._size = self.file.size
        if not self._size:
            raise ModelLoadError(f"{path} is empty: not a GGUF file")

    def error(self, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path} is damaged or not a GGUF file: {problem}")

    def read_header(self) -> tuple[dict[str, tuple[int, int]], list[GgufTensor]]:
        """Return ({key: (type, position)}, tensors), everything checked."""
        if not self.file.data.startswith(_MAGIC):
            raise self.error(f"it begins with {self.file.data[: len(_MAGIC)]!r}, not {_MAGIC!r}")
        version = self._u32("the version")
        if version not in (2, 3):
            if version and not version & 0xFFFF:
                raise ModelLoadError(f"{self.path} is a big-endian GGUF file; aengine reads little-endian ones")
            raise ModelLoadError(f"{self.path} has GGUF version {version}; aengine reads 2 and 3: convert it anew")
        num_tensors = self._u64("the number of tensors")
        num_pairs = self._u64("the number of metadata pairs")
        self._check_count(num_pairs, _MIN_PAIR_BYTES, "metadata pairs", _MOST_ENTRIES)
        pairs: dict[str, tuple[int, int]] = {}
        for i in range(num_pairs):
            key = self._name(f"metadata key {i}")
            if key in pairs:
                raise self.error(f"the metadata key {key!r} comes twice")
            code = self._u32(f"the type of {key!r}")
            pairs[key] = (code, self._position)
            self._skip(code, key)
        self._check_count(num_tensors, _MIN_TENSOR_BYTES, "tensors", _MOST_ENTRIES)
        infos = [self._tensor_info(i) for i in range(num_tensors)]
        alignment = self._alignment(pairs)
        start = -(-self._position // alignment) * alignment
        return pairs, self._placed(infos, start, alignment)

    def decode(self, code: int, position: int, what: str) -> Any:
        """Return the value at ``position``, which `_skip` has checked."""
        self._position = position
        if code == _STRING:
            return self._bytes(what).decode("utf-8", errors="replace")
        if code != _ARRAY:
            return _SCALARS[code].unpack_from(self.file.data, position)[0]
        (element,), (count,) = (
            _U32.unpack_from(self.file.data, position),
            _U64.unpack_from(self.file.data, position + 4),
        )
        self._position = position = position + 12
        if element == _STRING:
            return self._strings(position, count, what)
        if element == _ARRAY:
            values = []
            for _ in range(count):
                start = self._position
                self._skip(_ARRAY, what)
                end = self._position
                values.append(self.decode(_ARRAY, start, what))
                self._position = end
            return values
        return list(struct.unpack_from(f"<{count}{_SCALAR_FORMATS[element]}", self.file.data, position))

    def _strings(self, position: int, count: int, what: str) -> list[str]:
        data, unpack, values = self.file.data, _U64.unpack_from, []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(data, position)[0]
                values.append(data[start:position].decode())
        except UnicodeDecodeError as error:
            raise self.error(f"{what}[{len(values)}] is not UTF-8 ({error.reason})") from None
        return values

    def _skip(self, code: int, key: str, depth: int = 0) -> None:
        """Step over one value, checking that it lies within the file."""
        scalar = _SCALARS.get(code)
        if scalar is not None:
            self._take(scalar.size, f"the value of {key!r}")
        elif code == _STRING:
            self._bytes(f"the value of {key!r}")
        elif code == _ARRAY:
            self._skip_array(key, depth)
        else:
            raise self.error(f"the value of {key!r} has the unknown type {code}")

    def _skip_array(self, key: str, depth: int) -> None:
        if depth >= _MAX_ARRAY_DEPTH:
            raise self.error(f"the arrays of {key!r} nest more than {_MAX_ARRAY_DEPTH} deep")
        element = self._u32(f"the element type of {key!r}")
        count = self._u64(f"the length of {key!r}")
        if element in _SCALARS:
            self._take(count * _SCALARS[element].size, f"the {count} elements of {key!r}")
        elif element == _STRING:
            self._skip_strings(key, count)
        elif element == _ARRAY:
            self._check_count(count, 12, f"elements of {key!r}")
            self._nested += count
            if self._nested > _MOST_ENTRIES:
                raise self.error(f"more than {_MOST_ENTRIES} arrays within arrays, the last ones in {key!r}")
            for _ in range(count):
                self._skip_array(key, depth + 1)
        else:
            raise self.error(f"the array {key!r} has elements of the unknown type {element}")

    def _skip_strings(self, key: str, count: int) -> None:
        self._check_count(count, 8, f"strings of {key!r}")
        # The hot loop of opening a file: a vocabulary and its merges are some hundred thousand strings.
        data, unpack, position, last = self.file.data, _U64.unpack_from, self._position, self._size - 8
        there = len(data) - 8  # last position of a length within the data read so far
        for i in range(count):
            if position > there:
                if position > last:
                    raise self.error(f"it ends within {key!r}, at string {i} of {count}")
                self.file.read_to(position + 8)
                data = self.file.data
                there = len(data) - 8
            position += 8 + unpack(data, position)[0]
        if position > self._size:
            raise self.error(f"the last string of {key!r} reaches past the end of the file")
        self.file.read_to(position)
        self._position = position

    def _tensor_info(self, index: int) -> tuple[str, GgmlType, int, tuple[int, ...], int]:
        """Read an entry: (name, type, type code, row-major shape, offset within the data)."""
        name = self._name(f"the name of tensor {index}")
        num_dims = self._u32(f"the number of dimensions of {name!r}")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self.error(f"tensor {name!r} has {num_dims} dimensions, not 1 to {_MAX_DIMS}")
        dims = [self._u64(f"the dimensions of {name!r}") for _ in range(num_dims)]
        if 0 in dims:
            raise self.error(f"tensor {name!r} has a dimension of length 0")
        code = self._u32(f"the type of tensor {name!r}")
        ggml_type = GGML_TYPES.get(code)
        if ggml_type is None:
            raise ModelLoadError(f"{self.path}: tensor {name!r} has ggml type {code}, which aengine does not know")
        if dims[0] % ggml_type.block_len:
            raise self.error(f"rows of tensor {name!r} have {dims[0]} elements, no whole {ggml_type.name} blocks")
        return name, ggml_type, code, tuple(reversed(dims)), self._u64(f"the offset of tensor {name!r}")

    def _placed(
        self, infos: list[tuple[str, GgmlType, int, tuple[int, ...], int]], start: int, alignment: int
    ) -> list[GgufTensor]:
        tensors, expected = [], 0
        for name, ggml_type, code, shape, offset in infos:
            nbytes = prod(shape) // ggml_type.block_len * ggml_type.block_bytes
            if offset != expected:  # so it does behind a tensor of a wrong type or shape
                raise self.error(
                    f"tensor {name!r} begins at {offset} in the data, but those before it end at {expected}"
                )
            expected = -(-(offset + nbytes) // alignment) * alignment
            if start + offset + nbytes > self._size:
                raise self.error(
                    f"tensor {name!r} needs bytes {start + offset} to {start + offset + nbytes}, but the "
                    f"file has {self._size}: was the download cut short?"
                )
            tensors.append(GgufTensor(name, ggml_type, code, shape, start + offset, nbytes))
        return tensors

    def _alignment(self, pairs: dict[str, tuple[int, int]]) -> int:
        if "general.alignment" not in pairs:
            return 32
        end = self._position
        alignment = self.decode(*pairs["general.alignment"], "general.alignment")
        self._position = end
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.error(f"general.alignment is {alignment!r}, not a power of two")
        return alignment

    def _check_count(self, count: int, min_bytes: int, what: str, most: int | None = None) -> None:
        left = self._size - self._position
        if count * min_bytes > left:
            raise self.error(f"{count} {what} can't fit into the {left} bytes that are left")
        if most is not None and count > most:
            raise self.error(f"{count} {what}, where models have {most} at most")

    def _take(self, nbytes: int, what: str) -> int:
        """Step over ``nbytes``; returns where they begin."""
        start = self._position
        if nbytes > self._size - start:
            raise self.error(f"it ends within {what} (at byte {start}, {nbytes} more are needed)")
        self._position = end = start + nbytes
        if end > len(self.file.data):
            self.file.read_to(end)
        return start

    def _u32(self, what: str) -> int:
        start = self._take(4, what)  # before the data is looked up, which this may read on
        return _U32.unpack_from(self.file.data, start)[0]

    def _u64(self, what: str) -> int:
        start = self._take(8, what)
        return _U64.unpack_from(self.file.data, start)[0]

    def _bytes(self, what: str) -> bytes:
        length = self._u64(f"the length of {what}")
        start = self._take(length, what)
        return self.file.data[start : start + length]

    def _name(self, what: str) -> str:
        raw = self._bytes(what)
        if len(raw) > _MOST_NAME:
            raise self.error(f"{what} has {len(raw)} bytes: {_MOST_NAME} at most")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8: {raw[:40]!r}") from None
