"""The GGUF reader against the gguf package's own, and against damage."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from aengine.checkpoint import GgufFile, file_bytes
from aengine.checkpoint.file_bytes import FileBytes
from aengine.checkpoint.gguf_file import GGML_TYPES
from aengine.errors import ModelLoadError


def assert_same_as_reader(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    with GgufFile(path) as file:
        expected = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
        assert list(file.metadata) == list(expected) and len(file.metadata) == len(expected)
        for key, field in expected.items():
            if key == "t.nested":  # the package's reader flattens what its writer nests
                assert file.metadata[key] == [[1, 2], [3], [4, 5, 6]]
            else:
                assert file.metadata[key] == field.contents(), key
        assert list(file.tensors) == [t.name for t in reader.tensors]
        for theirs in reader.tensors:
            ours = file.tensors[theirs.name]
            assert ours.type.name == theirs.tensor_type.name
            assert ours.type_code == theirs.tensor_type
            assert ours.shape == tuple(int(n) for n in reversed(theirs.shape))
            assert (ours.offset, ours.nbytes) == (theirs.data_offset, theirs.n_bytes)
            data = file.tensor_data(theirs.name)
            assert data.dtype == theirs.data.dtype and data.shape == theirs.data.shape
            assert np.array_equal(data, theirs.data)
            del data
        if file.tensors:  # what the loader will do
            name = next(iter(file.tensors))
            values = gguf.dequantize(file.tensor_data(name), gguf.GGMLQuantizationType(file.tensors[name].type_code))
            assert values.shape == file.tensors[name].shape


def write_sample(path: Path, seed: int = 0, *, alignment: int | None = None, shift: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -100)
    writer.add_uint16("t.u16", 60000)
    writer.add_int16("t.i16", -30000)
    writer.add_uint32("t.u32", 4_000_000_000)
    writer.add_int32("t.i32", -2_000_000_000)
    writer.add_uint64("t.u64", 2**63)
    writer.add_int64("t.i64", -(2**62))
    writer.add_float32("t.f32", 0.25)
    writer.add_float64("t.f64", 0.1)
    writer.add_bool("t.bool", True)
    writer.add_string("t.string", "größe 世界" + "x" * shift)
    writer.add_array("t.strings", ["", "a", "Ġthe", "🙂"])
    writer.add_array("t.ints", [int(i) for i in rng.integers(-1000, 1000, 7)])
    writer.add_array("t.floats", [0.5, -1.25])
    writer.add_array("t.bools", [True, False, True])
    writer.add_array("t.nested", [[1, 2], [3], [4, 5, 6]])
    writer.add_tensor("one", rng.standard_normal(5, dtype=np.float32))
    writer.add_tensor("two", rng.standard_normal((3, 8)).astype(np.float16))
    quantized = gguf.quantize(rng.standard_normal((4, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("three", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    bf16 = gguf.quantize(rng.standard_normal((2, 6), dtype=np.float32), gguf.GGMLQuantizationType.BF16)
    writer.add_tensor("four", bf16, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.add_tensor("five", rng.integers(0, 100, (2, 3, 4)).astype(np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_type_sizes_are_those_of_the_gguf_package() -> None:
    for code, (name, block_len, block_bytes) in GGML_TYPES.items():
        theirs = gguf.GGMLQuantizationType(code)
        assert theirs.name == name
        assert gguf.GGML_QUANT_SIZES[theirs] == (block_len, block_bytes)


@pytest.mark.parametrize("alignment", [None, 1, 64])
def test_written_files_read_as_with_the_gguf_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alignment: int | None
) -> None:
    for shift in range(4):
        seed, first_read = random.randrange(2**32), random.randint(4, 40)
        print(f"seed {seed} shift {shift} first read {first_read}")
        monkeypatch.setattr(file_bytes, "_FIRST_READ", first_read)  # so that any value may reach beyond what was read
        assert_same_as_reader(write_sample(tmp_path / "m.gguf", seed, alignment=alignment, shift=shift))


def test_views_outlive_the_file_and_are_read_only(tmp_path: Path) -> None:
    with GgufFile(write_sample(tmp_path / "m.gguf")) as file:
        view = file.tensor_data("one")
        expected = view.copy()
    file.close()
    assert np.array_equal(view, expected)
    with pytest.raises(ValueError):
        view[0] = 1.0


def test_a_file_is_read_ahead_and_closed_with_its_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_bytes, "_FIRST_READ", 4)
    path, whole = tmp_path / "m", random.randbytes(100)
    path.write_bytes(whole)
    file = FileBytes(path, 99)
    for end, there in ((3, 4), (4, 4), (5, 16), (17, 64), (65, 99), (99, 99)):
        file.read_to(end)
        assert file.data == whole[:there]
    with pytest.raises(ModelLoadError, match="its header has more than 99 bytes"):
        file.read_to(100)
    assert file.mapped()[:] == whole and file.mapped() is file.mapped()
    file.close()
    file.close()
    with GgufFile(write_sample(tmp_path / "model.gguf")) as model:
        model.tensor_data("one")
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd).startswith(str(tmp_path))]


def test_split_model_is_one_model(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    expected = {f"t{i}": np.full((2, 3), i, np.float32) for i in range(5)}
    for name, data in expected.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(tmp_path.glob("*.gguf"))
    assert [p.name for p in paths] == [f"m-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    for path in paths:
        with GgufFile(path) as file:
            assert file.path == paths[0]
            assert {name: file.tensor_data(name).tolist() for name in file.tensors} == {
                name: data.tolist() for name, data in expected.items()
            }
    renamed = paths[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelLoadError, match="one of 3 files"):
        GgufFile(renamed)
    renamed.rename(paths[0])
    paths[1].unlink()
    with pytest.raises(ModelLoadError, match="m-00002-of-00003"):
        GgufFile(paths[0])
    for count, shown in ((4, ""), (5, ", ...")):
        (tmp_path / f"n-00001-of-0000{count}.gguf").write_bytes(b"")
        with pytest.raises(ModelLoadError) as caught:
            GgufFile(tmp_path / f"n-00001-of-0000{count}.gguf")
        names = ", ".join(f"n-0000{i}-of-0000{count}.gguf" for i in (2, 3, 4))
        assert str(caught.value).endswith(f"of which {count - 1} are missing: {names}{shown}")


def test_numbers_are_read_of_a_short_row_of_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.checkpoint.gguf_file._MOST_FLOATS", 5)
    (tmp_path / "0").mkdir()
    with GgufFile(write_sample(tmp_path / "0" / "m-00000-of-00000.gguf")) as file:  # so named, and of no split model
        assert file.read_floats("one") == file.tensor_data("one").tolist()
        for name in ("two", "three", "five"):
            with pytest.raises(ModelLoadError, match=f"{name!r} must be a row of float32"):
                file.read_floats(name)
        monkeypatch.setattr("aengine.checkpoint.gguf_file._MOST_FLOATS", 4)
        with pytest.raises(ModelLoadError, match="'one' must be a row of float32"):
            file.read_floats("one")
    path = tmp_path / "grid.gguf"
    path.write_bytes(header(tensors=1, version=2) + tensor(b"grid", (2, 2)) + bytes(99))
    with GgufFile(path) as file, pytest.raises(ModelLoadError, match="'grid' must be a row"):
        file.read_floats("grid")


def read_everything(path: Path) -> None:
    with GgufFile(path) as file:
        for key in file.metadata:
            file.metadata[key]
        for name in file.tensors:
            file.tensor_data(name).tobytes()


def test_truncated_anywhere(tmp_path: Path) -> None:
    whole = write_sample(tmp_path / "m.gguf").read_bytes()
    end = max(t.offset + t.nbytes for t in GgufFile(tmp_path / "m.gguf").tensors.values())
    path = tmp_path / "cut.gguf"
    for length in range(end):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match="cut.gguf"):
            read_everything(path)
    path.write_bytes(whole[:end])  # padding after the last tensor is not needed
    read_everything(path)


def test_flipped_bytes_give_a_value_or_a_load_error(tmp_path: Path) -> None:
    whole = write_sample(tmp_path / "m.gguf").read_bytes()
    header = min(t.offset for t in GgufFile(tmp_path / "m.gguf").tensors.values())
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path = tmp_path / "bad.gguf"
    refused = 0
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(header)
            width = min(rng.choice((1, 4, 8)), header - at)
            data[at : at + width] = rng.choice((b"\xff" * width, b"\0" * width, rng.randbytes(width)))
        path.write_bytes(data)
        try:
            read_everything(path)
        except ModelLoadError as error:
            assert "bad.gguf" in str(error)
            refused += 1
    assert refused > 300


def string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def header(tensors: int = 0, pairs: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, pairs)


def nested(depth: int) -> bytes:
    return struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 0, 1) + b"\x07"


def tensor(name: bytes = b"w", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "empty"),
        (b"PK\x03\x04 something else", "begins with"),
        (header(version=1), "version 1"),
        (header(version=4), "version 4"),
        (header(version=3 << 24), "big-endian"),
        (header(pairs=2**63), "can't fit"),
        (header(tensors=2**63), "can't fit"),
        (header(pairs=1) + string(b"k", 2**63) + bytes(40), "ends within"),
        (header(pairs=1) + string(b"\xff\xfe") + bytes(40), "not UTF-8"),
        (header(pairs=1) + string(b"k") + struct.pack("<I", 77) + bytes(40), "unknown type 77"),
        (header(pairs=1) + string(b"k") + struct.pack("<IIQ", 9, 8, 2**62) + bytes(40), "can't fit"),
        (header(pairs=1) + string(b"k") + struct.pack("<IIQ", 9, 8, 2) + string(b"a") + string(b"", 99), "past"),
        (header(pairs=1) + string(b"k") + struct.pack("<IIQ", 9, 8, 3) + string(b"", 2**64 - 8) + bytes(40), "ends"),
        (header(pairs=1) + string(b"k") + struct.pack("<IIQ", 9, 4, 2**61) + bytes(40), "ends within"),
        (header(pairs=1) + string(b"k") + struct.pack("<IIQ", 9, 66, 1) + bytes(40), "unknown type 66"),
        (header(pairs=1) + string(b"k") + nested(500), "nest"),
        (header(pairs=2) + (string(b"k") + struct.pack("<I", 0) + b"\1") * 2 + bytes(20), "comes twice"),
        (header(tensors=1) + tensor(dims=()) + bytes(99), "0 dimensions"),
        (header(tensors=1) + tensor(dims=(1,) * 5) + bytes(99), "5 dimensions"),
        (header(tensors=1) + tensor(dims=(4, 0)) + bytes(99), "length 0"),
        (header(tensors=1) + tensor(dims=(2**63, 2**63, 2**63, 2**63)) + bytes(99), "cut short"),
        (header(tensors=1) + tensor(kind=4) + bytes(99), "ggml type 4"),
        (header(tensors=1) + tensor(dims=(33,), kind=8) + bytes(99), "no whole Q8_0 blocks"),
        (header(tensors=1) + tensor(offset=7) + bytes(99), "begins at 7 in the data, but .* end at 0"),
        (header(tensors=1) + tensor(offset=2**63) + bytes(99), "begins at 9223372036854775808"),
        (header(tensors=2) + tensor(b"a") + tensor(b"a", offset=32) + bytes(99), "two tensors"),
        (header(tensors=2) + tensor(b"a") + tensor(b"b") + bytes(99), "'b' begins at 0 .* end at 32"),
        (header(tensors=2) + tensor(b"a") + tensor(b"b", offset=64) + bytes(199), "'b' begins at 64 .* end at 32"),
        (header(pairs=1) + string(b"general.alignment") + struct.pack("<II", 4, 0), "power of two"),
        (header(pairs=1) + string(b"general.alignment") + struct.pack("<II", 4, 24), "power of two"),
        (header(pairs=1) + string(b"general.alignment") + struct.pack("<I", 8) + string(b"32"), "power of two"),
    ],
)  # fmt: skip
def test_crafted_damage(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "crafted.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=problem) as caught:
        read_everything(path)
    assert "crafted.gguf" in str(caught.value)


def test_arrays_nest_four_deep(tmp_path: Path) -> None:
    path = tmp_path / "nested.gguf"
    path.write_bytes(header(pairs=1) + string(b"k") + nested(3) + bytes(40))
    with GgufFile(path) as file:
        assert file.metadata["k"] == [[[[7]]]]
    path.write_bytes(header(pairs=1) + string(b"k") + nested(4) + bytes(40))
    with pytest.raises(ModelLoadError, match="the arrays of 'k' nest more than 4 deep"):
        GgufFile(path)


def test_a_file_may_end_with_a_text(tmp_path: Path) -> None:
    path = tmp_path / "texts.gguf"
    path.write_bytes(header(pairs=1) + string(b"k") + struct.pack("<IIQ", 9, 8, 2) + string(b"ab") + string(b""))
    with GgufFile(path) as file:
        assert file.metadata["k"] == ["ab", ""] and not file.tensors


def test_names_have_256_bytes_at_most_as_errors_show_them_whole(tmp_path: Path) -> None:
    path = tmp_path / "named.gguf"
    for make in (
        lambda name: header(pairs=1) + string(name) + struct.pack("<I", 0) + b"\1" + bytes(40),
        lambda name: header(tensors=1) + tensor(name) + bytes(99),
    ):
        path.write_bytes(make(b"n" * 256))
        read_everything(path)
        path.write_bytes(make(b"n" * 257))
        with pytest.raises(ModelLoadError, match="has 257 bytes: 256 at most") as caught:
            read_everything(path)
        assert "nnn" not in str(caught.value)


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="No such file"):
        GgufFile(tmp_path / "missing.gguf")
    with pytest.raises(ModelLoadError, match="directory"):
        GgufFile(tmp_path)
