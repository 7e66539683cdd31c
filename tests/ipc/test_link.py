"""A connection to another machine: who may open it, frames of any size, and its end. Over pairs of sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from ipc_helpers import turns

from aengine.errors import WorkerDiedError
from aengine.ipc import link as link_module
from aengine.ipc.link import SILENCE_SECONDS, AuthenticationError, Link, LinkFrame, authenticate, watch_silence


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    one.settimeout(5)
    other.settimeout(5)
    with one, other:
        yield one, other


def prove(connection: socket.socket, token: bytes, is_host: bool) -> str:
    """Returns the refusal, or nothing."""
    try:
        authenticate(connection, token, is_host=is_host)
    except (AuthenticationError, OSError) as error:
        connection.close()
        return str(error) or type(error).__name__
    return ""


def both(ends: tuple[socket.socket, socket.socket], tokens: tuple[bytes, bytes], are_hosts: tuple[bool, bool]):
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(prove(ends[1], tokens[1], are_hosts[1])))
    thread.start()
    here = prove(ends[0], tokens[0], are_hosts[0])
    thread.join()
    return here, *said


def test_both_sides_prove_that_they_know_the_token(ends: tuple[socket.socket, socket.socket]) -> None:
    assert both(ends, (b"secret", b"secret"), (True, False)) == ("", "")
    ends[0].sendall(b"frames")
    assert ends[1].recv(100) == b"frames", "nothing of the proof is left over"


@pytest.mark.parametrize(
    ("tokens", "are_hosts"),
    [
        ((b"secret", b"secrets"), (True, False)),
        ((b"secret", b""), (True, False)),
        ((b"secret", b"secret"), (True, True)),  # its own proof sent back must not do
        ((b"secret", b"secret"), (False, False)),
    ],
)
def test_neither_takes_another_token_or_another_host(
    ends: tuple[socket.socket, socket.socket], tokens: tuple[bytes, bytes], are_hosts: tuple[bool, bool]
) -> None:
    assert all("does not know the token" in refusal for refusal in both(ends, tokens, are_hosts))


def test_who_greets_otherwise_or_not_at_all(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].sendall(b"GET / HTTP/1.1\r\nHost: there\r\nAccept: */*\r\nUser-Agent: somebody\r\n\r\n")
    assert "no aengine" in prove(ends[0], b"secret", is_host=True)
    ours, theirs = socket.socketpair()
    with ours:
        theirs.shutdown(socket.SHUT_WR)
        assert "closed the connection" in prove(ours, b"secret", is_host=True)
        theirs.close()


def test_the_kernel_ends_a_silent_connection() -> None:
    def option(level: int, name: int) -> int:
        return connection.getsockopt(level, name)

    with socket.socket() as connection:
        watch_silence(connection)
        assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and option(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        idle, interval, count = (
            option(socket.IPPROTO_TCP, name) for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count == SILENCE_SECONDS, "an idle one"
        assert option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENCE_SECONDS * 1000, "one with data under way"


class Side:
    """A link that is open on the running loop, and what it was told."""

    def __init__(self, connection: socket.socket) -> None:
        self.link, self.frames, self.ends, self.num_rooms = Link(connection), list[LinkFrame](), list[str](), 0
        self.link.open(asyncio.get_running_loop(), self.frames.extend, self.ends.append, self._on_room)

    def _on_room(self) -> None:
        self.num_rooms += 1


async def until(condition) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)  # bytes are on their way, by threads of the kernel


async def test_a_link_carries_frames_of_any_size_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    first, second = Side(ends[0]), Side(ends[1])
    sizes = 0, 1, 70_000, 9_000_000, 3
    sent = [LinkFrame(i % 5, i % 60, 2**40 + i, bytes([i % 256]) * size) for i, size in enumerate(sizes)]
    second.link.pause()
    for frame in sent:
        first.link.send(*frame)
    assert first.link.is_congested and not second.link.is_congested
    await turns()
    assert not second.frames and not first.num_rooms and first.link.is_congested, "it is slowed down"
    second.link.resume()
    await until(lambda: len(second.frames) == len(sent))
    assert second.frames == sent and first.num_rooms == 1 and not first.link.is_congested
    second.link.send(7, 8, 9, memoryview(b"back"))
    await until(lambda: first.frames)
    assert first.frames == [LinkFrame(7, 8, 9, b"back")]
    first.link.close()
    await until(lambda: second.ends)
    assert second.ends == ["the other side has closed it"] and not first.ends
    for side in (first, second):
        with pytest.raises(WorkerDiedError):
            side.link.send(0, 1, 0, b"")
    first.link.close()
    second.link.close()


async def test_frames_torn_anywhere_are_joined(ends: tuple[socket.socket, socket.socket]) -> None:
    """As they come: a byte at a time, or several in one piece."""
    frames = [LinkFrame(1, 2, 3, b"abc"), LinkFrame(7, 8, 9, b"defgh"), LinkFrame(4, 5, 6, b"")]
    side = Side(ends[0])
    for frame in frames:
        side.link.send(*frame)
    whole = ends[1].recv(4096)
    for i in range(len(whole)):
        ends[1].sendall(whole[i : i + 1])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await until(lambda: len(side.frames) == 3)
    ends[1].sendall(whole)
    await until(lambda: len(side.frames) == 6)
    assert side.frames == frames * 2
    side.link.close()


@pytest.mark.parametrize("is_too_long", [False, True])
async def test_a_length_that_can_not_be_ends_a_link(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, is_too_long: bool
) -> None:
    side, other = Side(ends[0]), Side(ends[1])
    other.link.send(0, 1, 2, bytes(1000 + is_too_long))
    monkeypatch.setattr(link_module, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(ValueError, match="1001 bytes: at most 1000"):
        other.link.send(0, 1, 2, bytes(1001))
    other.link.send(0, 1, 2, bytes(1000))
    await until(lambda: side.ends or len(side.frames) == 2)
    assert side.ends == (["it has sent a frame of 1001 bytes"] if is_too_long else [])
    assert len(side.frames) == (0 if is_too_long else 2)
    side.link.close()
    other.link.close()


async def test_a_connection_that_breaks_is_told_once(ends: tuple[socket.socket, socket.socket]) -> None:
    side = Side(ends[0])
    ends[1].close()
    side.link.send(0, 1, 2, b"into the void")
    assert not side.ends, "not from within the caller"
    await until(lambda: side.ends)
    side.link.pause()
    side.link.resume()
    side.link.hang_up()
    await turns()
    assert len(side.ends) == 1
    side.link.close()
    assert len(side.ends) == 1


async def test_hanging_up_ends_the_other_side_after_what_was_sent(ends: tuple[socket.socket, socket.socket]) -> None:
    side, other = Side(ends[0]), Side(ends[1])
    side.link.send(0, 1, 2, b"last")
    side.link.hang_up()
    side.link.hang_up()
    await until(lambda: other.ends)
    assert other.frames == [LinkFrame(0, 1, 2, b"last")] and not side.ends
    side.link.close()
    side.link.hang_up()
    other.link.close()


async def test_a_detached_connection_stays_open(ends: tuple[socket.socket, socket.socket]) -> None:
    side = Side(ends[0])
    assert side.link.detach() is ends[0]
    ends[1].sendall(os.urandom(24))
    await turns()
    assert not side.frames and not side.ends
    assert len(ends[0].recv(100)) == 24, "nobody else has read it"
    with ends[0], pytest.raises(WorkerDiedError):
        side.link.send(0, 1, 2, b"")


async def test_a_link_that_ends_leaves_nothing_with_the_loop(ends: tuple[socket.socket, socket.socket]) -> None:
    """While it is sending: by the other side's end, or by its own."""
    loop = asyncio.get_running_loop()
    for is_own in (True, False):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            side = Side(ours)
            side.link.send(0, 1, 2, bytes(9_000_000))
            if is_own:
                side.link.detach()
            else:
                theirs.close()
                await until(lambda side=side: side.ends)
            assert not loop.remove_reader(ours.fileno()) and not loop.remove_writer(ours.fileno())


async def test_a_frame_that_the_kernel_has_no_room_for_is_sent_later(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    side = Side(ends[0])
    num_before = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            num_before += ends[0].send(bytes(4096))
    side.link.send(5, 6, 7, b"late")
    received = b""
    while len(received) < num_before + 28:
        received += await asyncio.to_thread(ends[1].recv, 1 << 20)
    ends[1].sendall(received[num_before:])
    await until(lambda: side.frames)
    assert side.frames == [LinkFrame(5, 6, 7, b"late")]
    assert not asyncio.get_running_loop().remove_writer(ends[0].fileno()), "there is nothing more to send"
    side.link.close()
