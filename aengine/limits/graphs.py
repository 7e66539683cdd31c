"""How a GPU's steps are launched: ``cudagraph_mode``, ``cudagraph_capture_sizes``, ``enforce_eager``; and recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..errors import InvalidRequestError
from .values import not_valid

GraphMode = Literal["FULL", "PIECEWISE", "NONE"]

GRAPH_MODES: tuple[GraphMode, ...] = ("NONE", "PIECEWISE", "FULL")
"""Also of a step that has run: the place of each is the number of it in a message."""

PROFILER_RANGE = "cuda"
"""What `AsyncLLM.start_profile` takes in place of a folder: the range of the GPU's profiler."""

MAX_GRAPH_SIZE = 512
"""Requests of the largest decode that is a graph: beyond, the device is busy longer than the host launches."""


def checked_graphs(
    mode: str, sizes: object, *, enforce_eager: bool, max_num_seqs: int, max_num_batched_tokens: int | None
) -> tuple[int, ...] | None:
    """Return the sizes, ascending; None: as the worker chooses. Raises InvalidRequestError: they are none, or are more
    than a step can have, or one of the settings goes against another."""
    name = "cudagraph_capture_sizes"
    if enforce_eager and mode not in ("auto", "NONE"):
        message = f"cudagraph_mode={mode!r} goes against enforce_eager=True: leave one of them out"
        raise InvalidRequestError(message, param="cudagraph_mode")
    if sizes is None:
        return None
    if not isinstance(sizes, Sequence) or isinstance(sizes, str | bytes) or not 0 < len(sizes) <= MAX_GRAPH_SIZE:
        raise not_valid(name, sizes, f"a list of 1 to {MAX_GRAPH_SIZE} sizes, or None")
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens or MAX_GRAPH_SIZE}
    limit, most = min(limits.items(), key=lambda item: item[1])
    if most < MAX_GRAPH_SIZE:
        wanted = f"at most {most}, as {limit} is: leave larger ones out, or raise {limit}"
    else:
        most, wanted = MAX_GRAPH_SIZE, f"at most {MAX_GRAPH_SIZE}: larger decodes gain nothing by a graph"
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise not_valid(name, size, "numbers of requests, each 1 or more")
        if size > most:
            raise not_valid(name, size, wanted)
    if len(set(sizes)) < len(sizes):
        twice = next(size for size in sizes if sizes.count(size) > 1)
        raise not_valid(name, twice, "named once")
    if enforce_eager or mode == "NONE":
        other = "enforce_eager=True" if enforce_eager else "cudagraph_mode='NONE'"
        raise InvalidRequestError(f"{name} has no effect with {other}: leave one of them out", param=name)
    return tuple(sorted(sizes))
