"""``aengine chat``: a conversation in the terminal.

Ctrl-C ends an answer that is being written; Ctrl-D, or /exit, ends the chat.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from typing import Any

from ..async_llm import AsyncLLM
from ..engine.threads.pools import run_in_thread
from ..errors import ContextLengthError, RequestError
from ..outputs import FinishReason
from ..params import SamplingParams
from .engine_options import engine_config
from .progress import sampling_params, tell

_HELP = """\
/clear    forget the conversation so far
/system T set the instructions to T and start over
/exit     leave (as does Ctrl-D)
Ctrl-C    stop the answer that is being written"""


async def chat(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    messages = _fresh(args.system)
    async with AsyncLLM(engine_config(args)) as engine:
        tell(f"{args.model} is ready. /help lists the commands.")
        while True:
            line = await _ask()
            if line is None or line == "/exit":
                return 0
            if not line:
                continue
            if line.startswith("/"):
                messages = _command(line, messages)
                continue
            messages.append({"role": "user", "content": line})
            try:
                answer = await _answer(engine, messages, params)
            except RequestError as error:
                messages.pop()
                tell(f"[{error}{'; /clear starts over' if isinstance(error, ContextLengthError) else ''}]")
            else:
                messages.append({"role": "assistant", "content": answer})


def _fresh(system: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}] if system else []


def _command(line: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    name, _, rest = line.partition(" ")
    if name == "/clear":
        return [m for m in messages if m["role"] == "system"]
    if name == "/system":
        return _fresh(rest.strip())
    tell(_HELP)
    return messages


async def _ask() -> str | None:
    """Read one line from the user, with editing and history where readline is there; None at the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    try:
        return (await run_in_thread("input", input, "\n> " if sys.stdin.isatty() else "")).strip()
    except EOFError:
        return None


async def _answer(engine: AsyncLLM, messages: list[dict[str, Any]], params: SamplingParams) -> str:
    """Stream one answer. Ctrl-C ends it and keeps what was written."""
    parts: list[str] = []

    async def write() -> None:
        async with engine.stream(messages, params) as stream:
            async for token in stream:
                parts.append(token.text)
                sys.stdout.write(token.text)
                sys.stdout.flush()
            if stream.completion.finish_reason is FinishReason.LENGTH:
                is_own = stream.completion.usage.completion_tokens == params.max_tokens
                why = f"at --max-tokens {params.max_tokens}" if is_own else "as the context is full; /clear starts over"
                print(f" [cut {why}]", end="")

    writing = asyncio.create_task(write())
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, writing.cancel)
    try:
        await writing
    except asyncio.CancelledError:
        if not writing.cancelled():
            raise
        print(" [stopped]", end="")
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    print()
    return "".join(parts)
