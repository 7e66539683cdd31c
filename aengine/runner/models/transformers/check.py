"""Check of a loaded model: two short sequences in one batch must get the logits that transformers gives each alone.

The survey sees what attention modules are called with, not what else a model may do between its tokens. Whatever that
is, it shows here, at the start, rather than in wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import ModelLoadError
from ....kernels.rotary import apply_rotary, rotary_rows
from ...kv_spec import WindowKV
from ...layers.attention import AttentionLayer
from ...rope import RopeConfig
from .attention import ATTENTION, listen
from .mixers import Run, StepCache
from .survey import SurveyedLayer, SurveyedMixer

_LENGTHS = (140, 9)
"""Tokens of both. The longer one is long enough for what some models do between distant tokens."""


class PlainAttention:
    """A `Listener` that attends within each sequence of a batch, from no cache."""

    def __init__(
        self,
        layers: tuple[SurveyedLayer | SurveyedMixer, ...],
        positions: Tensor,
        *,
        in_parts: bool = False,
        ropes: Sequence[RopeConfig] = (),
    ) -> None:
        """
        Args:
            in_parts: mixers get each sequence in two parts, as if it were a prompt in chunks
            ropes: the model's rotary embeddings, for fused layers
        """
        self._in_parts = in_parts
        self._layers = layers
        self._ropes = ropes
        self._positions = positions
        self.next_call = 0
        sequence = (positions == 0).cumsum(0)
        lengths = sequence.bincount()
        self._lengths: list[int] = lengths[1:].tolist()
        self._first_lens = lengths[sequence]
        distance = positions[:, None] - positions[None]
        self._sees = (sequence[:, None] == sequence[None]) & (distance >= 0)
        self._distance = distance

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        layer = self._layers[self.next_call]
        assert isinstance(layer, SurveyedLayer)
        self.next_call += 1
        sees = self._sees
        if isinstance(layer.kv, WindowKV):
            sees = sees & (self._distance < layer.kv.window)
        if len(k) != len(q):
            raise ModelLoadError(f"{type(module).__name__} attends to other things than the tokens of its sequence")
        k, v = (t.repeat_interleave(layer.num_heads // layer.num_kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * layer.scale
        if layer.softcap:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        scores = scores.masked_fill(~sees, -torch.inf)
        if layer.has_sinks:
            sinks = options["s_aux"].float()[:, None, None].expand(-1, len(q), 1)
            weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)

    def attend_to_qkv(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        """See `AttentionCall.forward`."""
        heads = qkv.view(len(qkv), -1, layer.head_dim)
        q, k, v = heads.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        if layer.rope is not None:
            rope = self._ropes[layer.rope]
            inv_freq, factor = rope.inv_freq()
            rows = rotary_rows(self._positions, inv_freq.to(qkv.device), factor, interleaved=rope.interleaved)
            q, k = q.float(), k.float()
            for x in (q, k):
                apply_rotary(x, *rows, interleaved=rope.interleaved)
            scale = rope.query_scale(self._positions)
            q = q if scale is None else q * scale[:, None, None]
        return self.attend(nn.Identity(), q.to(qkv.dtype), k.to(qkv.dtype), v, {}).flatten(1)

    def first_lens(self) -> Tensor:
        """See `AttentionCall`: each sequence is a prompt."""
        return self._first_lens

    def mix(self, run: Run, num_tokens: int) -> Tensor:
        """See `MixerListener`."""
        self.next_call += 1
        parts: list[Tensor] = []
        for length, end in zip(self._lengths, accumulate(self._lengths), strict=True):
            begin, cache = end - length, StepCache()
            if self._in_parts:
                parts.append(run(begin, begin + 2, False, cache))
                begin, cache = begin + 2, StepCache({name: state.clone() for name, state in cache.states.items()})
            parts.append(run(begin, end, False, cache))
        return torch.cat(parts, 1)


@torch.no_grad()
def check_batch(model: Any, vocab_size: int, longest: int, compute: Callable[[Tensor, Tensor, bool], Tensor]) -> bool:
    """Compare the logits. Returns whether mixers go on from a state with several tokens at once.

    ``longest``: most tokens of a sequence. ``compute``: float32 [num_tokens, vocab_size] logits for int64 [num_tokens]
    ids and positions, and whether mixers get each sequence in parts.

    Raises ModelLoadError if the logits differ by more than rounding.
    """
    parameter = next(model.parameters())
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, longest) for length in _LENGTHS]
    ids = torch.randint(vocab_size, (sum(lengths),), generator=generator).to(parameter.device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(parameter.device)
    try:
        with _as_transformers_has_it(model):
            alone = [model(input_ids=part[None], use_cache=False).logits[0].float() for part in ids.split(lengths)]
    except Exception as error:
        raise ModelLoadError(
            f"{type(model).__name__} of transformers fails with these weights and this config.json: "
            f"{type(error).__name__}: {str(error)[:300]}"
        ) from error
    expected = torch.cat(alone)
    most = 1e-3 if parameter.dtype == torch.float32 else 0.3

    def difference(in_parts: bool) -> float:
        logits = compute(ids, positions, in_parts)
        return float((logits - expected).norm() / expected.norm().clamp(min=1e-6))

    whole = difference(False)
    if not whole <= most:
        raise ModelLoadError(
            f"{type(model).__name__} of transformers can't be served: in a batch its logits are others than those of "
            f"each sequence alone (by {whole:.2g} of their size), so it does more between tokens than attention"
        )
    return difference(True) <= most


@contextmanager
def _as_transformers_has_it(model: Any) -> Iterator[None]:
    """Let the model compute attention and experts by transformers' own plainest code inside the context."""
    listen(model, None)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION)
        model.set_experts_implementation(ATTENTION)
