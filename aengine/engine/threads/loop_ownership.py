"""Checks that an engine is used in its process and on its event loop, and the errors for calls from elsewhere."""

from __future__ import annotations

import asyncio

from ...errors import EngineClosedError, InvalidRequestError


def loop_here() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that the caller runs on; None: there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that the caller runs on. Raises InvalidRequestError where there is none of asyncio's."""
    loop = loop_here()
    if loop is None:
        raise InvalidRequestError(
            "no asyncio event loop runs here, and AsyncLLM needs one (asyncio's or uvloop's). Under trio or curio, or "
            "in a thread without a loop, use the blocking aengine.LLM in a thread: "
            "await trio.to_thread.run_sync(llm.generate, prompt)"
        )
    return loop


def check_may_block(engine_loop: asyncio.AbstractEventLoop | None, *, any_thread: bool) -> None:
    """Raise InvalidRequestError in the engine's own thread, which a blocking call would wait for; and, unless
    ``any_thread`` may be blocked, on the thread of any running event loop."""
    here = loop_here()
    if here is None:
        return
    if here is engine_loop:
        raise InvalidRequestError(
            "a blocking call in the engine's own thread would wait for itself: let on_request_end and progress only "
            "note what happened, and act in a thread of yours"
        )
    if not any_thread:
        raise InvalidRequestError(
            "you are on an event loop, which an LLM would block: use AsyncLLM, and await it. Where blocking is meant, "
            "as in a notebook's cell: LLM(..., block_running_loop=True)"
        )


def other_loop(engine: object, *, is_closed: bool) -> EngineClosedError:
    """Make the error for a call on another event loop than the engine's."""
    if is_closed:
        what = f"the event loop of {engine!r} was closed: start it again on this one"
    else:
        what = f"{engine!r} belongs to another event loop, and can be called on that one only"
    cure = (
        "make it with own_thread=True: then it may be called on any loop, and outlives them. In tests with "
        'pytest-asyncio, give the fixture that starts it and its tests one loop: loop_scope="session" for both'
    )
    error = EngineClosedError(f"{what}. Or {cure}")
    error.public = f"the engine belongs to another event loop than that of this call: call it there, or {cure}"
    return error


def foreign_process(pid: int) -> EngineClosedError:
    """Make the error for a call in a fork of process ``pid``, which has the engine."""
    return EngineClosedError(
        f"the engine belongs to process {pid}, which forked this one, and can't be shared by a fork: make and start an "
        f"engine here, after the fork (under gunicorn in each worker's start-up, not before --preload forks them)"
    )


def not_copied(engine: object) -> TypeError:
    """Make the error for pickling or copying an engine."""
    return TypeError(
        f"{engine!r} belongs to this process, and can't be pickled or copied: make an engine where it is needed; its "
        f"EngineConfig can be sent there"
    )
