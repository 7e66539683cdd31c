"""`AsyncTokenizer`: the tokenizer's calls awaited, for an engine here and for one in another process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Unpack

    from ...params import RenderOptions

CALLS = ("encode", "decode", "count", "render", "render_ids")
"""Names of the calls that it makes."""

Ask = Callable[[str, Sequence[Any], Mapping[str, Any]], Awaitable[Any]]
"""Calls the engine's tokenizer, bounded and off every loop: the name of the call, its arguments, its options."""


class AsyncTokenizer:
    """The model's tokenizer and chat template for code on an event loop: `TokenizerView`'s calls, awaited.

    The engine makes them in threads of its own, long ones apart from short ones. Cancelling one that waits takes it
    back. Beside the errors of `TokenizerView` each raises:
        ContextLengthError: more text, messages, tools or token ids than a prompt of this engine may have.
        EngineOverloadedError: too many of them wait.
        EngineClosedError: the engine is not running.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """See `TokenizerView.encode`."""
        options = {"add_special_tokens": add_special_tokens, "allow_special": allow_special}
        ids: list[int] = await self._ask("encode", [text], options)
        return ids

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `TokenizerView.decode`."""
        text: str = await self._ask("decode", [ids], {"skip_special_tokens": skip_special_tokens})
        return text

    async def count(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        **options: Unpack[RenderOptions],
    ) -> int:
        """See `TokenizerView.count`."""
        number: int = await self._ask("count", [prompt, tools], options)
        return number

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        **options: Unpack[RenderOptions],
    ) -> str:
        """See `TokenizerView.render`."""
        text: str = await self._ask("render", [messages, tools], options)
        return text

    async def render_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        **options: Unpack[RenderOptions],
    ) -> list[int]:
        """See `TokenizerView.render_ids`."""
        ids: list[int] = await self._ask("render_ids", [messages, tools], options)
        return ids
