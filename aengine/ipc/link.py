"""The bridge between a host and another machine: the frames of all workers there, over one TCP connection.

    frame     0       1      2        4          8           16         24
              +-------+------+--------+----------+-----------+----------+---------------------+
              | kind 1| 0    | rank 2 | unused 4 | step_id 8 | length 8 | payload [length]    |     little-endian
              +-------+------+--------+----------+-----------+----------+---------------------+

Before the first frame each side proves that it knows the host's token, by an HMAC over a challenge of the other's; the
token itself does not travel here. Frames are neither encrypted nor signed.

A process that ends closes its connections, and the other side's kernel knows at once. That of a machine which is gone
is given up by the kernel after SILENCE_SECONDS; one that was merely stopped, or whose loop is late, is not.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from aengine.errors import WorkerDiedError

from .channel import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    import asyncio

SILENCE_SECONDS = 8
"""After so many seconds without a sign of the other machine its connection is lost."""

_HEADER = struct.Struct("<BxHxxxxQQ")
_GREETING = b"aengine1"
_CHALLENGE_BYTES = 32
_READ_BYTES = 256 * 1024  # most bytes read in one turn of the loop
_CONGESTED_BYTES = 1024 * 1024  # bytes that wait for the kernel, above which a link counts as congested


class AuthenticationError(ConnectionError):
    """The other side of a connection does not know the token, or is not aengine of this version."""


class LinkFrame(NamedTuple):
    """A message between the host and one rank, as it travels over the connection."""

    rank: int
    kind: int
    step_id: int
    payload: bytes


def authenticate(connection: socket.socket, token: bytes, *, is_host: bool) -> None:
    """Prove to the other side that this one knows the token, and have it do the same. Blocking, as long as the
    connection's timeout. Raises AuthenticationError, OSError."""
    own = os.urandom(_CHALLENGE_BYTES)
    connection.sendall(_GREETING + own)
    greeting = _receive(connection, len(_GREETING) + _CHALLENGE_BYTES)
    theirs = greeting[len(_GREETING) :]
    if greeting[: len(_GREETING)] != _GREETING:
        raise AuthenticationError("the other side is no aengine, or one of another version")
    connection.sendall(_proof(token, is_host, theirs + own))
    if not hmac.compare_digest(_receive(connection, 32), _proof(token, not is_host, own + theirs)):
        raise AuthenticationError("the other side does not know the token")


def _proof(token: bytes, by_host: bool, challenges: bytes) -> bytes:
    return hmac.digest(token, (b"host" if by_host else b"node") + challenges, "sha256")


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise AuthenticationError("the other side has closed the connection: it does not know the token, say")
        data += part
    return data


def watch_silence(connection: socket.socket) -> None:
    """Have the kernel end the connection when the other machine is silent; and send small frames at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_SECONDS // 2 - 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_SECONDS * 1000)


class Link:
    """One side of an authenticated connection. Everything but `hang_up` runs on the loop that `open` was called on."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_frames: Callable[[Sequence[LinkFrame]], None] = lambda frames: None
        self._on_end: Callable[[str], None] = lambda reason: None
        self._on_room: Callable[[], None] = lambda: None
        self._received = bytearray()
        self._unsent = bytearray()
        self._is_paused = False
        self._has_ended = False
        self._pid = os.getpid()

    def open(
        self,
        loop: asyncio.AbstractEventLoop,
        on_frames: Callable[[Sequence[LinkFrame]], None],
        on_end: Callable[[str], None],
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to receive. ``on_frames``: gets those that have come, in order; ``on_end``: is told once why no more
        can come or be sent, unless `close` came first; ``on_room``: called when `is_congested` becomes false."""
        self._loop, self._on_frames, self._on_end, self._on_room = loop, on_frames, on_end, on_room
        loop.add_reader(self._socket.fileno(), self._readable)

    @property
    def is_congested(self) -> bool:
        """Whether so much waits to be sent that the caller had better wait, too."""
        return len(self._unsent) > _CONGESTED_BYTES

    def send(self, rank: int, kind: int, step_id: int, payload: bytes | bytearray | memoryview) -> None:
        """Send without waiting; what the kernel does not take now is sent later. Raises WorkerDiedError if the link has
        ended, ValueError for more than MAX_MESSAGE_BYTES."""
        if self._has_ended:
            raise WorkerDiedError("the connection to the other machine has ended")
        data = memoryview(payload).cast("B") if len(payload) else b""
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes: at most {MAX_MESSAGE_BYTES} can be sent")
        message = b"".join((_HEADER.pack(kind, rank, step_id, len(data)), data))
        if self._unsent:
            self._unsent += message
            return
        sent = self._try_send(message)
        if sent < len(message) and not self._has_ended:
            assert self._loop is not None, "open() comes before the first send()"
            self._unsent += memoryview(message)[sent:]
            self._loop.add_writer(self._socket.fileno(), self._writable)

    def pause(self) -> None:
        """Receive no more for now: the sender is slowed down."""
        if not self._is_paused and not self._has_ended and self._loop is not None:
            self._is_paused = True
            self._loop.remove_reader(self._socket.fileno())

    def resume(self) -> None:
        """Receive again. Frames that came before the pause are handed out from the loop."""
        if self._is_paused and not self._has_ended and self._loop is not None:
            self._is_paused = False
            self._loop.add_reader(self._socket.fileno(), self._readable)
            self._loop.call_soon(self._hand_out)

    def hang_up(self) -> None:
        """Tell the other side that nothing more will be sent, so that it ends. From any thread; idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:  # the socket was closed or never connected
            pass

    def detach(self) -> socket.socket:
        """End without a word to `on_end`, and give up the connection, which stays open. In a fork of the process that
        opened it, the loop is left alone."""
        self._has_ended = True
        self._unsent.clear()
        if self._loop is not None and self._pid == os.getpid() and not self._loop.is_closed():
            self._forget()
        return self._socket

    def close(self) -> None:
        """Stop receiving and close the connection. Idempotent."""
        self.detach().close()

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(str(error))
            return
        if not data:
            self._end("the other side has closed it")
            return
        self._received += data
        self._hand_out()

    def _hand_out(self) -> None:
        if self._has_ended or self._is_paused:
            return
        try:
            frames = self._frames()
        except ValueError as error:
            self._end(str(error))
            return
        if frames:
            self._on_frames(frames)

    def _frames(self) -> list[LinkFrame]:
        """Take the frames that are complete. Raises ValueError for what can't be one."""
        received, position, frames = self._received, 0, []
        while len(received) - position >= _HEADER.size:
            kind, rank, step_id, length = _HEADER.unpack_from(received, position)
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(f"it has sent a frame of {length} bytes")
            end = position + _HEADER.size + length
            if len(received) < end:
                break
            with memoryview(received) as view:
                frames.append(LinkFrame(rank, kind, step_id, bytes(view[position + _HEADER.size : end])))
            position = end
        del received[:position]
        return frames

    def _try_send(self, data: bytes | bytearray) -> int:
        """Return how many bytes the kernel has taken. Ends the link if it has failed."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            assert self._loop is not None
            self._loop.call_soon(self._end, str(error))  # called later, since the caller is in the middle of a change
            return len(data)

    def _writable(self) -> None:
        was_congested = self.is_congested
        del self._unsent[: self._try_send(self._unsent)]
        if not self._unsent and not self._has_ended and self._loop is not None:
            self._loop.remove_writer(self._socket.fileno())
        if was_congested and not self.is_congested:
            self._on_room()

    def _end(self, reason: str) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._forget()
            self._on_end(reason)

    def _forget(self) -> None:
        assert self._loop is not None
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
