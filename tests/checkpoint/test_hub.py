"""Models of the hub, GGUF files above all, from a hub on 127.0.0.1 and in processes that are told where it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hub_server import Hub, serve_hub

RESOLVE = """
import json, sys, warnings
from aengine.checkpoint import resolve_model
from aengine.config import EngineConfig
from aengine.errors import ModelLoadError

for config in json.load(sys.stdin):
    reports = []
    try:
        source = resolve_model(EngineConfig(**config), reports.append)
        found = {"path": source.path, "format": source.format}
    except ModelLoadError as error:
        found = {"error": str(error)}
    found["bytes"] = [(r.done, r.total) for r in reports if r.unit == "bytes"]
    print(json.dumps(found))
"""
Resolve = Callable[..., list[dict[str, Any]]]
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"


def make_gguf(path: Path, rows: int = 16, split: int = 0) -> None:
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((rows, 32), np.float32))
    writer.add_tensor("blk.0.attn_norm.weight", np.zeros((rows, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("repositories")
    make_gguf(folder / "whole.gguf")
    make_gguf(folder / "split.gguf", split=1)
    whole = (folder / "whole.gguf").read_bytes()
    parts = [(folder / f"split-0000{n}-of-00002.gguf").read_bytes() for n in (1, 2)]
    config = json.dumps({"model_type": "llama"}).encode()
    with serve_hub() as hub:
        hub.repositories = {
            "maker/many-GGUF": {
                "README.md": b"# many",
                "config.json": config,
                "many-Q4_K_M.gguf": whole,
                "many-q8_0.gguf": whole,
                "mmproj-many-f16.gguf": b"a projector",
                "F16/many-F16-00001-of-00002.gguf": parts[0],
                "F16/many-F16-00002-of-00002.gguf": parts[1],
            },
            "maker/one-GGUF": {"one.Q4_0.gguf": whole},
            "maker/both": {"config.json": config, "model.safetensors": NO_TENSORS, "both-Q8_0.gguf": whole},
            "maker/neither": {"config.json": config, "pytorch_model.bin": b"x"},
            "maker/text": {"README.md": b"# text"},
            "maker/torn-GGUF": {"torn-Q4_0-00001-of-00002.gguf": parts[0]},
            "maker/coded": {
                "config.json": config,
                "model.safetensors": NO_TENSORS,
                "modelling.py": b"raise SystemExit",
            },
            "maker/pinned": {
                "config.json": config,
                "generation_config.json": b"{}",
                "tokenizer.json": b"{ }",
                "tokenizer_config.json": b"{  }",
                "chat_template.jinja": b"x",
                "model.safetensors": NO_TENSORS,
                "modelling.py": b"raise SystemExit()",
            },
            "maker/gated": {"config.json": config, "gated-Q4_0.gguf": whole},
        }
        hub.gated = {"maker/gated"}
        yield hub


@pytest.fixture
def resolve(hub: Hub, tmp_path: Path) -> Resolve:
    """Resolve models, each given by its settings, in a process with an HF_HOME of this test."""
    hub.downloads.clear()
    given = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "PYTHONWARNINGS": "error"}

    def resolve(*configs: dict[str, Any], **environment: str) -> list[dict[str, Any]]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
        process = subprocess.run(
            [sys.executable, "-c", RESOLVE],
            input=json.dumps(configs),
            env={**inherited, **given, **environment},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return [json.loads(line) for line in process.stdout.splitlines()]

    return resolve


def test_a_gguf_file_of_a_repository(resolve: Resolve, hub: Hub, tmp_path: Path) -> None:
    many = "maker/many-GGUF"
    found = resolve(
        {"model": f"{many}:Q4_K_M"},
        {"model": many, "gguf_file": "*Q8_0*"},
        {"model": f"{many}:f16"},
        {"model": "maker/one-GGUF"},
        {"model": "maker/both"},
        {"model": "maker/both", "load_format": "gguf"},
        {"model": "maker/one-GGUF", "load_format": "dummy"},  # as a tokenizer is looked for: no weights, but a file
    )
    names = [Path(item.get("path", str(item))).name for item in found]
    split = "many-F16-00001-of-00002.gguf"
    assert names[:4] == ["many-Q4_K_M.gguf", "many-q8_0.gguf", split, "one.Q4_0.gguf"]
    assert [item["format"] for item in found] == ["gguf"] * 4 + ["safetensors", "gguf", "dummy"]
    assert names[5:] == ["both-Q8_0.gguf", "one.Q4_0.gguf"]
    assert all(Path(item["path"]).is_relative_to(tmp_path / "hf" / "hub") for item in found)
    assert (Path(found[2]["path"]).parent / "many-F16-00002-of-00002.gguf").is_file()
    assert "mmproj-many-f16.gguf" not in hub.downloads  # nor anything twice
    assert len(hub.downloads) == len(set(hub.downloads))


def test_code_is_fetched_only_when_it_may_run(resolve: Resolve, hub: Hub) -> None:
    resolve({"model": "maker/coded"})
    assert "config.json" in hub.downloads and "modelling.py" not in hub.downloads
    (found,) = resolve({"model": "maker/coded", "trust_remote_code": True})
    assert "modelling.py" in hub.downloads and (Path(found["path"]) / "modelling.py").is_file()


def test_all_files_are_of_the_revision_that_was_asked_for(resolve: Resolve, hub: Hub) -> None:
    """Settings, tokenizer, chat template and code too: none of them is today's beside weights that somebody read."""
    commit = hub.commit("maker/pinned")
    hub.revisions.clear()
    (found,) = resolve({"model": "maker/pinned", "revision": commit, "trust_remote_code": True})
    assert Path(found["path"]).name == commit
    assert {Path(name).name for name in hub.repositories["maker/pinned"]} == set(hub.downloads)
    assert set(hub.revisions) == {commit}


def test_the_download_is_reported_in_bytes(resolve: Resolve, hub: Hub) -> None:
    (found, again) = resolve({"model": "maker/many-GGUF:Q4_K_M"}, {"model": "maker/many-GGUF:Q4_K_M"})
    size = len(hub.repositories["maker/many-GGUF"]["many-Q4_K_M.gguf"])
    assert found["bytes"][-1] == [size, size]
    assert found["bytes"] == sorted(found["bytes"])
    assert not any(done < total for done, total in again["bytes"])


def test_what_is_not_there_is_said_with_what_is(resolve: Resolve) -> None:
    many, torn, missing, absent, neither, text = resolve(
        {"model": "maker/many-GGUF"},
        {"model": "maker/torn-GGUF"},
        {"model": "maker/many-GGUF:Q5_K_M"},
        {"model": "maker/absent:Q4_K_M"},
        {"model": "maker/neither"},
        {"model": "maker/text"},
    )
    assert "several GGUF models: choose one by gguf_file" in many["error"]
    assert "F16/many-F16-00001-of-00002.gguf (0 MB, 2 files), many-Q4_K_M.gguf (0 MB), many-q8_0.gguf" in many["error"]
    assert "mmproj" not in many["error"]
    assert "lacks 1 of the 00002 files of torn-Q4_0-00001-of-00002.gguf" in torn["error"]
    assert "has no GGUF file for quantisation 'Q5_K_M'; it has: " in missing["error"]
    assert "there is no model 'maker/absent' on the hub (is it spelled right?" in absent["error"]
    assert "the hub's maker/text holds no .gguf file; it has: README.md" in text["error"]
    assert "holds no model" in neither["error"] and "config.json" in neither["error"]


def test_a_token_opens_a_gated_repository(resolve: Resolve, hub: Hub) -> None:
    gated = {"model": "maker/gated:Q4_0"}
    assert "request access on its page on the hub, and log in: set HF_TOKEN" in resolve(gated)[0]["error"]
    assert "the hub answered 401; is the token valid? set HF_TOKEN" in resolve(gated, HF_TOKEN="hf_wrong")[0]["error"]
    assert resolve(gated, HF_TOKEN=hub.token)[0]["format"] == "gguf"


def test_nothing_is_said_on_stderr(resolve: Resolve, capfd: pytest.CaptureFixture[str]) -> None:
    resolve({"model": "maker/one-GGUF"}, {"model": "maker/both"})
    assert capfd.readouterr().err == ""


def test_offline_only_the_cache_is_looked_at(resolve: Resolve, hub: Hub) -> None:
    cached = {"model": "maker/many-GGUF", "gguf_file": "*Q4*"}
    other = {"model": "maker/many-GGUF", "gguf_file": "*Q8*"}
    resolve(cached)
    hub.downloads.clear()
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        found, missing, absent = resolve(cached, other, {"model": "maker/one-GGUF"}, **environment)
        assert Path(found["path"]).name == "many-Q4_K_M.gguf"
        cause = "HF_HUB_OFFLINE is set" if "HF_HUB_OFFLINE" in environment else "the hub can't be reached"
        assert f"({cause}) has no GGUF file for gguf_file='*Q8*'; it has: many-Q4_K_M.gguf" in missing["error"]
        assert cause in absent["error"]
    assert hub.downloads == []


def test_a_cache_that_cannot_be_written(resolve: Resolve, tmp_path: Path) -> None:
    (tmp_path / "hf").write_text("not a folder")
    for model in ("maker/one-GGUF", "maker/one-GGUF:Q4_0"):
        assert "set HF_HOME to a folder that can be written" in resolve({"model": model})[0]["error"]
