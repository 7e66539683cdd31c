"""Adapters as the host sees them, over a fake worker whose tokens say which adapter its slot has."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client  # noqa: F401  # importing it on the loop would block that
import pytest
from conftest_api import core_of, until
from fakes import FakeExecutor
from openai import NotFoundError
from safetensors.numpy import save_file

from aengine import AsyncLLM, Completion, EngineConfig, InvalidRequestError, SamplingParams, WorkerDiedError
from aengine.engine import recovery
from aengine.engine.adapters import slots
from aengine.errors import DeadlineExceededError, ModelLoadError
from aengine.ipc.messages import SchedulerOutput
from aengine.telemetry.prometheus import PrometheusCollector

pytestmark = pytest.mark.usefixtures("no_blocking")
Q = "model.layers.0.self_attn.q_proj"
MATRICES = {Q: [12, 8]}
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, detokenize=False)
PROMPT = [5, 6, 7]


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_LONGEST_DELAY", 1e-3)
    monkeypatch.setattr(slots, "PATIENCE", 0.0)


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, str]:
    """Folders of adapters a to f."""
    folders = {name: tmp_path / name for name in "abcdef"}
    for folder in folders.values():
        write(folder)
    return {name: str(folder) for name, folder in folders.items()}


def write(folder: Path, out: int = 12, rank: int = 4, matrix: str = Q) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    shapes = {"A": (rank, 8), "B": (out, rank)}
    factors = {f"{matrix}.lora_{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(factors, folder / "adapter_model.safetensors")


class LoraExecutor(FakeExecutor):
    """Each token is the number of the adapter (a is 1) that its row's slot has as the step begins; 0: none."""

    def __init__(self, loads: dict[str, asyncio.Event], **fake: Any) -> None:
        super().__init__(**fake | {"token": lambda row, position: 100 + self.adapter_of(row)})
        self.ready["lora_matrices"] = MATRICES
        self.slots: dict[int, str] = {}
        self.loads = loads  # what the load of an adapter waits for, by its name
        self.num_loads = 0
        self.is_bad = ""  # the adapter that no worker can read
        self._slot_of_row: dict[int, int] = {}

    def adapter_of(self, row: int) -> int:
        slot = self._slot_of_row.get(row)
        return 0 if slot is None else 1 + "abcdef".index(self.slots[slot])

    def _begin(self, out: SchedulerOutput) -> list[bool]:
        for new in out.new_requests:
            extra = new.extras.get("lora")
            self._slot_of_row[new.req_idx] = -1 if extra is None else int.from_bytes(extra[0], "little")
            if extra is None:
                del self._slot_of_row[new.req_idx]
        return super()._begin(out)

    async def call(self, method: str, *args: Any, timeout: float) -> list[Any]:
        if self.failure is not None:
            raise self.failure
        if method != "load_lora":
            return [method]
        slot, path = args
        name = Path(path).name
        self.num_loads += self.slots.get(slot) != name
        if name == self.is_bad:
            return [f"refused: {path} has numbers that are none"]
        if name in self.loads and not self.loads[name].is_set():
            self.slots.pop(slot, None)
            return ["loading"]
        self.slots[slot] = name
        return ["ready"]


Make = Callable[..., AsyncLLM]


@pytest.fixture
def make(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    loads_of_test: dict[str, asyncio.Event] = {}

    class LoraLLM(make_engine):  # type: ignore[valid-type, misc]  # `FakeLLM`
        loads = loads_of_test

        def _make_executor(self, config: EngineConfig) -> LoraExecutor:
            self.executor = LoraExecutor(self.loads, **self.fake)
            return self.executor

    return LoraLLM


def says(completion: Completion) -> str:
    """The adapter that made all of its tokens."""
    (token,) = set(completion.token_ids)
    return "-abcdef"[token - 100]


async def ask(engine: AsyncLLM, name: str | None, **options: Any) -> str:
    return says(await engine.generate(PROMPT, PARAMS, lora=name, **options))


async def test_each_request_has_its_adapter(make: Make, adapters: dict[str, str]) -> None:
    async with make(loras={name: adapters[name] for name in "ab"}) as engine:
        names = ["a", None, "b", "a", None, "b"]
        assert await asyncio.gather(*(ask(engine, name) for name in names)) == [name or "-" for name in names]
        await engine.add_lora("c", adapters["c"])
        assert await ask(engine, "c") == "c"
        assert {name: one["is_loaded"] for name, one in (await engine.list_loras()).items()} == {
            "a": False,
            "b": True,
            "c": True,
        }
        await engine.remove_lora("c")
        with pytest.raises(InvalidRequestError, match="there is no adapter 'c': there are a, b"):
            await ask(engine, "c")
        chat = await engine.chat([{"role": "user", "content": "x"}], PARAMS.replace(detokenize=True), lora="b")
        assert says(chat) == "b"


async def test_kv_is_shared_only_by_requests_of_one_adapter(make: Make, adapters: dict[str, str]) -> None:
    async with make(loras={name: adapters[name] for name in "ab"}) as engine:
        prompt = list(range(300, 400))
        hits = [(await engine.generate(prompt, PARAMS, lora=name)).usage.cached_tokens for name in "ab-ab"[:2]]
        hits += [(await engine.generate(prompt, PARAMS)).usage.cached_tokens]
        assert hits == [0, 0, 0]
        assert (await engine.generate(prompt, PARAMS, lora="a")).usage.cached_tokens > 0
        await engine.add_lora("a", adapters["c"], replace=True)
        assert (await engine.generate(prompt, PARAMS, lora="a")).usage.cached_tokens == 0


async def test_more_adapters_than_places(make: Make, adapters: dict[str, str], rng: random.Random) -> None:
    async with make(loras=adapters, max_loras=2) as engine:
        names = [rng.choice("abcdef") for _ in range(60)]
        assert await asyncio.gather(*(ask(engine, name) for name in names)) == names
        slots_of = core_of(engine).adapters.slots  # type: ignore[attr-defined]
        assert not slots_of.num_waiting and set(slots_of.num_users.values()) == {0}


async def test_whoever_waits_gets_the_place_of_one_in_use(make: Make, adapters: dict[str, str]) -> None:
    """Though others ask for that adapter all the time."""
    async with make(loras=adapters, max_loras=1) as engine:
        is_over = False

        async def always() -> None:
            while not is_over:
                assert await ask(engine, "a") == "a"

        others = [asyncio.create_task(always()) for _ in range(3)]
        assert await ask(engine, "b") == "b"
        is_over = True
        await asyncio.gather(*others)


async def held(engine: AsyncLLM, name: str) -> AsyncIterator[Any]:
    """A stream that has begun, and holds its adapter until it is left."""
    stream = engine.stream(PROMPT, PARAMS.replace(max_tokens=900), lora=name)
    await anext(aiter(stream))
    return stream


async def test_requests_that_wait_can_end(make: Make, adapters: dict[str, str]) -> None:
    engine: Any = make(loras=adapters, max_loras=1, fake={"delay": 0.005})
    async with engine:
        stream = await held(engine, "a")
        with pytest.raises(DeadlineExceededError, match="its adapter was being loaded"):
            await ask(engine, "b", first_token_deadline=0.02)
        waiting = asyncio.create_task(ask(engine, "c"))
        adapters_of = core_of(engine).adapters
        await until(lambda: adapters_of.slots.num_waiting)  # type: ignore[attr-defined]
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not adapters_of.slots.num_waiting  # type: ignore[attr-defined]
        again = asyncio.create_task(ask(engine, "a"))  # the place was to be left: it is taken up again
        await stream.aclose()
        assert await again == "a"


async def test_a_load_goes_on_without_those_who_began_it(make: Make, adapters: dict[str, str]) -> None:
    engine: Any = make(loras=adapters, max_loras=2)
    async with engine:
        gate = engine.loads["a"] = asyncio.Event()
        first = asyncio.create_task(ask(engine, "a"))
        await until(lambda: engine.executor.num_loads)
        first.cancel()
        assert await asyncio.gather(ask(engine, "b"), ask(engine, None)) == ["b", "-"], "others go on"
        second = asyncio.create_task(ask(engine, "a"))
        gate.set()
        assert await second == "a"


async def test_what_a_worker_refuses_fails_those_who_asked(make: Make, adapters: dict[str, str]) -> None:
    engine: Any = make(loras=adapters, max_loras=1)
    async with engine:
        engine.executor.is_bad = "c"
        results = await asyncio.gather(*(ask(engine, name) for name in "cacb"), return_exceptions=True)
        errors = [one for one in results if isinstance(one, InvalidRequestError)]
        assert [str(one) for one in errors] == ["lora 'c': its folder has numbers that are none"] * 2
        assert errors[0] is not errors[1]
        assert [one for one in results if isinstance(one, str)] == ["a", "b"]


async def test_new_workers_get_the_adapters_before_any_step(make: Make, adapters: dict[str, str]) -> None:
    engine: Any = make(loras=adapters, max_loras=3, fake={"delay": 0.001})
    async with engine:
        names = ["a", "b", None, "a"]
        params = PARAMS.replace(max_tokens=200)
        running = [asyncio.create_task(engine.generate(PROMPT, params, lora=name)) for name in names]
        await until(lambda: engine.statistics().num_running == len(names))
        gate = engine.loads["c"] = asyncio.Event()  # dies while this one is loaded
        third = asyncio.create_task(ask(engine, "c"))
        await until(lambda: engine.executor.num_loads == 3)
        before = engine.executor
        before.fail(WorkerDiedError("worker 0 died of SIGKILL", rank=0, exit_code=-9))
        gate.set()
        assert [says(one) for one in await asyncio.gather(*running)] == [name or "-" for name in names]
        assert await third == "c" and engine.executor is not before


async def test_pinned_adapters_stay(make: Make, adapters: dict[str, str]) -> None:
    engine: Any = make(loras=adapters, max_loras=2)
    async with engine:
        await engine.pin_lora("a")
        for name in "bcd":
            assert await ask(engine, name) == name
        assert (await engine.list_loras())["a"]["is_loaded"]
        with pytest.raises(InvalidRequestError, match="one place must be left"):
            await engine.pin_lora("b")
        loads = engine.executor.num_loads
        assert await ask(engine, "a") == "a" and engine.executor.num_loads == loads
        await engine.add_lora("a", adapters["f"], replace=True)
        for name in "abcd":
            assert await ask(engine, name) == ("f" if name == "a" else name)
        assert (await engine.list_loras())["a"]["is_loaded"], "who takes its place is pinned, too"
        await engine.remove_lora("a")
        await engine.pin_lora("b")


async def test_pins_at_once_and_pins_of_what_is_removed(make: Make, adapters: dict[str, str]) -> None:
    engine: Any = make(loras=adapters, max_loras=2)
    async with engine:
        pins = await asyncio.gather(engine.pin_lora("a"), engine.pin_lora("b"), return_exceptions=True)
        assert [type(one) for one in pins] == [type(None), InvalidRequestError]
        await engine.remove_lora("a")
        engine.loads["c"] = asyncio.Event()
        for is_cancelled in (True, False):
            pinning = asyncio.create_task(engine.pin_lora("c"))
            await asyncio.sleep(0)  # it has asked for the adapter
            assert (await engine.list_loras())["c"]["is_loaded"]
            if is_cancelled:
                pinning.cancel()
                await asyncio.wait([pinning])
        await engine.remove_lora("c")
        engine.loads["c"].set()
        with pytest.raises(InvalidRequestError, match="removed before it was loaded"):
            await pinning
        await engine.pin_lora("d")
        for name in "bef":
            assert await ask(engine, name) == name


async def test_closing_ends_who_waits(make: Make, adapters: dict[str, str]) -> None:
    engine: Any = make(loras=adapters, max_loras=2)
    async with engine:
        engine.loads["a"] = asyncio.Event()
        pinning = asyncio.create_task(engine.pin_lora("a"))
        asking = asyncio.create_task(ask(engine, "a"))
        await until(lambda: engine.executor.num_loads)
    for task in (pinning, asking):
        with pytest.raises(Exception, match="closed"):
            await task


async def test_bad_adapters_are_refused_when_they_are_named(
    make: Make, adapters: dict[str, str], tmp_path: Path
) -> None:
    write(tmp_path / "wide", out=13)
    write(tmp_path / "other", matrix="model.layers.9.self_attn.q_proj")
    write(tmp_path / "large", rank=32)
    async with make(loras={"a": adapters["a"]}, max_lora_rank=16) as engine:
        for folder, message in (
            ("wide", "13 x 8, and it has 12 x 8"),
            ("other", "none of the matrices"),
            ("large", "max_lora_rank=16"),
            ("nowhere", "is no folder"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                await engine.add_lora("x", str(tmp_path / folder))
        for name in ("", "x" * 257, 7):
            with pytest.raises(InvalidRequestError):
                await engine.add_lora(name, adapters["b"])  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="there is an adapter 'a' already"):
            await engine.add_lora("a", adapters["b"])
        assert list(await engine.list_loras()) == ["a"]
    with pytest.raises(ModelLoadError, match="loras: 'x': .*wide"):
        await make(loras={"x": str(tmp_path / "wide")}).start()
    async with make() as plain:
        assert await plain.list_loras() == {}
        with pytest.raises(InvalidRequestError, match="started without adapters"):
            await ask(plain, "a")
        with pytest.raises(InvalidRequestError, match="max_loras=N"):
            await plain.add_lora("a", adapters["a"])


async def test_what_metrics_say(make: Make, adapters: dict[str, str]) -> None:
    async with make(loras={name: adapters[name] for name in "ab"}, max_loras=1) as engine:
        with pytest.raises(InvalidRequestError, match="there is no adapter 'c'"):
            await engine.score_completions(PROMPT, [[8]], lora="c")
        assert await ask(engine, "a") == "a"
        own = engine.statistics().adapters
        assert (own.max_loras, own.num_known, own.num_loads, own.running, own.waiting) == (1, 2, 1, (), ())
        gate = engine.loads["b"] = asyncio.Event()  # type: ignore[attr-defined]
        asking = asyncio.create_task(ask(engine, "b"))
        await until(lambda: engine.statistics().adapters.running == ("b",))
        collected = {one.name: one.samples for one in PrometheusCollector(engine).collect()}
        (sample,) = collected["vllm:lora_requests_info"]
        assert sample.labels["running_lora_adapters"] == "b" and sample.labels["max_lora"] == "1"
        gate.set()
        assert await asking == "b"


async def test_adapters_are_models_of_openais_interface(make: Make, adapters: dict[str, str]) -> None:
    async with make(loras={name: adapters[name] for name in "ab"}) as engine, engine.openai_client() as client:
        listed = {model.id: getattr(model, "parent", None) for model in (await client.models.list()).data}
        assert listed == {"smollm2-135m": None, "a": "smollm2-135m", "b": "smollm2-135m"}
        assert (await client.models.retrieve("b")).id == "b"
        texts = {}
        for name in ("smollm2-135m", "a", "b"):
            chat = await client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "x"}], max_tokens=3
            )
            text = await client.completions.create(model=name, prompt="x", max_tokens=3)
            assert chat.model == text.model == name and chat.choices[0].message.content
            texts[name] = text.choices[0].text
        assert len(set(texts.values())) == 3
        assert await engine.has_lora("a") and not await engine.has_lora("c")
        with pytest.raises(NotFoundError, match="'c' is not served"):
            await client.completions.create(model="c", prompt="x")
