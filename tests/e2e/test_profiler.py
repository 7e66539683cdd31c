"""`start_profile` and `stop_profile` on a real worker with a tiny model."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from conftest_api import settled

from aengine import AsyncLLM, EngineClosedError, InvalidRequestError, SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "models"))  # behind all else: that folder has a conftest.py too
from tiny import write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[AsyncLLM]:
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 8 * 2**20, "device": "cpu"}
    async with AsyncLLM(str(folder), num_threads=1, **settings) as engine:
        yield engine


def events_of(path: str) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


async def test_a_trace(engine: AsyncLLM, tmp_path: Path, no_blocking: None) -> None:
    wanted = tmp_path / "deep" / "traces"
    assert await engine.start_profile(wanted) == str(wanted)
    with pytest.raises(InvalidRequestError, match=f"already, for {wanted}: stop_profile"):
        await engine.start_profile()
    before = await engine.generate([1, 2, 3], PARAMS)
    path = await engine.stop_profile()
    with pytest.raises(InvalidRequestError, match="no profile is being recorded"):
        await engine.stop_profile()
    assert await engine.generate([1, 2, 3], PARAMS, cache_salt="b") is not None
    again = await engine.start_profile()
    second = await engine.stop_profile()
    assert (await engine.generate([1, 2, 3], PARAMS)).token_ids == before.token_ids
    await settled(engine)
    assert Path(path).parent == wanted and Path(path).name.startswith("aengine-rank0-") and path.endswith(".json.gz")
    names = {event.get("name", "") for event in events_of(path)}
    assert names >= {"execute_model", "sample_tokens"}
    assert any("mm" in name or "linear" in name or "product" in name for name in names), names
    assert Path(second).parent == Path(again) and Path(again).name.startswith("aengine-profile-")
    assert [path] == [str(p) for p in wanted.iterdir()]


async def test_while_requests_run(engine: AsyncLLM, tmp_path: Path) -> None:
    stream = engine.stream([5, 6], SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
    await anext(stream)
    await engine.start_profile(str(tmp_path))
    await anext(stream)
    path = await engine.stop_profile()
    assert len([token async for token in stream]) == 98
    await settled(engine)
    assert events_of(path)


async def test_a_relative_folder_is_the_hosts(
    engine: AsyncLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert await engine.start_profile("here") == str(tmp_path / "here")
    assert (await engine.stop_profile()).startswith(str(tmp_path / "here"))
    await settled(engine)


async def test_a_cpu_has_no_range_of_a_profiler(engine: AsyncLLM, tmp_path: Path, monkeypatch: Any) -> None:
    """A folder of that name is another matter."""
    with pytest.raises(InvalidRequestError, match='folder="cuda": a cpu has no .* "./cuda" for one of that name'):
        await engine.start_profile("cuda")
    monkeypatch.chdir(tmp_path)
    assert await engine.start_profile("./cuda") == str(tmp_path / "cuda")
    assert (await engine.stop_profile()).startswith(str(tmp_path / "cuda"))
    assert engine.describe()["cudagraph_mode"] == "NONE" and not engine.describe()["cudagraph_capture_sizes"]
    assert {each.mode for each in engine.statistics().graphs} <= {"NONE"}


async def test_wrong_folders(engine: AsyncLLM, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (3, b"x", ["x"], "a\udcffb"):
        with pytest.raises(InvalidRequestError, match="folder="):
            await engine.start_profile(wrong)  # type: ignore[arg-type]
    for wrong in (tmp_path / "file", tmp_path / "file" / "below", "/proc/none", "a\0b"):
        with pytest.raises(InvalidRequestError, match="can't be written to"):
            await engine.start_profile(wrong)
    await engine.start_profile(tmp_path)
    await engine.stop_profile()
    await settled(engine)


async def test_not_running(folder: Path) -> None:
    engine = AsyncLLM(str(folder))
    with pytest.raises(EngineClosedError):
        await engine.start_profile()
    with pytest.raises(EngineClosedError):
        await engine.stop_profile()
