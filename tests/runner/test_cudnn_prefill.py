"""Prompts through torch's attention: lengths that are padded, what is left to our own kernel, and its failures."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

from aengine.errors import ModelLoadError
from aengine.kernels.paged_attention import Scores, prefill_attention
from aengine.runner.attention import cudnn
from aengine.runner.attention.cudnn import CudnnPrefill, PromptHeads, padded_lengths
from aengine.runner.attention.kv_pages import AttentionLayerKV
from aengine.runner.attention.prefill import PrefillMetadata
from aengine.runner.kv_spec import FullKV, LayerPlace, WindowKV

HEADS = PromptHeads(4, 2, 16, torch.float32)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that nobody has written is NaN."""
    monkeypatch.setattr(cudnn, "SDPBackend", type("Plain", (), {"CUDNN_ATTENTION": SDPBackend.MATH}))
    monkeypatch.setattr(cudnn, "_SHORTEST", 16)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    yield


def make(most_tokens: int = 40, required: bool = False) -> CudnnPrefill:
    return CudnnPrefill(CPU, aside, HEADS, most_tokens, required=required)


def keep(window: int | None = None) -> AttentionLayerKV:
    kind = FullKV(2, 16) if window is None else WindowKV(2, 16, window)
    return AttentionLayerKV(LayerPlace(kind, 0, 0), torch.zeros(1, 4, 2, 2, 16))


def metadata(*lengths: int) -> PrefillMetadata:
    lens = np.array(lengths)
    table = torch.zeros(1, len(lens), 1, dtype=torch.int32)
    return PrefillMetadata.of(torch.arange(len(lens)), table, lens, lens)


def some_qkv(num_tokens: int) -> list[torch.Tensor]:
    return list(torch.randn(num_tokens, 8, 16).split([4, 2, 2], 1))


def test_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_SHORTEST", 2048)
    assert padded_lengths(2047) == ()
    assert padded_lengths(2048) == (2048,)
    assert padded_lengths(4097) == (2048, 2560, 3072, 3584, 4096, 5120)
    assert padded_lengths(8192)[-5:] == (4096, 5120, 6144, 7168, 8192)
    for most in random.Random(0).choices(range(2048, 100_000), k=50):
        lengths = padded_lengths(most)
        assert lengths[-1] >= most and all(a < b <= 1.25 * a for a, b in zip(lengths, lengths[1:], strict=False))


def test_prompts_of_any_length() -> None:
    backend = make()
    backend.join()
    for prepare in backend.preparations():
        prepare()
    assert backend.preparations() == []
    for lengths in ((16,), (17,), (40,), (23, 16)):
        m, (q, k, v) = metadata(*lengths), some_qkv(sum(lengths))
        assert backend.is_faster(m.query_lens, m.seq_lens)
        out = backend.prefill(q, k, v, keep(), m, Scores(0.25))
        assert out is not None and out.shape == (sum(lengths), 64)
        begin = 0
        for length in lengths:
            own = slice(begin, begin + length)
            blocks, cache = torch.zeros(1, dtype=torch.int64), torch.stack((k[own], v[own]), 1)[None]
            alone = prefill_attention(q[own], cache[0], cache, blocks, length, Scores(0.25))
            torch.testing.assert_close(out[own], alone.view(length, 64))
            begin += length


def test_only_what_is_prepared_and_begins_here() -> None:
    backend = make()
    backend.join()
    longest, short = np.array([40]), np.array([17])
    assert backend.is_faster(longest, longest)
    assert not backend.is_faster(short, short), "its plan is to be made in idle time"
    first, *others = backend.preparations()
    assert len(others) == 4
    first()
    assert not backend.is_faster(short, short)
    others[0]()
    assert backend.is_faster(short, short)
    assert not backend.is_faster(short, short + 1), "it has a context"
    assert not backend.is_faster(np.array([17, 3]), np.array([17, 3])), "a short one is beside it"


@pytest.mark.parametrize(
    "how", [{"window": 9}, {"scale": 0.3}, {"softcap": 5.0}, {"sinks": torch.zeros(4)}, {"heads": 2}]
)
def test_layers_that_it_can_not_serve(how: dict[str, Any]) -> None:
    backend = make()
    backend.join()
    m, (q, k, v) = metadata(40), some_qkv(40)
    if "heads" in how:
        q = q[:, :2]
    scores = Scores(**{"scale": 0.25} | {key: how[key] for key in Scores._fields if key in how})
    assert backend.prefill(q, k, v, keep(how.get("window")), m, scores) is None
    assert not backend.is_faster(m.query_lens, m.seq_lens) and backend.name == "triton"
    assert backend.preparations() == []


def test_steps_that_are_never_long() -> None:
    backend = make(most_tokens=15)
    backend.join()
    assert backend.preparations() == [] and not backend.is_faster(np.array([15]), np.array([15]))


def test_failures(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    backend = make()
    backend.join()
    m, qkv = metadata(40), some_qkv(40)
    error: Exception = torch.OutOfMemoryError("no memory")

    def fail(*args: Any, **how: Any) -> None:
        raise error

    monkeypatch.setattr(cudnn.F, "scaled_dot_product_attention", fail)
    assert backend.prefill(*qkv, keep(), m, Scores(0.25)) is None
    assert backend.is_faster(m.query_lens, m.seq_lens), "there may be memory for the next step"
    error = RuntimeError("No available kernel")
    with caplog.at_level(logging.WARNING, "aengine.runner"):
        assert backend.prefill(*qkv, keep(), m, Scores(0.25)) is None
    assert "cuDNN failed" in caplog.text and not backend.is_faster(m.query_lens, m.seq_lens)
    other = make()
    other.join()
    assert other.name == "triton" and not other.is_faster(m.query_lens, m.seq_lens)
    with pytest.raises(ModelLoadError, match="attention_backend='cudnn' can't be used.*No available kernel"):
        make(required=True).join()
