"""The whole engine, in a real worker process, given models that can't be loaded and hosts that behave oddly."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest_api import settled
from forked_workers import TEMPLATES

from aengine import AsyncLLM, EngineClosedError, ModelLoadError, SamplingParams, WorkerDiedError
from aengine.checkpoint.source import locate

sys.path.append(str(Path(__file__).parents[1] / "models"))  # behind all else: that folder has a conftest.py too
from tiny import write_tiny_model

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "kv_cache_memory_bytes": 8 * 2**20,
    "num_threads": 1,
}
SHORT = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=240, temperature=0, ignore_eos=True)
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("pristine"), "llama", seed=3)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("other"), "qwen3", seed=4)


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process, no name in /dev/shm and no worker thread outlives a test."""
    yield
    gc.collect()
    check_nothing_left()


def check_nothing_left() -> None:
    """A worker whose start failed is killed, not waited for: its end may take a moment."""
    deadline = time.monotonic() + 60
    while leftovers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert leftovers() == []


def leftovers() -> list[str]:
    names = [name for name in os.listdir("/dev/shm") if f"aengine-{os.getpid()}-" in name]
    children = [str(child) for child in psutil.Process().children(recursive=True) if child.pid not in TEMPLATES]
    threads = [thread.name for thread in threading.enumerate() if "aengine" in thread.name]
    return names + children + threads


def llm(folder: Path, **config: Any) -> AsyncLLM:
    return AsyncLLM(str(folder), **(SETTINGS | config))


async def gone(pid: int) -> None:
    for _ in range(500):
        if not psutil.pid_exists(pid):
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{pid} is still there")


# -- models that can't be loaded


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama",')


def unknown_architecture(folder: Path) -> None:
    edit_config(folder, model_type="perceptron", architectures=["PerceptronForCausalLM"])


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def endless_tokenizer(folder: Path) -> None:
    """Of 64 GB that take no place on the disk."""
    with open(folder / "tokenizer.json", "wb") as file:
        file.truncate(1 << 36)


def odd_special_token(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"bos_token": [1]}')


def intact(folder: Path) -> None:
    pass


def edit_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


# One of each place that refuses: all that the loader and the plan of memory refuse is in tests/models and tests/runner.
BAD: dict[str, tuple[Callable[[Path], None], dict[str, Any], str]] = {
    "no config": (no_config, {}, r"holds no model: looked for config\.json"),
    "config no JSON": (config_that_is_no_json, {}, r"config\.json is not valid JSON"),
    "architecture": (unknown_architecture, {}, r"'perceptron' is not supported: .*`aengine models` lists what runs"),
    "truncated": (truncated, {}, r"model\.safetensors is truncated or corrupt: .*fetch it again"),
    "endless tokenizer": (
        endless_tokenizer,
        {},
        r"tokenizer\.json is no file of a model's settings: it has 68719476736",
    ),
    "odd token": (odd_special_token, {}, r"tokenizer_config\.json: bos_token=\[1\] must be a text"),
    "no tokenizer": (no_tokenizer, {}, r"no tokenizer\.json.*skip_tokenizer=True"),
    "tiny KV": (intact, {"kv_cache_memory_bytes": 50_000}, r"max_model_len=256 are needed: raise kv_cache_memory_b"),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_model_that_can_not_be_loaded(case: str, folder: Path) -> None:
    spoil, config, text = BAD[case]
    spoil(folder)
    engine = llm(folder, **config)
    with pytest.raises(ModelLoadError, match=text):
        await engine.start()
    check_nothing_left()
    with pytest.raises(EngineClosedError):
        engine.stream(PROMPT)
    await engine.aclose()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
async def test_no_gpu(pristine: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"device='cuda:3'.*, or use device='cpu'$"):
        await llm(pristine, device="cuda:3").start()
    check_nothing_left()


@pytest.mark.parametrize("size", [0, 3, 20, 100_000, 8_000_000])
async def test_a_truncated_gguf(size: int, tmp_path: Path) -> None:
    """Cut within the magic, the header, the vocabulary, and the weights."""
    file = tmp_path / "model.gguf"
    with open(locate("smollm2-135m"), "rb") as whole:
        file.write_bytes(whole.read(size))
    with pytest.raises(ModelLoadError, match=r"model\.gguf is (empty|damaged or )") as caught:
        await AsyncLLM(str(file)).start()
    assert size < 8_000_000 or "was the download cut short?" in str(caught.value)
    check_nothing_left()


async def test_a_repaired_model_starts(pristine: Path, folder: Path) -> None:
    """The same object, after its failure."""
    garbage(folder)
    engine = llm(folder)
    for _ in range(2):
        with pytest.raises(ModelLoadError):
            await engine.start()
    shutil.copy(pristine / "model.safetensors", folder)
    async with engine, llm(pristine) as sound:
        assert (await engine.generate(PROMPT, SHORT)).token_ids == (await sound.generate(PROMPT, SHORT)).token_ids


# -- hosts


async def test_two_engines_at_once(pristine: Path, other: Path) -> None:
    async with llm(pristine) as one:
        expected = [(await one.generate([i, 2, 3], SHORT)).token_ids for i in range(8)]
    async with llm(pristine) as one, llm(other) as two:
        assert one.describe()["pid"] != two.describe()["pid"]
        calls = [engine.generate([i, 2, 3], SHORT) for i in range(8) for engine in (one, two)]
        completions = await asyncio.gather(*calls)
        assert [c.token_ids for c in completions[::2]] == expected
        assert [c.token_ids for c in completions[1::2]] != expected
        await two.aclose()
        assert (await one.generate([0, 2, 3], SHORT)).token_ids == expected[0]
        await settled(one)


async def test_two_engines_start_together(pristine: Path, other: Path) -> None:
    one, two = llm(pristine), llm(other)
    await asyncio.gather(one.start(), two.start(), one.start())
    assert len((await one.generate(PROMPT, SHORT)).token_ids) == 12
    assert len((await two.generate(PROMPT, SHORT)).token_ids) == 12
    await asyncio.gather(one.aclose(), two.aclose())


async def test_in_a_thread_with_its_own_loop(pristine: Path) -> None:
    """Beside one of the same model on the test's loop; the loop here goes on meanwhile."""
    found: dict[str, Any] = {}

    async def inside() -> None:
        async with llm(pristine) as engine:
            found["engine"] = engine
            found["tokens"] = [token.token_id async for token in engine.stream(PROMPT, LONG)]
            ready.set()
            while not release.is_set():
                await asyncio.sleep(0.01)

    ready, release = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(inside()))
    thread.start()
    try:
        async with llm(pristine) as engine:
            assert (await engine.generate(PROMPT, LONG)).token_ids is not None
            while not ready.is_set() and thread.is_alive():
                await asyncio.sleep(0.01)
            with pytest.raises(EngineClosedError, match="another event loop"):
                found["engine"].stream(PROMPT)
            with pytest.raises(EngineClosedError, match="another event loop"):
                await found["engine"].start()
            assert tuple(found["tokens"]) == (await engine.generate(PROMPT, LONG)).token_ids
    finally:
        release.set()
        await asyncio.to_thread(thread.join, 20)
    assert not thread.is_alive()


def test_a_second_loop_after_the_first_was_closed(pristine: Path) -> None:
    """Without aclose, once idle and once in the middle of a stream."""
    engine = llm(pristine)
    tokens: list[tuple[int, ...]] = []
    pids: list[int] = []

    async def use(leave_a_stream: bool) -> Any:
        await engine.start()
        pids.append(engine.describe()["pid"])
        if len(pids) > 1:
            await gone(pids[-2])
        tokens.append((await engine.generate(PROMPT, SHORT)).token_ids)
        stream = engine.stream(PROMPT, LONG) if leave_a_stream else None
        if stream is not None:
            await anext(stream)
        return stream

    async def stale() -> None:
        with pytest.raises(EngineClosedError, match="event loop .*was closed"):
            engine.stream(PROMPT)

    left = []
    for leave_a_stream in (False, True, False):
        loop = asyncio.new_event_loop()
        left.append(loop.run_until_complete(use(leave_a_stream)))
        loop.close()
    asyncio.run(stale())

    async def last() -> None:
        await use(False)
        await engine.aclose()

    asyncio.run(last())
    assert len(set(tokens)) == 1 and len(set(pids)) == 4


async def test_a_consumer_that_stops_reading_holds_up_nobody(pristine: Path) -> None:
    async with llm(pristine) as engine:
        expected = (await engine.generate(PROMPT, LONG)).token_ids
        stalled = engine.stream(PROMPT, LONG)
        first = await anext(stalled)
        for i in range(2):
            completions = await asyncio.gather(*(engine.generate([i, j], LONG) for j in range(3)))
            assert all(len(c.token_ids) == 240 for c in completions)
        rest = [token.token_id async for token in stalled]
        assert (first.token_id, *rest) == expected
        await settled(engine)


async def test_a_stream_that_is_dropped_is_forgotten(pristine: Path) -> None:
    async with llm(pristine) as engine:
        stream = engine.stream(PROMPT, LONG)
        await anext(stream)
        await stream.aclose()
        async for _ in engine.stream(PROMPT, LONG):
            break
        gc.collect()
        assert len((await engine.generate(PROMPT, SHORT)).token_ids) == 12
        await settled(engine)


async def test_without_restarts_a_killed_worker_reaches_every_stream(pristine: Path) -> None:
    """And a new start works."""
    engine = await llm(pristine, max_restarts=0).start()
    expected = (await engine.generate(PROMPT, SHORT)).token_ids
    for _ in range(2):
        pid = engine.describe()["pid"]
        read = engine.stream(PROMPT, LONG)
        unread = engine.stream([1, 2], LONG)
        whole = asyncio.create_task(engine.generate([3, 4], LONG))
        await anext(read)
        os.kill(pid, signal.SIGKILL)

        async def to_the_end(stream: Any) -> None:
            async for _ in stream:
                pass

        ends = await asyncio.gather(to_the_end(read), to_the_end(unread), whole, return_exceptions=True)
        for end in ends:
            assert isinstance(end, WorkerDiedError), ends
            assert end.exit_code == -signal.SIGKILL and "SIGKILL" in str(end)
        await gone(pid)
        assert engine.state == "failed"
        with pytest.raises(EngineClosedError, match="SIGKILL"):
            engine.stream(PROMPT)
        await engine.start()
        assert engine.describe()["pid"] != pid
        assert (await engine.generate(PROMPT, SHORT)).token_ids == expected
    await settled(engine)
    await engine.aclose()


async def test_a_worker_killed_while_idle_is_replaced(pristine: Path) -> None:
    async with llm(pristine) as engine:
        expected = (await engine.generate(PROMPT, SHORT)).token_ids
        pid = engine.describe()["pid"]
        os.kill(pid, signal.SIGKILL)
        await gone(pid)
        assert (await engine.generate(PROMPT, SHORT)).token_ids == expected
        assert engine.statistics().num_restarts == 1 and engine.describe()["pid"] != pid
        assert await engine.check_health() > 0
