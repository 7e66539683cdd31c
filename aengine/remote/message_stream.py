"""`MessageStream`: messages over a stream socket. Those of one turn of the loop are one frame, and one write.

frame: length (uint32, little endian) | msgpack of a list of messages, each a list: kind, id, ...
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any

from .wire import pack, unpack

HEAD = struct.Struct("<I")


class MessageStream:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._packed: list[bytes] = []  # messages of this turn
        self._loop = asyncio.get_running_loop()

    def send(self, *message: Any) -> None:
        """Send a message, with all others of this turn. What is sent after the connection broke is lost.

        Raises InvalidRequestError for what is no plain data; nothing is sent then.
        """
        packed = pack(message)
        if not self._packed:
            self._loop.call_soon(self.flush)  # raises in asyncio's debug mode on another thread
        self._packed.append(packed)

    def flush(self) -> None:
        """Write what was sent in this turn so far."""
        packed, self._packed = self._packed, []
        if packed and not self._writer.is_closing():
            body = b"".join([array_head(len(packed)), *packed])
            self._writer.write(HEAD.pack(len(body)) + body)

    async def messages(self) -> AsyncIterator[Sequence[Any]]:
        """Yield the messages that come, to the end of the connection, however it ends."""
        try:
            while True:
                (length,) = HEAD.unpack(await self._reader.readexactly(HEAD.size))
                for message in unpack(await self._reader.readexactly(length)):
                    yield message
        except (asyncio.IncompleteReadError, OSError):
            return

    async def aclose(self) -> None:
        """Write what was sent, and close. Idempotent."""
        self.flush()
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            pass

    def abort(self) -> None:
        """Close at once, whatever has not been written."""
        self._writer.transport.abort()


def array_head(length: int) -> bytes:
    """Return the first bytes of a msgpack array of ``length`` items."""
    if length < 16:
        return bytes([0x90 | length])
    return b"\xdd" + length.to_bytes(4, "big")
