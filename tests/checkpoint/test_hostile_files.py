"""Model files as nobody's converter writes them: each ends soon, in a load or a ModelLoadError that names its cause."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import msgpack
import numpy as np
import pytest

from aengine.checkpoint import GgufFile, file_bytes, resolve_model
from aengine.checkpoint.early_checks import check_division
from aengine.checkpoint.pooling import labels_of
from aengine.checkpoint.safetensors_files import safetensors_files, stored_names
from aengine.checkpoint.source import ModelSource, locate
from aengine.checkpoint.value_reader import ValueReader, read_json
from aengine.config import EngineConfig
from aengine.errors import ModelLoadError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


NO_TENSORS = (2).to_bytes(8, "little") + b"{}"


def folder(path: Path, config: Any = CONFIG, generation: Any = None, weights: bytes = NO_TENSORS) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (path / "model.safetensors").write_bytes(weights)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def resolve(path: Path) -> ModelSource:
    return resolve_model(EngineConfig(model=str(path)))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("ranks", "fits"), [(1, True), (2, True), (3, False)])
def test_heads_are_counted_without_a_loop(ranks: int, fits: bool) -> None:
    """As many rounds as there are heads would hold up the event loop for ever."""
    config = EngineConfig(model="m", tensor_parallel_size=ranks)
    heads = {"num_attention_heads": 2**62, "num_key_value_heads": 2**62}
    if fits:
        check_division(config, heads)
    else:
        with pytest.raises(ModelLoadError, match="can't be divided by it; it can be 1, 2, 4, .* or 1024$"):
            check_division(config, heads)


def test_no_layers_are_no_fault_of_the_division() -> None:
    check_division(EngineConfig(model="m"), {"num_hidden_layers": 0})


@pytest.mark.parametrize(
    "config",
    [
        {**CONFIG, "model_max_length": int(1e30)},  # transformers writes it
        {**CONFIG, "unknown": [{"x": -(10**25)}, 2**63, 2**64 - 1, -(2**63)]},
        {**CONFIG, "id2label": {"0": 10**4000}},
    ],
)
def test_numbers_that_nobody_reads_reach_the_worker(tmp_path: Path, config: dict[str, Any]) -> None:
    source = resolve(folder(tmp_path / "m", config, generation={"max_length": 10**20}))
    sent = msgpack.unpackb(msgpack.packb(source.to_wire()))
    assert sent["hf_config"].keys() == config.keys()
    assert sent["generation_config"] == {"max_length": 1e20}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ('{"a": ' + "[" * 200 + "]" * 200 + "}", "config.json is nested more than 64 deep"),
        ("[" * 100_000, "config.json is not valid JSON"),
        ('{"a": "\\ud800"}', "config.json is not valid JSON: .*surrogates"),
        ({**CONFIG, "sentence_transformers": 5}, "config.json: sentence_transformers=5 must be an object"),
        ({**CONFIG, "num_labels": 10**9}, "config.json: num_labels=1000000000 is more than any model has"),
        (
            {**CONFIG, "model_type": "y" * 5000},
            "config.json: model_type='y{75}.* must be a name of at most 100 letters",
        ),
        ({**CONFIG, "model_type": 5}, "config.json: model_type=5 must be a text"),
    ],
)
def test_a_config_that_can_not_be(tmp_path: Path, config: Any, problem: str) -> None:
    with pytest.raises(ModelLoadError, match=problem) as caught:
        resolve(folder(tmp_path / "m", config))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([299, 2**40], [299]),
        ([299, 320], [299]),
        ([True, -5, 1.5, "x", [1], {"a": 1}, 7], [7]),
        ([[1]], []),
        ("x", []),
        ({"a": 1}, []),
        (5, [5]),
        (None, []),
    ],
)
def test_an_end_token_is_one_of_the_vocabulary(
    tmp_path: Path, given: Any, kept: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        path = folder(tmp_path / "m", generation={"eos_token_id": given})
        assert resolve(path).eos_token_ids == kept
    assert resolve(path).vocab_size == 320
    assert ("eos_token_id" in caplog.text) == (kept != given and kept != [given] and given is not None)


def test_a_vocabulary_of_nonsense_is_the_workers_to_refuse() -> None:
    for size in (0, -1, 2**31 - 1, "many", True, None, 1.5):
        source = ModelSource("m", "m", "dummy", {"vocab_size": size, "eos_token_id": [2**31 - 2, 2**31 - 1]})
        assert source.vocab_size is None and source.eos_token_ids == [2**31 - 2]
    assert ModelSource("m", "m", "dummy", {"vocab_size": 1, "eos_token_id": 0}).eos_token_ids == [0]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("../out/other.safetensors", "not within its folder"),
        ("/etc/passwd", "not within its folder"),
        ("a\0b.safetensors", "not within its folder"),
        ("x" * 5000, "lacks 1 of the files"),
        ("loop.safetensors", "lacks 1 of the files"),
        ("pipe.safetensors", "lacks 1 of the files"),
        ([1], "lacks 1 of the files"),
    ],
)
def test_an_index_names_files_of_its_folder(tmp_path: Path, name: Any, problem: str) -> None:
    path = folder(tmp_path / "m")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "other.safetensors").write_bytes(b"")
    (path / "loop.safetensors").symlink_to(path / "loop.safetensors")
    os.mkfifo(path / "pipe.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelLoadError, match=problem):
        resolve(path)


@pytest.mark.timeout(20)
def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    """Nobody writes to it, so that to open it would wait for ever."""
    path = folder(tmp_path / "m")
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")
    os.mkfifo(tmp_path / "pipe.gguf")
    for use in (safetensors_files, stored_names, resolve):
        with pytest.raises(ModelLoadError):
            use(path)
    with pytest.raises(ModelLoadError, match="a pipe"):
        GgufFile(tmp_path / "pipe.gguf")


def test_names_are_read_and_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A map of a file that is cut short meanwhile ends the process, and this one is the host's."""
    header = json.dumps({"__metadata__": {"format": "pt"}, "lm_head.weight": {}}).encode()
    path = folder(tmp_path / "m", {"text_config": CONFIG}, weights=struct.pack("<Q", len(header)) + header)
    write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(file_bytes.mmap, "mmap", None)
    monkeypatch.setattr("safetensors.safe_open", None)
    assert resolve(path).hf_config["tie_word_embeddings"] is False
    assert resolve(tmp_path / "m.gguf").hf_config["rope_scaling"]["short_factor"] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("weights", [b"", b"\xff" * 8, struct.pack("<Q", 2**40), struct.pack("<Q", 4) + b"[1]"])
def test_a_header_that_is_none(tmp_path: Path, weights: bytes) -> None:
    path = folder(tmp_path / "m", {"text_config": CONFIG}, weights=weights)
    for read in (resolve, stored_names):
        with pytest.raises(ModelLoadError, match="truncated or corrupt"):
            read(path)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_no_weight(tmp_path: Path, kind: str) -> None:
    """The GGUF file beside it is the model."""
    path = folder(tmp_path / "m")
    (path / "model.safetensors").unlink()
    (os.mkfifo if kind == "pipe" else os.mkdir)(path / "model.safetensors")
    write_gguf(path / "m.gguf")
    assert resolve(path).format == "gguf"


def test_a_generation_config_is_bounded_too(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ModelLoadError, match=r"generation_config.json is nested more than 64 deep"):
        resolve(folder(tmp_path / "m", generation={"a": deep}))


def test_what_is_left_is_an_error_that_names_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.checkpoint.source.text_config", lambda *_: {}["x"])
    with pytest.raises(ModelLoadError, match="m: config.json or a file beside it is damaged: KeyError: 'x'"):
        resolve(folder(tmp_path / "m"))


def test_no_home_is_no_model() -> None:
    with pytest.raises(ModelLoadError, match="can't be a model's name"):
        locate("~nosuchuser/model")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"architectures": {"a": 1}}, "config.json: architectures="),
        ({"id2label": {"one": "a"}}, "config.json: id2label=.* must have numbers as keys"),
        ({"id2label": {"9" * 5000: "a"}}, "config.json: id2label=.* must have numbers as keys"),
        ({"id2label": [1]}, "config.json: id2label=.* must be an object"),
        ({"num_labels": 10**9}, "config.json: num_labels=1000000000 is more than any model has"),
    ],
)
def test_labels_that_can_not_be(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        labels_of({"architectures": ["BertForSequenceClassification"], **settings})


# -- GGUF


def write_gguf(path: Path, changes: dict[str, Any] | None = None, tensors: tuple[str, ...] = ()) -> Path:
    """``changes``: metadata by its whole key."""
    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, Any] = {
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 48,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.scaling.original_context_length": 32,
    } | (changes or {})
    for key, value in values.items():
        if isinstance(value, int) and value > 2**31:
            writer.add_uint64(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float64(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((16, 32), np.float32))
    for name in ("blk.0.attn_norm.weight", *tensors):
        writer.add_tensor(name, np.zeros(32, np.float32))
    for kind in ("short", "long"):
        writer.add_tensor(f"rope_factors_{kind}.weight", np.arange(1, 5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"llama.block_count": 2**32 - 1}, "block_count=4294967295 is more than any model has: 4096"),
        ({"llama.block_count": 3}, "block_count is 3, and the file has tensors of 1 layers"),
        ({"llama.attention.head_count": 2**32 - 4}, "head_count=4294967292 is more than any model has: 65536"),
        ({"llama.context_length": 2**63}, "context_length=9223372036854775808 is more"),
        ({"llama.block_count": [[1], [2]]}, "block_count"),
        ({"llama.rope.freq_base": -1.0}, "freq_base=-1.0 must be a finite number above 0"),
    ],
)
def test_a_gguf_of_impossible_numbers(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        resolve(write_gguf(tmp_path / "m.gguf", changes))


def test_an_end_token_of_a_gguf_is_one_of_its_vocabulary(tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 2**40}
    assert resolve(write_gguf(tmp_path / "m.gguf", ends)).eos_token_ids == [5]


def raw_gguf(path: Path, num_pairs: int, num_tensors: int, body: bytes) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_pairs) + body)
    return path


@pytest.mark.timeout(20)
def test_what_costs_a_round_each_is_bounded(tmp_path: Path) -> None:
    array = struct.pack("<IQ", 0, 0)  # of no bytes
    many = struct.pack("<Q1sIIQ", 1, b"a", 9, 9, 2_000_000) + array * 2_000_000
    with pytest.raises(ModelLoadError, match="more than 65536 arrays within arrays"):
        GgufFile(raw_gguf(tmp_path / "nested.gguf", 1, 0, many))
    pairs = struct.pack("<QIB", 0, 0, 0) * 70_000
    with pytest.raises(ModelLoadError, match="70000 metadata pairs, where models have 65536 at most"):
        GgufFile(raw_gguf(tmp_path / "pairs.gguf", 70_000, 0, pairs))


def test_bounds_are_what_just_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.checkpoint.gguf_file._MOST_ENTRIES", 3)
    inner = struct.pack("<IQ", 0, 0)
    for count, problem in ((3, ""), (4, "more than 3 arrays within arrays")):
        outer = struct.pack("<IQIQ", 9, 2, 9, count - 2) + inner * (count - 2) + inner
        nested = struct.pack("<Q1sI", 1, b"a", 9) + outer
        pairs = b"".join(struct.pack("<Q1sIB", 1, b"%d" % i, 0, 0) for i in range(count))
        tensors = b"".join(struct.pack("<Q1sIQIQ", 1, b"%d" % i, 1, 8, 0, 32 * i) for i in range(count))
        for name, pairs_tensors, body, said in (
            ("nested", (1, 0), nested, problem),
            ("pairs", (count, 0), pairs, problem and "4 metadata pairs, where models have 3 at most"),
            ("tensors", (0, count), tensors + bytes(32 * count + 32), problem and "4 tensors, where models have 3"),
        ):
            path = raw_gguf(tmp_path / f"{name}.gguf", *pairs_tensors, body)
            with pytest.raises(ModelLoadError, match=said) if said else contextlib.nullcontext():
                GgufFile(path)


def test_a_file_of_99999_asks_the_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m-00001-of-99999.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(Path, "is_file", None)
    with pytest.raises(ModelLoadError, match="one of 99999 files, of which 99998 are missing"):
        GgufFile(path)


CUT_SHORT = """
import os, sys
from aengine.checkpoint import GgufFile
from aengine.errors import ModelLoadError
file = GgufFile(sys.argv[1])
os.truncate(sys.argv[1], 4096)
assert len(file.metadata["tokenizer.ggml.tokens"]) == 300_000  # read already
try:
    file.read_floats("rope_factors_long.weight")
except ModelLoadError as error:
    print(error)
"""


def test_a_file_that_is_cut_short_ends_no_host(tmp_path: Path) -> None:
    """In a process of its own, which a map would end by SIGBUS."""
    path = write_gguf(tmp_path / "m.gguf", {"tokenizer.ggml.tokens": [f"token {i}" for i in range(300_000)]})
    done = subprocess.run([sys.executable, "-c", CUT_SHORT, str(path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cut short while it was read" in done.stdout


# -- the reader of values


@pytest.mark.parametrize(
    ("value", "read", "problem"),
    [
        (True, "integer", "must be an integer >= 1"),
        (1.0, "integer", "must be an integer >= 1"),
        ("1", "integer", "must be an integer >= 1"),
        (0, "integer", "must be an integer >= 1"),
        (2**31, "integer", "is more than any model has"),
        (float("nan"), "number", "must be a finite number"),
        (float("inf"), "number", "must be a finite number"),
        (10**400, "number", "must be a finite number"),
        (True, "number", "must be a finite number"),
        ("1", "number", "must be a finite number"),
        ([1, float("nan")], "numbers", "must be a list of finite numbers"),
        ({"1": 1}, "numbers", "must be a list of numbers"),
        ([-1], "integers", "must be a list of integers >= 0"),
        (2, "flag", "must be true or false"),
        ([], "flag", "must be true or false"),
        (5, "text", "must be a text"),
        (["a", 1], "texts", "must be a list of texts"),
        ([1], "objects", "must be a list of objects"),
        ([], "mapping", "must be an object"),
    ],
)
def test_a_value_of_another_kind_is_named(value: Any, read: str, problem: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"config.json: the_key=.*{problem}") as caught:
        getattr(ValueReader({"the_key": value}), read)("the_key")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("num_hidden_layers", 4096),
        ("num_layers", 4096),
        ("n_layers", 4096),
        ("n_layer", 4096),
        ("llama.block_count", 4096),
        ("num_attention_heads", 65_536),
        ("num_key_value_heads", 65_536),
        ("llama.attention.head_count", 65_536),
        ("llama.attention.head_count_kv", 65_536),
        ("num_local_experts", 16_384),
        ("num_experts", 16_384),
        ("llama.expert_count", 16_384),
    ],
)
def test_counts_of_what_is_made_one_by_one_have_bounds_of_their_own(key: str, most: int) -> None:
    assert ValueReader({key: most}).integer(key) == most
    with pytest.raises(ModelLoadError, match=f"{key}={most + 1} is more than any model has: {most} at most"):
        ValueReader({key: most + 1}).integer(key)


@pytest.mark.parametrize("read", ["integer_or_none", "number_or_none"])
def test_null_is_no_value(read: str) -> None:
    assert getattr(ValueReader({"key": None}), read)("key") is None
    reader = ValueReader({"key": None})
    assert (reader.integer("key", 5), reader.number("key", 0.5), reader.flag("key", True)) == (5, 0.5, True)
    assert (reader.numbers("key"), reader.texts("key"), reader.mapping("key"), reader.text("key")) == ([], [], {}, "")
    with pytest.raises(ModelLoadError, match="has no 'key'"):
        reader.integer("key")


def test_large_integers_stay_as_they_are_up_to_64_bits(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"a": [2**64 - 1, -(2**63), 2**53 + 1], "b": 2**64, "c": -(2**63) - 1}))
    found = read_json(path)
    assert found["a"] == [2**64 - 1, -(2**63), 2**53 + 1]
    assert (found["b"], found["c"]) == (2.0**64, -(2.0**63)) and isinstance(found["b"], float)
