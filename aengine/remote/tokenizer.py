"""`RemoteTokenizer`: the engine's tokenizer for code that blocks, asked over connections of its own."""

from __future__ import annotations

import socket
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..errors import EngineClosedError, InvalidRequestError
from ..params import shown
from .message_stream import HEAD
from .wire import error_from_wire, pack, unpack

if TYPE_CHECKING:
    from typing import Unpack

    from ..params import RenderOptions

__all__ = ["RemoteTokenizer"]

_TIMEOUT = 60.0


class RemoteTokenizer:
    """The model's tokenizer and chat template, as `TokenizerView`.

    Its methods block for the way to the engine's process and back, and for what the call takes there, but for
    `token_bytes` and the properties: on an event loop await `RemoteEngine.async_tokenizer`, which has the same ones.
    Any thread may call them, several at once.
    """

    def __init__(self, path: str, known: Mapping[str, Any]) -> None:
        """``known``: what `tokenizer_table` made."""
        self._path = path
        self._idle: deque[socket.socket] = deque()
        """Connections that no call uses: each call has one for itself."""
        self.vocab_size: int = known["vocab_size"]
        self.bos_token_id: int | None = known["bos_token_id"]
        self.eos_token_ids: frozenset[int] = frozenset(known["eos_token_ids"])
        self.special_tokens: dict[str, int] = known["special_tokens"]
        self.has_chat_template: bool = known["has_chat_template"]
        self._bytes: bytes = known["bytes"]
        self._ends = list(accumulate(array("I", known["lengths"]), initial=0))

    def __repr__(self) -> str:
        return f"<RemoteTokenizer of {self.vocab_size} tokens>"

    def token_bytes(self, token_id: int) -> bytes:
        """See `TokenizerView.token_bytes`. Doesn't block."""
        num_ids = len(self._ends) - 1
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < num_ids:
            raise InvalidRequestError(f"there is no token {shown(token_id)}: ids are 0 to {num_ids - 1}", param="ids")
        return self._bytes[self._ends[token_id] : self._ends[token_id + 1]]

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """See `TokenizerView.encode`."""
        options = {"add_special_tokens": add_special_tokens, "allow_special": allow_special}
        ids: list[int] = self._call("encode", [text], options)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `TokenizerView.decode`."""
        text: str = self._call("decode", [ids], {"skip_special_tokens": skip_special_tokens})
        return text

    def count(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        **options: Unpack[RenderOptions],
    ) -> int:
        """See `TokenizerView.count`."""
        count: int = self._call("count", [prompt, tools], options)
        return count

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        **options: Unpack[RenderOptions],
    ) -> str:
        """See `TokenizerView.render`."""
        text: str = self._call("render", [messages, tools], options)
        return text

    def render_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        **options: Unpack[RenderOptions],
    ) -> list[int]:
        """See `TokenizerView.render_ids`."""
        ids: list[int] = self._call("render_ids", [messages, tools], options)
        return ids

    def close(self) -> None:
        """Close the connections that no call uses; the next call makes another."""
        while self._idle:
            self._idle.pop().close()

    def _call(self, method: str, args: list[Any], options: Mapping[str, Any]) -> Any:
        body = pack([["call", 0, "tokenizer", [method, args, options]]])
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if connection.gettimeout() is None:  # a new one
                connection.settimeout(_TIMEOUT)
                connection.connect(self._path)
            connection.sendall(HEAD.pack(len(body)) + body)
            (length,) = HEAD.unpack(_exactly(connection, HEAD.size))
            ((kind, _, value),) = unpack(_exactly(connection, length))
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                raise EngineClosedError(f"the engine's process does not answer: {error}") from None
            raise
        self._idle.append(connection)
        if kind == "failed":
            raise error_from_wire(value)
        return value


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the connection has ended")
        data += part
    return bytes(data)
