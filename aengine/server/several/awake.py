"""`AwakeModels`: which of several engines are awake, and who waits for one that is not.

    use(name) ─┬─ it is awake and takes new users ──────────> one user more
               └─ else it queues; one model after the other is woken, in order of arrival:
                     ├─ there is room ─────────────────────────────> woken; all who wait for it are its users
                     ├─ a model is awake that nobody uses ─────────> the least recently used falls asleep
                     └─ all are in use ─> the least recently used takes no new users after `PATIENCE`;
                                          it falls asleep when its last has left

So no model falls asleep that answers somebody, and models that are asked in turns get their turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from ...engine.threads.futures import error_for_waiter
from ...errors import (
    AEngineError,
    EngineClosedError,
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
    NotEnoughMemoryError,
)

if TYPE_CHECKING:
    from ...async_llm import AsyncLLM

logger = logging.getLogger("aengine.server")

PATIENCE = 1.0
"""Seconds, at least, that a model waits while all others are in use, before one of them takes no new users."""
_RETRY_AFTER = 5.0
"""Seconds after which a request that found no room should come again."""
_UP = ("running", "draining", "paused")
"""States of an engine that has its weights in memory and wakes by no call of ours."""


class SumsOfModels(NamedTuple):
    """Numbers of several engines together, named as those of `Statistics`."""

    num_running: int
    num_waiting: int
    num_aborted: int
    num_blocks: int
    num_free_blocks: int
    prompt_tokens: int
    generated_tokens: int


class _Model:
    def __init__(self, name: str, engine: AsyncLLM) -> None:
        self.name = name
        self.engine = engine
        self.num_users = 0
        self.last_used = 0  # a number that grows with each use
        self.waiting: list[asyncio.Future[None]] = []
        self.is_leaving = False  # takes no new users, since another model waits for its memory
        self.share = _share_of_settings(engine)
        self.seconds_to_wake = 0.0  # that the last time took

    @property
    def is_up(self) -> bool:
        return self.engine.state in _UP

    @property
    def patience(self) -> float:
        """Seconds that others wait while this model is in use, before it takes no new users: a switch must pay."""
        return max(PATIENCE, 2 * self.seconds_to_wake)


class AwakeModels:
    """The engines of one device or machine, which need not fit into its memory together. On one event loop."""

    def __init__(self, engines: Mapping[str, AsyncLLM], *, most_awake: int | None = None, wait: float = 60.0) -> None:
        """
        Args:
            engines: by the names that requests use. They need not be started.
            most_awake: models that are awake at once, at most. None: as many as fit.
            wait: seconds that a request waits for others' requests to make room for its model; of an engine with
                admission="wait" as long as it takes.

        Raises InvalidRequestError: there are none.
        """
        if not engines:
            raise InvalidRequestError("give at least one model", param="engines")
        self._models = {name: _Model(name, engine) for name, engine in engines.items()}
        self._most_awake = most_awake or len(self._models)
        self._wait = wait
        self._queue: dict[_Model, None] = {}  # those that are waited for, in order of arrival
        self._coming: _Model | None = None  # the one that is being started or woken
        self._switching: asyncio.Task[None] | None = None
        self._left = asyncio.Event()  # set when a model has lost its last user, or a request waits no longer
        self._uses = count(1)
        self._state = "new"

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[None]:
        """Hold a model awake inside the context; wake it first.

        Raises:
            EngineOverloadedError: others' requests left no room for it within ``wait`` seconds, or as many requests
                wait for it as may (max_num_queued_requests).
            EngineError: it can't be started or woken.
        """
        model = self._models[name]
        model.last_used = next(self._uses)
        if model.is_up and not model.is_leaving:
            model.num_users += 1
        else:
            await self._come(model)
        try:
            async with model.engine.stays_awake():
                yield
        finally:
            model.num_users -= 1
            if not model.num_users:
                self._left.set()

    # -- all of them, as a server sees one engine

    @property
    def engines(self) -> dict[str, AsyncLLM]:
        return {name: model.engine for name, model in self._models.items()}

    @property
    def state(self) -> str:
        """ "new", "running", "draining" or "closed", whatever single engines are."""
        return self._state

    async def start(self) -> None:
        """Take requests. Each model is loaded when the first request asks for it."""
        self._state = "running"

    def statistics(self) -> SumsOfModels:
        """Return sums over the engines that are started."""
        numbers = []
        for model in self._models.values():
            with suppress(EngineClosedError):
                numbers.append(model.engine.statistics())
        sums = SumsOfModels(*(sum(getattr(one, name) for one in numbers) for name in SumsOfModels._fields))
        return sums._replace(num_waiting=sums.num_waiting + sum(len(model.waiting) for model in self._models.values()))

    async def drain(self, timeout: float | None) -> bool:
        """Refuse new requests, and wait until those that run have ended. Returns whether they have."""
        self._end_all("draining")
        up = [model.engine for model in self._models.values() if model.is_up]
        return all(await asyncio.gather(*(engine.drain(timeout) for engine in up)))

    def abort_all(self) -> int:
        """End all requests. Returns how many there were."""
        return sum(model.engine.abort_all() for model in self._models.values() if model.is_up)

    async def aclose(self, *, drain: float = 0.0) -> None:
        """Close all engines. Requests that wait for a model end with EngineClosedError."""
        self._end_all("closed")
        if self._switching is not None:
            self._switching.cancel()
            await asyncio.wait([self._switching])
        await asyncio.gather(*(model.engine.aclose(drain=drain) for model in self._models.values()))

    def terminate(self) -> None:
        """Kill all workers at once."""
        self._end_all("closed")
        for model in self._models.values():
            model.engine.terminate()

    def _end_all(self, state: str) -> None:
        self._state = state
        for model in self._models.values():
            _end(model, EngineClosedError("the server stops"))
        self._left.set()

    # -- who waits

    async def _come(self, model: _Model) -> None:
        """Wait until the model is awake and this one of its users."""
        if self._state in ("draining", "closed"):
            raise EngineClosedError("the server stops")
        if len(model.waiting) >= model.engine.config.max_num_queued_requests:
            text = f"{len(model.waiting)} requests wait for the model {model.name!r} already"
            raise EngineOverloadedError(text, retry_after=_RETRY_AFTER)
        patience = None if model.engine.config.admission == "wait" else self._wait
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model.waiting.append(future)
        self._queue.setdefault(model)
        if self._switching is None or self._switching.done():
            self._switching = asyncio.create_task(self._switch(), name="aengine-models")
        try:
            while not future.done():
                await asyncio.wait([future], timeout=patience)
                if not future.done() and self._coming is not model:
                    raise self._no_room(model)
            future.result()
        except asyncio.CancelledError:
            if future.done() and future.exception() is None:  # it was made a user just now
                model.num_users -= 1
            raise
        finally:
            if future in model.waiting:
                model.waiting.remove(future)
            self._left.set()

    def _no_room(self, model: _Model) -> EngineOverloadedError:
        busy = ", ".join(repr(one.name) for one in self._models.values() if one.num_users)
        text = f"the model {model.name!r} has no room: requests are being answered by {busy or 'others'}"
        return EngineOverloadedError(text, retry_after=_RETRY_AFTER)

    async def _switch(self) -> None:
        """Wake the models that are waited for, one after the other."""
        while self._queue:
            model = next(iter(self._queue))
            try:
                await self._make_awake(model)
            except AEngineError as error:
                logger.warning("%s can't be woken: %s", model.name, error)
                _end(model, error)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                logger.exception("%s can't be woken", model.name)
                _end(model, EngineError(f"{model.name} can't be woken: {error!r:.200}"))
            else:
                for future in model.waiting:
                    if not future.done():
                        future.set_result(None)
                        model.num_users += 1
                model.waiting.clear()
            del self._queue[model]
        for model in self._models.values():
            model.is_leaving = False

    # -- who is awake

    async def _make_awake(self, model: _Model) -> None:
        """Wake the model, or return early when nobody waits for it any more.

        Raises EngineError: it can't be started, or does not fit alone.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        model.is_leaving = False  # if it was, its turn has come again
        while model.waiting and not model.is_up:
            lacking: NotEnoughMemoryError | None = None
            if self._has_room_for(model):
                self._coming = model
                try:
                    await _wake(model)
                    return
                except NotEnoughMemoryError as error:
                    lacking = error
                finally:
                    self._coming = None
            others = [other for other in self._models.values() if other is not model and other.is_up]
            if not others:
                raise lacking or NotEnoughMemoryError(f"{model.name} does not fit beside what is asleep")
            idle = [other for other in others if not other.num_users]
            if idle:
                await _fall_asleep(_least_recent(idle))
                continue
            leaving = next((other for other in others if other.is_leaving), None) or _least_recent(others)
            patience = begun + leaving.patience - loop.time()
            leaving.is_leaving = leaving.is_leaving or patience <= 0
            await self._until_one_leaves(patience if patience > 0 else None)

    def _has_room_for(self, model: _Model) -> bool:
        """Whether the model may fit beside those that are awake; what shows only when it is loaded is not known."""
        up = [other for other in self._models.values() if other.is_up]
        shares = sum(other.share for other in up if other.engine.config.device == model.engine.config.device)
        return len(up) < self._most_awake and (not shares or shares + model.share <= 1.0)

    async def _until_one_leaves(self, seconds: float | None) -> None:
        self._left.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._left.wait()


def _share_of_settings(engine: AsyncLLM) -> float:
    """Return the part of a GPU that an engine's settings give it; 0 where its weights will show it."""
    config = engine.config
    return config.gpu_memory_utilization if config.kv_cache_memory_bytes is None else 0.0


async def _wake(model: _Model) -> None:
    """Start or wake a model's engine. Raises EngineError."""
    begun = asyncio.get_running_loop().time()
    if model.engine.state == "asleep":
        await model.engine.wake_up()
    else:
        await model.engine.start()
    model.seconds_to_wake = asyncio.get_running_loop().time() - begun
    numbers = model.engine.statistics()
    if not numbers.device_memory_total_bytes:  # a CPU's memory is shared out by what is free
        model.share = 0.0
    elif model.engine.config.kv_cache_memory_bytes is not None:
        model.share = (numbers.device_memory_bytes or 0) / numbers.device_memory_total_bytes


async def _fall_asleep(model: _Model) -> None:
    """Free a model's memory, which others need: on a CPU that of its weights, too."""
    logger.info("%s falls asleep: another model needs its memory", model.name)
    is_on_gpu = bool(model.engine.statistics().device_memory_total_bytes)
    model.is_leaving = True
    try:
        await model.engine.sleep(level=1 if is_on_gpu else 2)
    except EngineError as error:
        logger.warning("%s can't fall asleep, and is closed: %s", model.name, error)
        await model.engine.aclose()
    finally:
        model.is_leaving = False


def _least_recent(models: Iterable[_Model]) -> _Model:
    return min(models, key=lambda model: model.last_used)


def _end(model: _Model, error: AEngineError) -> None:
    """End all waiting for a model with ``error``."""
    for future in model.waiting:
        if not future.done():
            future.set_exception(error_for_waiter(error))
    model.waiting.clear()
