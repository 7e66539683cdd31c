"""`RemoteTokenizer`: the engine's tokenizer for code that blocks, asked over connections of its own."""

from __future__ import annotations

import socket
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from itertools import accumulate
from typing import Any, BinaryIO

from ..engine.tokenizer_view import TokenizerView
from ..errors import EngineClosedError
from .message_stream import HEAD
from .wire import error_from_wire, pack, unpack

_TIMEOUT = 60.0


class _Table:
    """What is known of a tokenizer without asking: `TokenizerView` reads it as one."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        """``known``: as `serving.py` makes it."""
        self.vocab_size: int = known["vocab_size"]
        self.bos_token_id: int | None = known["bos_token_id"]
        self.eos_token_ids: frozenset[int] = frozenset(known["eos_token_ids"])
        self.special_tokens: dict[str, int] = known["special_tokens"]
        self.has_chat_template: bool = known["has_chat_template"]
        self._bytes: bytes = known["bytes"]
        self._ends = list(accumulate(array("I", known["lengths"]), initial=0))

    @property
    def num_ids(self) -> int:
        return len(self._ends) - 1

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[self._ends[token_id] : self._ends[token_id + 1]]


def _asked(method: Callable[..., Any]) -> Any:
    """Make a method of `RemoteTokenizer` that has one of `TokenizerView` called in the engine's process."""
    takes = signature(method)

    @wraps(method)
    def ask(self: RemoteTokenizer, *args: Any, **options: Any) -> Any:
        takes.bind(self, *args, **options)  # raises TypeError here
        return self._call(method.__name__, args, options)

    return ask


class RemoteTokenizer(TokenizerView):
    """The model's tokenizer and chat template, as `TokenizerView`.

    Its methods block for the way to the engine's process and back, and for what the call takes there, but for
    `token_bytes` and the properties: on an event loop await `AsyncLLM.async_tokenizer`, which has the same ones.
    Any thread may call them, several at once.
    """

    def __init__(self, path: str, known: Mapping[str, Any]) -> None:
        table: Any = _Table(known)
        super().__init__(table, table.num_ids)
        self._path = path
        self._idle: deque[socket.socket] = deque()
        """Connections that no call uses: each call has one for itself."""

    encode = _asked(TokenizerView.encode)
    decode = _asked(TokenizerView.decode)
    count = _asked(TokenizerView.count)
    render = _asked(TokenizerView.render)
    render_ids = _asked(TokenizerView.render_ids)

    def close(self) -> None:
        """Close the connections that no call uses; the next call makes another."""
        while self._idle:
            self._idle.pop().close()

    def _call(self, method: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        body = pack([["call", 0, "ask_tokenizer", [method, args, options]]])
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if connection.gettimeout() is None:  # a new one
                connection.settimeout(_TIMEOUT)
                connection.connect(self._path)
            connection.sendall(HEAD.pack(len(body)) + body)
            with connection.makefile("rb") as answer:
                (length,) = HEAD.unpack(_exactly(answer, HEAD.size))
                ((kind, _, value),) = unpack(_exactly(answer, length))
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                raise EngineClosedError(f"the engine's process does not answer: {error}") from None
            raise
        self._idle.append(connection)
        if kind == "failed":
            raise error_from_wire(value)
        return value


def _exactly(answer: BinaryIO, size: int) -> bytes:
    data = answer.read(size)
    if len(data) < size:
        raise ConnectionResetError("the connection has ended")
    return data
