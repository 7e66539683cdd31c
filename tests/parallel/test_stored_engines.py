"""Prefixes that come back from stores: the answers of an engine that computes them, in the next process, in another
engine, on ranks; and from stores that fail."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from callers_stores import MemoryStore, Misbehaving
from conftest_api import core_of, settled, until
from redis_server import redis_server
from test_kv_tiers_engine import GREEDY, HALF, SMALL, tiers_of
from test_pipeline_engine import SETTINGS, essence, work

from aengine import AsyncLLM, HostTier, ModelLoadError, StoreTier
from aengine.engine.replicas.replica import Replica
from aengine.engine.stores import asked_store
from aengine.engine.tiers import choice, stored_pages
from aengine.engine.tiers.stored_pages import StoredPages

TinyModel = Callable[..., Path]
PROMPT = list(range(20, 90))

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_blocking")]


def stores_of(engine: AsyncLLM, replica: int = 0) -> StoredPages:
    stores = tiers_of(engine, replica).below
    assert isinstance(stores, StoredPages)
    return stores


def num_loaded(engine: AsyncLLM) -> int:
    return sum(tier.num_fetched for tier in engine.statistics().kv_tiers[1:])


async def saved(engine: AsyncLLM) -> None:
    """Wait until the stores have all that they are given."""
    for index in range(len(core_of(engine).replicas)):
        tiers, stores = tiers_of(engine, index), stores_of(engine, index)
        await until(lambda: not tiers.unsaved and not tiers.jobs and not stores.num_saving)


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", seed=3, num_hidden_layers=5)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Any]:
    async def answers() -> list[Any]:
        async with AsyncLLM(model, **SETTINGS) as engine:
            return [essence(completion) for completion in await asyncio.gather(*work(engine, 1))]

    return asyncio.run(answers())


@pytest.fixture(scope="module")
def answer(model: Path) -> Any:
    """What PROMPT is answered by any engine."""

    async def generated() -> Any:
        async with AsyncLLM(model, **SMALL) as engine:
            return (await engine.generate(PROMPT, GREEDY)).token_ids

    return asyncio.run(generated())


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    MemoryStore.kept.clear()
    Misbehaving.num_calls = 0
    Misbehaving.let_go.clear()
    yield
    Misbehaving.let_go.set()


@pytest.fixture(autouse=True)
def loads_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What computing takes is not known, so that whatever is stored is loaded."""
    monkeypatch.setattr(Replica, "_seconds_of", lambda self, num_tokens: 0.0)


async def test_what_is_computed_sooner_is_not_loaded(model: Path, answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = [HostTier("16MB"), StoreTier("callers_stores:MemoryStore")]
    async with AsyncLLM(model, kv_tiers=tiers, **SMALL) as engine:
        assert (await engine.generate(PROMPT, GREEDY)).token_ids == answer
        await saved(engine)
    asked: list[int] = []
    stores: list[asked_store.AskedStore] = []

    def seconds_of(replica: Replica, num_tokens: int) -> float:
        asked.append(num_tokens)
        return 1.0

    def new_store(*args: Any) -> asked_store.AskedStore:
        stores.append(asked_store.AskedStore(*args))
        return stores[-1]

    monkeypatch.setattr(Replica, "_seconds_of", seconds_of)
    monkeypatch.setattr(choice, "AskedStore", new_store)
    async with AsyncLLM(model, kv_tiers=tiers, **SMALL) as engine:
        store = stores[-1]
        store.page_seconds = 1.05 / (len(PROMPT) // engine.describe()["block_size"])
        completion = await engine.generate(PROMPT, GREEDY)
        assert completion.token_ids == answer and not num_loaded(engine) and not completion.usage.cached_tokens
        assert store.page_seconds < 1.0 / (len(PROMPT) // engine.describe()["block_size"])  # it is tried again
    async with AsyncLLM(model, kv_tiers=tiers, **SMALL) as engine:
        store = stores[-1]
        store.page_seconds = 0.9 / (len(PROMPT) // engine.describe()["block_size"])
        completion = await engine.generate(PROMPT, GREEDY)
        assert completion.token_ids == answer and num_loaded(engine) and completion.usage.cached_tokens
        assert 0 < store.page_seconds < 0.1  # what this load took counts
    assert asked == [completion.usage.cached_tokens] * 2


@pytest.mark.parametrize(
    "ranks",
    [{}, {"tensor_parallel_size": 2} | HALF, {"pipeline_parallel_size": 2} | HALF, {"data_parallel_size": 2}],
    ids=["one", "tensor", "pipeline", "replicas"],
)
async def test_any_request_of_the_next_process(
    model: Path, expected: list[Any], tmp_path: Path, ranks: dict[str, Any]
) -> None:
    for is_first in (True, False):
        tiers = f"host:16MB,disk:{tmp_path / 'kv'}:64MB"
        async with AsyncLLM(model, kv_tiers=tiers, **SMALL | ranks) as engine:
            assert [essence(completion) for completion in await asyncio.gather(*work(engine, 1))] == expected
            await saved(engine)
            assert is_first or num_loaded(engine) > 20
            await settled(engine)


async def test_damaged_pages_are_computed(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = None
    for damage in (False, True):
        if damage:
            for path in (tmp_path / "kv").glob("*/*"):
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 4
                path.write_bytes(content)
        async with AsyncLLM(model, kv_tiers=f"host:16MB,disk:{tmp_path / 'kv'}:64MB", **SMALL) as engine:
            completion = await engine.generate(PROMPT, GREEDY)
            expected = expected or completion.token_ids
            assert completion.token_ids == expected and not completion.usage.cached_tokens and not num_loaded(engine)
            await saved(engine)
    assert "computed again" in caplog.text


async def test_a_host_tier_of_a_few_pages(model: Path, expected: list[Any], tmp_path: Path) -> None:
    for _ in range(2):
        async with AsyncLLM(model, kv_tiers=f"host:100kB,disk:{tmp_path / 'kv'}:64MB", **SMALL) as engine:
            assert [essence(completion) for completion in await asyncio.gather(*work(engine, 1))] == expected
            await saved(engine)
            await settled(engine)


@pytest.mark.parametrize("ranks", [{}, {"tensor_parallel_size": 2} | HALF], ids=["one", "tensor"])
async def test_one_engine_computes_prompts_and_another_goes_on(model: Path, ranks: dict[str, Any]) -> None:
    tiers = [HostTier("16MB"), StoreTier("callers_stores:MemoryStore", name="shared")]
    async with (
        AsyncLLM(model, kv_tiers=tiers, **SMALL | ranks) as prefill,
        AsyncLLM(model, kv_tiers=tiers, **SMALL | ranks) as decode,
    ):
        await prefill.generate(PROMPT, GREEDY.replace(max_tokens=1))
        await saved(prefill)
        completion = await decode.generate(PROMPT, GREEDY)
        assert completion.usage.cached_tokens == 68 and num_loaded(decode) == 17
        assert completion.token_ids == (await prefill.generate(PROMPT, GREEDY)).token_ids
        other = await decode.generate(PROMPT, GREEDY, cache_salt="another")
        assert other.token_ids == completion.token_ids and not other.usage.cached_tokens


async def test_engines_share_a_redis_server(model: Path, tmp_path: Path, answer: Any) -> None:
    with redis_server(tmp_path) as url:
        tiers, ranks = f"host:16MB,redis:url={url};prefix=test", {"tensor_parallel_size": 2} | HALF
        async with (
            AsyncLLM(model, kv_tiers=tiers, **SMALL | ranks) as prefill,
            AsyncLLM(model, kv_tiers=tiers, **SMALL | ranks) as decode,
        ):
            await prefill.generate(PROMPT, GREEDY.replace(max_tokens=1))
            await saved(prefill)
            completion = await decode.generate(PROMPT, GREEDY)
            assert completion.usage.cached_tokens == 68 and completion.token_ids == answer
            tier = decode.statistics().kv_tiers[1]
            assert (tier.tier, tier.num_fetched, tier.num_lost) == ("redis", 17, 0)


async def test_many_pages_come_in_parts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_pages, "_MOST_SOUGHT", 9)
    monkeypatch.setattr(stored_pages, "_MOST_IN_CALL", 4)
    tiers = [HostTier("16MB"), StoreTier("callers_stores:MemoryStore")]
    found = []
    for _ in range(2):
        async with AsyncLLM(model, kv_tiers=tiers, **SMALL) as engine:
            completions = await asyncio.gather(*(engine.generate(PROMPT + [i], GREEDY) for i in range(30, 33)))
            found.append([completion.token_ids for completion in completions])
            await saved(engine)
            num_came = num_loaded(engine)
    assert found[0] == found[1] and num_came == 17
    assert [completion.usage.cached_tokens for completion in completions] == [68] * 3


@pytest.mark.parametrize("name", ["gemma2", "qwen3-next"])
async def test_windows_and_states(name: str, tiny_model: TinyModel) -> None:
    from test_hybrids import MODELS

    arch, fields = MODELS.get(name, (name, {"sliding_window": 9} if name == "gemma2" else {}))
    folder = tiny_model(arch, seed=7, **fields, max_position_embeddings=1024)
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 1024, "num_threads": 1, "max_num_seqs": 2}
    tiers = [HostTier("64MB"), StoreTier("callers_stores:MemoryStore")]
    prompt = [(i * 7) % 200 + 20 for i in range(600)]
    found = []
    for _ in range(2):
        async with AsyncLLM(folder, skip_tokenizer=True, kv_tiers=tiers, **settings) as engine:
            completions = [await engine.generate(prompt, GREEDY), await engine.generate([*prompt, *PROMPT], GREEDY)]
            found.append([completion.token_ids for completion in completions])
            await saved(engine)
    assert found[0] == found[1]
    assert all(completion.usage.cached_tokens > 500 for completion in completions)


async def test_what_pages_depend_on(model: Path, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Other weights, another format of KV, other ranks: nothing of what the first engine saved is found."""
    other = tiny_model("qwen3", seed=4, num_hidden_layers=5)
    tiers = [HostTier("16MB"), StoreTier("callers_stores:MemoryStore")]
    for folder, settings in (
        (model, {}),
        (other, {}),
        (model, {"kv_cache_dtype": "fp8"}),
        (model, {"block_size": 8}),
        (model, {"tensor_parallel_size": 2}),
    ):
        async with AsyncLLM(folder, kv_tiers=tiers, **SMALL | settings) as engine:
            completion = await engine.generate(PROMPT, GREEDY)
            assert not completion.usage.cached_tokens and not num_loaded(engine)
            await saved(engine)
    async with AsyncLLM(model, kv_tiers=tiers, **SMALL) as engine:
        completion = await engine.generate(PROMPT, GREEDY)
        assert completion.usage.cached_tokens == 68


async def test_new_weights_and_a_reset(model: Path, tiny_model: TinyModel) -> None:
    tiers = [HostTier("16MB"), StoreTier("callers_stores:MemoryStore")]
    other = tiny_model("qwen3", seed=4, num_hidden_layers=5)
    async with AsyncLLM(other, **SMALL) as engine:
        expected = (await engine.generate(PROMPT, GREEDY)).token_ids
    async with AsyncLLM(model, kv_tiers=tiers, **SMALL) as engine:
        first = (await engine.generate(PROMPT, GREEDY)).token_ids
        await saved(engine)
        await engine.start_weight_update()
        await engine.update_weights(other)
        await engine.finish_weight_update()
        for cached in (0, 68):
            completion = await engine.generate(PROMPT, GREEDY)
            assert completion.token_ids == expected and completion.usage.cached_tokens == cached
            await saved(engine)
        assert num_loaded(engine) == 0
    async with AsyncLLM(model, kv_tiers=tiers, **SMALL) as engine:
        completion = await engine.generate(PROMPT, GREEDY)
        assert completion.token_ids == first and completion.usage.cached_tokens == 68 and num_loaded(engine) == 17
        await engine.reset_prefix_cache()
        assert not (await engine.generate(PROMPT, GREEDY)).usage.cached_tokens


# -- stores that misbehave


@pytest.mark.parametrize(
    ("method", "what"),
    [
        *(("query", "hangs"), ("load", "hangs"), ("save", "hangs"), ("query", "raises"), ("load", "exits")),
        *(("query", "lies"), ("load", "has more"), ("load", "lies")),
    ],
)
async def test_a_store_that_misbehaves(
    model: Path,
    answer: Any,
    method: str,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is left alone, and what it should have had is computed."""
    for name in ("_QUERY_SECONDS", "_LOAD_SECONDS", "_SAVE_SECONDS"):
        monkeypatch.setattr(stored_pages, name, 0.2)
    monkeypatch.setattr(MemoryStore, "query", lambda self, keys: len(keys))  # it has all, as it says
    bad = StoreTier("callers_stores:Misbehaving", name="", method=method, what=what)
    async with AsyncLLM(model, kv_tiers=[HostTier("16MB"), bad], **SMALL) as engine:
        for salt in (None, "a", "b"):
            assert (await engine.generate(PROMPT, GREEDY, cache_salt=salt)).token_ids == answer
            await until(lambda: "is left alone" in caplog.text)
        assert 0 < Misbehaving.num_calls <= asked_store.NUM_THREADS, "those of the first request"
        Misbehaving.let_go.set()
        await until(lambda: not stores_of(engine).num_saving)
        await settled(engine)
        assert num_loaded(engine) == 0


async def test_a_store_that_fails_now_and_then(
    model: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a small host tier, and a worker that dies."""
    monkeypatch.setattr(asked_store, "_PAUSE", 0.005)
    tiers = [HostTier("150kB"), StoreTier("callers_stores:Flaky")]
    async with AsyncLLM(model, kv_tiers=tiers, **SMALL) as engine:
        for turn in range(5):
            asked = work(engine, 1)
            if turn == 2:
                os.kill(core_of(engine).replicas[0].worker.executor.workers[0].pid, signal.SIGKILL)
            assert [essence(completion) for completion in await asyncio.gather(*asked)] == expected
            if turn == 3:
                await engine.reset_prefix_cache()
        await saved(engine)
        await settled(engine)
        assert num_loaded(engine)


async def test_a_store_that_is_gone_beside_one_that_is_there(model: Path, answer: Any) -> None:
    good = StoreTier("callers_stores:MemoryStore")
    bad = StoreTier("callers_stores:Misbehaving", name="another", method="query", what="raises")
    for tiers, cached in (([good], 0), ([bad, good], 68), ([good, bad], 68)):
        async with AsyncLLM(model, kv_tiers=[HostTier("16MB"), *tiers], **SMALL) as engine:
            completion = await engine.generate(PROMPT, GREEDY)
            assert completion.token_ids == answer and completion.usage.cached_tokens == cached
            await saved(engine)


@pytest.mark.parametrize(
    ("tier", "why"),
    [
        (StoreTier("callers_stores:Nothing"), "can't be used: AttributeError"),
        (StoreTier("callers_stores:NoStore"), "it has no method query"),
        (StoreTier("callers_stores:MemoryStore", size=3), "unexpected keyword argument 'size'"),
    ],
)
async def test_stores_that_can_not_be_opened(model: Path, tier: StoreTier, why: str) -> None:
    with pytest.raises(ModelLoadError, match=f"kv_tiers: .*{why}"):
        await AsyncLLM(model, kv_tiers=[HostTier("16MB"), tier], **SMALL).start()
