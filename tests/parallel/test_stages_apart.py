"""Pipeline stages on GPUs of several machines, without one: streams, events and the network are queues, which one
process empties in a random order. What is queued is what `NcclLink` queues."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aengine.errors import ModelLoadError
from aengine.runner.distributed import nccl_link, opening
from aengine.runner.distributed.nccl_link import NcclLink
from aengine.runner.distributed.pipeline import IntermediateTensors, StepSizes
from aengine.runner.distributed.stage import PipelineStage
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.workers.rank import Rank

DEPTH = 2


class Event:
    is_over = False

    def __init__(self, network: Network) -> None:
        self.network = network

    def wait(self) -> None:
        self.network.current.wait_event(self)


class Stream:
    """Work of a device in order; the head of the queue runs once it is ready."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.queue: deque[tuple[Callable[[], Any], Callable[[], Any]]] = deque()
        network.streams.append(self)

    def launch(self, work: Callable[[], None], after: Event | None) -> Event:
        """See `SideStream`."""
        if after is not None:
            self.wait_event(after)
        with self.network.on(self):
            work()
        return self.record_event()

    def put(self, do: Callable[[], Any], ready: Callable[[], Any] = lambda: True) -> None:
        self.queue.append((ready, do))

    def record_event(self) -> Event:
        event = Event(self.network)
        self.put(lambda: setattr(event, "is_over", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.put(lambda: None, lambda: event.is_over)


class Memory:
    """A tensor of one value, whose rows are itself; its operations are put on the current stream."""

    def __init__(self, network: Network, value: Any = None) -> None:
        self.network, self.value = network, value

    def __len__(self) -> int:
        return 1

    def __getitem__(self, rows: slice) -> Memory:
        return self

    def copy_(self, other: Memory) -> None:
        self.network.current.put(lambda: setattr(self, "value", other.value))

    def clone(self) -> Memory:
        copy = Memory(self.network)
        copy.copy_(self)
        return copy


class Network:
    """All devices, and what is on its way between them. Also the `Platform` of each stage."""

    device = torch.device("cuda", 0)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams: list[Stream] = []
        self.on_its_way: dict[tuple[str, int, int], deque[Any]] = defaultdict(deque)
        self.current = Stream(self)

        def zeros(shape: tuple[int, ...], **how: Any) -> Any:
            """Return slots; a first message, which is no list of slots, has one row."""
            return [Memory(self) for _ in range(shape[0])] if shape[0] > 1 else Memory(self)

        monkeypatch.setattr(nccl_link, "torch", SimpleNamespace(zeros=zeros, int64=torch.int64))
        monkeypatch.setattr(nccl_link, "_open_group", lambda name, _, stage, __: Group(self, name, stage.index))

    def side_stream(self) -> Stream:
        return Stream(self)

    def record_event(self) -> Event:
        return self.current.record_event()

    def synchronize(self) -> None:
        pass

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def run(self, rng: random.Random) -> None:
        speeds = {stream: rng.random() ** 3 + 1e-3 for stream in self.streams}
        while any(stream.queue for stream in self.streams):
            able = [stream for stream in self.streams if stream.queue and stream.queue[0][0]()]
            assert able, "all wait for each other"
            stream = rng.choices(able, [speeds[stream] for stream in able])[0]
            stream.queue.popleft()[1]()


class Group:
    def __init__(self, network: Network, name: str, own: int) -> None:
        self.network, self.name, self.own = network, name, own

    def send(self, tensors: list[Memory], stage: int, tag: int) -> Any:
        line = self.network.on_its_way[self.name, self.own, stage]
        self.network.current.put(lambda: line.append(tensors[0].value))
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors: list[Memory], stage: int, tag: int) -> Any:
        line = self.network.on_its_way[self.name, stage, self.own]
        self.network.current.put(lambda: setattr(tensors[0], "value", line.popleft()), lambda: line)
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("takes_ids", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_stages_side_by_side(
    size: int, takes_ids: bool, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    """None overwrites what has not been sent or read, however far the hosts are ahead of their devices; also if the
    first stage never waits for the last."""
    network = Network(monkeypatch)
    sizes = StepSizes(5, torch.float32, 7, 4, steps_in_flight=DEPTH)
    links, own = [], [Stream(network) for _ in range(size)]
    for index in range(size):
        with network.on(own[index]):
            links.append(NcclLink(None, PipelineStage(index, size), sizes, network, None))  # type: ignore[arg-type]
    computed: list[Any] = []  # by the last stage
    told: list[Any] = []  # to the first one
    outputs = [Memory(network) for _ in range(size)]  # of each stage's graph, which overwrites it in each step

    def compute(index: int, step: int) -> None:
        out, link, stream = outputs[index], links[index], own[index]
        got: Any = Memory(network, step) if index == 0 else link.receive(1).hidden
        stream.put(lambda: setattr(out, "value", (got.value, index)))
        if takes_ids and index == 0 and step >= DEPTH:
            ids: Any = link.receive_ids(1)
            stream.put(lambda: told.append(ids.value))
        if index < size - 1:
            link.send(IntermediateTensors(out))  # type: ignore[arg-type]
        else:
            stream.put(lambda: computed.append(out.value))
            link.send_ids(out)  # type: ignore[arg-type]
        stream.put(lambda: setattr(got, "value", "overwritten"))  # layers change what they get

    for step in range(40):
        for index in range(size):
            with network.on(own[index]):
                compute(index, step)
    network.run(rng)

    expected: list[Any] = list(range(40))
    for index in range(size):
        expected = [(value, index) for value in expected]
    assert computed == expected and told == (expected[:-DEPTH] if takes_ids else [])


def open_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two stages on different machines, each on its first GPU."""
    monkeypatch.setattr(opening, "_meeting_of_stages", lambda *args: None)
    monkeypatch.setattr(opening, "_check_devices", lambda *args, is_one_machine: is_one_machine and pytest.fail())
    platform = CpuPlatform()
    monkeypatch.setattr(platform, "device", torch.device("cuda", 0))
    rank = Rank(0, pp_size=2, stages_meet_at="10.0.0.1:4711")
    opening.open_link(rank, platform, StepSizes(8, torch.float32, 8, 4, 3))


def test_torch_without_nccl_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ModelLoadError, match="pipeline_parallel_size=2: .* by NCCL, which torch .* was built without"):
        open_apart(monkeypatch)


def test_machines_that_nccl_can_not_connect_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise torch.distributed.DistBackendError("NCCL error in: x.cpp:1, remote process exited\n or network error")

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(nccl_link, "NcclLink", fail)
    with pytest.raises(ModelLoadError, match=r"exited or network error\): a firewall .* NCCL_SOCKET_IFNAME names"):
        open_apart(monkeypatch)
