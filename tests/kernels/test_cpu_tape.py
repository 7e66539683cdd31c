"""Tapes of compiled ops on a CPU: recorded once, run over any number of rows, by threads that come and go."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache

import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite")

from aengine.kernels.cpu import library, tape
from aengine.kernels.cpu.compiler.code_cache import code_cache
from aengine.kernels.cpu.compiler.emit import Function
from aengine.kernels.cpu.compiler.target import Target, host
from aengine.kernels.cpu.packed.layouts import LARGEST_PLANES
from aengine.kernels.cpu.rows import GROUP, KERNELS


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, size = x.shape
    codes, meta = tape.empty(rows, size, torch.int16), tape.empty(rows, size // GROUP * 4, torch.float32)
    tape.launch("quantise", [x, codes, meta, size], rows)
    return codes, meta


def whole(codes: Tensor) -> Tensor:
    """int32 [rows, blocks, GROUP] of two planes of int8."""
    planes = codes.view(torch.int8).unflatten(1, (-1, 2, GROUP)).int()
    return 256 * planes[:, :, 0] + planes[:, :, 1]


def numbers(codes: Tensor, meta: Tensor) -> Tensor:
    scales = meta.view(len(meta), -1, 4)[:, :, :1]
    return (whole(codes).float() * scales).flatten(1)


def test_activations_as_codes() -> None:
    x = torch.randn(5, 96) * torch.logspace(-3, 3, 96)
    x[3] = 0
    codes, meta = quantised(x)
    largest = x.unflatten(1, (-1, GROUP)).abs().amax(2)
    bound = (largest / LARGEST_PLANES * 1.51)[:, :, None].expand(-1, -1, GROUP).flatten(1)  # a low -128 is -127
    assert ((numbers(codes, meta) - x).abs() <= bound).all()
    assert codes.view(torch.int8).min() >= -127
    sums = whole(codes).sum(2)
    own = meta.view(5, -1, 4)
    assert torch.equal(own[:, :, 2].contiguous().view(torch.int32), sums)
    torch.testing.assert_close(own[:, :, 1], own[:, :, 0] * sums)


def test_codes_beside_a_number_that_is_none_are_none() -> None:
    x = torch.randn(3, 64)
    x[1, 37] = torch.nan
    x[2, 5] = torch.inf
    finite = numbers(*quantised(x)).isfinite().unflatten(1, (-1, GROUP)).all(2)
    assert finite.tolist() == [[True, True], [True, False], [False, True]]


def test_a_tape_runs_over_as_many_rows_as_are_said() -> None:
    x = torch.randn(8, 64)
    with tape.record(rows=8) as recorded:
        codes, meta = quantised(x)
        again, _ = quantised(x)
    assert len(recorded) == 2
    for rows in (3, 0, 8):
        x.copy_(torch.randn(8, 64))
        codes.zero_(), again.zero_()
        recorded.run(rows)
        alone, _ = quantised(x)
        assert torch.equal(codes[:rows], alone[:rows]) and not codes[rows:].any()
        assert torch.equal(again, codes)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_each_chunk_is_computed_once(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(f: Function, target: Target) -> None:
        """words: how often each chunk was computed."""
        f.fetch_add(f.address(f.words, 0) + f.chunk * 8, 1)

    monkeypatch.setitem(KERNELS, "count_chunks", count)
    own = library.Library(host(), num_threads, code_cache())
    for total in (*range(14), 100):
        counts = torch.zeros(101, dtype=torch.int64)
        own.run_once("count_chunks", [0, 1, 1, 0, counts.data_ptr()], total)
        assert counts.tolist() == [1] * total + [0] * (101 - total)
    own.team.close()


def test_what_torch_computes_is_not_recorded() -> None:
    x = torch.randn(4, 32)
    with pytest.raises(tape.NotRecorded, match="mul"), tape.record(rows=4):
        quantised(x * 2)
    assert not tape.is_recording()
    halves = x.half()
    with pytest.raises(tape.NotRecorded, match="float"), tape.record(rows=4):
        halves.float()
    with tape.record(rows=4) as recorded:
        quantised(x.float().contiguous())  # are x itself
    assert len(recorded) == 1


def test_memory_of_a_recording_is_used_again_once_no_view_is_left() -> None:
    with tape.record(rows=4):
        first = tape.empty(4, 32, torch.float32)
        place, view = first.data_ptr(), first.view(8, 16)
        del first
        gc.collect()
        second = tape.empty(4, 32, torch.float32)
        assert second.data_ptr() != place
        del view
        assert tape.empty(4, 32, torch.float32).data_ptr() == place


def test_later_ops_of_a_recording_have_the_memory_of_earlier_ones() -> None:
    x, places = torch.randn(4, 64), set()
    with tape.record(rows=4) as recorded:
        for _ in range(9):
            codes, meta = quantised(x)
            places.add(codes.data_ptr())
    assert len(places) == 2  # the last codes live until the next ones are there
    recorded.run(4)
    alone = quantised(x)
    assert torch.equal(codes, alone[0]) and torch.equal(meta.view(torch.int32), alone[1].view(torch.int32))


def test_threads_that_ask_at_once_have_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second library would be freed with its code, which its threads are running."""
    both, made = threading.Barrier(2), []

    def make(*_: object) -> object:
        made.append(object())
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        return made[-1]

    monkeypatch.setattr(library, "Library", make)
    monkeypatch.setattr(library, "_library", cache(lambda: library.Library()))
    with ThreadPoolExecutor(2) as threads:
        found = {threads.submit(library.library), threads.submit(library.library)}
    assert len({id(one.result()) for one in found}) == len(made) == 1
