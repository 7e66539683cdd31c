"""Shared by the tests of the kernels."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from aengine.kernels.dispatch import triton_everywhere


@pytest.fixture(autouse=True)
def one_thread(quick_interpreter: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def filled_memory() -> Iterator[None]:
    """On the CPU `torch.empty` returns NaN, or the largest number: then what nobody has written is seen where it is
    read."""
    torch.use_deterministic_algorithms(not torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def gen(rng: random.Random) -> torch.Generator:
    """Fresh random tensors; `rng` prints its seed with a failure."""
    return torch.Generator().manual_seed(rng.getrandbits(60))


@pytest.fixture
def triton_device() -> Iterator[torch.device]:
    """Where the Triton kernels run: on the GPU, or else on the CPU in Triton's interpreter."""
    if torch.cuda.is_available():
        yield torch.device("cuda")
    else:
        pytest.importorskip("triton")
        with triton_everywhere():
            yield torch.device("cpu")
