"""Steps of a model without the model runner: block tables at random, batches as the test says."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aengine.checkpoint.source import ModelSource, resolve_model
from aengine.config import EngineConfig
from aengine.kernels.policy import FASTEST, KernelPolicy
from aengine.runner.attention.kv_format import KVFormat
from aengine.runner.attention.kv_pages import KvCacheSpec
from aengine.runner.attention.torch_attention import Attention, AttentionMetadata, GroupMetadata, KvCache
from aengine.runner.input_batch import GroupBatch
from aengine.runner.models import build_model, read_config
from aengine.runner.models.causal_lm import CausalLM
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.quantised.matrices import QuantisedMatrices
from aengine.runner.weights.sources.loader import LoadedWeights, load_weights, tensor_names

CPU = torch.device("cpu")


def check_near(logits: Tensor, wanted: Tensor, what: str = "logits", share: float = 5e-5) -> None:
    """Fail if any float32 logit is off by more than rounding makes it: by ``share`` of the largest.

    A few times 1e-6 are usual for tiny models; a scale that is wrong by 1% anywhere is a hundred times that.
    """
    assert logits.dtype == torch.float32 and logits.shape == wanted.shape
    worst, size = float((logits - wanted).abs().max()), float(wanted.abs().max())
    assert worst < share * size, f"{what}: off by {worst:.2g}, of logits of size {size:.2g}"


def no_progress(stage: str, done: int, total: int, unit: str) -> None:
    pass


def source_of(model: str | Path, load_format: str = "auto") -> ModelSource:
    return resolve_model(EngineConfig.create(str(model), {"load_format": load_format}))


def build(
    source: ModelSource,
    dtype: str = "float32",
    device: torch.device = CPU,
    policy: KernelPolicy = FASTEST,
    packed: QuantisedMatrices | None = None,
    dequantises: bool = False,
    is_compiled: bool = False,
) -> CausalLM:
    """The model without its weights."""
    formats = choose_formats(
        dtype,
        device,
        source.hf_config,
        policy,
        packed,
        stored=tensor_names(source),
        dequantises=dequantises,
        is_compiled=is_compiled,
        folder=source.path,
    )
    return build_model(read_config(source.hf_config), formats)


def load(
    source: ModelSource,
    dtype: str = "float32",
    seed: int = 0,
    memory: Any = None,
    policy: KernelPolicy = FASTEST,
    packed: QuantisedMatrices | None = None,
    is_compiled: bool = False,
) -> tuple[CausalLM, LoadedWeights]:
    model = build(source, dtype, policy=policy, packed=packed, is_compiled=is_compiled)
    return model, load_weights(model, source, seed, no_progress, memory=memory)


class Driver:
    """Sequences by name. Each owns scattered blocks in every KV group; what it has computed is in the
    KV cache."""

    def __init__(
        self,
        model: CausalLM,
        rng: random.Random,
        *,
        num_blocks: int = 128,
        block_size: int = 4,
        kv_format: KVFormat | None = None,
    ) -> None:
        self._model = model
        dtype, longest = model.weights.formats.dtype, num_blocks * block_size
        spec = KvCacheSpec(model.config, num_blocks, block_size, dtype, CPU, num_blocks, longest, kv_format)
        self._cache = KvCache(spec, model.weights.formats.policy)
        self._groups = self._cache.layout.groups
        self._sizes = [group.block_size for group in self._groups]  # tokens in a block of each group
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks))
        rng.shuffle(self._free)
        self._rng = rng
        self._tokens: dict[str, list[int]] = {}
        self._first_lens: dict[str, int] = {}  # tokens of each in its first step
        self._blocks: dict[str, list[list[int]]] = {}  # of each group

    def share_prefix(self, name: str, owner: str, num_tokens: int) -> None:
        """Sequence ``name`` begins with the first blocks of ``owner``: a prefix hit of ``num_tokens``, whole blocks."""
        assert all(num_tokens % size == 0 for size in self._sizes)
        self._tokens[name] = self._tokens[owner][:num_tokens]
        self._blocks[name] = [
            blocks[: num_tokens // size] for blocks, size in zip(self._blocks[owner], self._sizes, strict=True)
        ]

    @torch.inference_mode()
    def step(self, batch: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Compute the new tokens of each sequence, in this order; returns logits [num_new_tokens, vocab_size] each."""
        slots: list[list[int]] = [[] for _ in self._sizes]
        positions: list[int] = []
        for name, new in batch.items():
            self._first_lens.setdefault(name, len(new))
            tokens = self._tokens.setdefault(name, [])
            tables = self._blocks.setdefault(name, [[] for _ in self._sizes])
            for token in new:
                for own, blocks, size in zip(slots, tables, self._sizes, strict=True):
                    if len(tokens) % size == 0:
                        blocks.append(self._free.pop())
                    own.append(blocks[-1] * size + len(tokens) % size)
                positions.append(len(tokens))
                tokens.append(token)
        seq_lens = [len(self._tokens[name]) for name in batch]
        lens = torch.tensor(seq_lens, dtype=torch.int32)
        query_lens, rows, names = np.array(list(map(len, batch.values()))), torch.arange(len(batch)), list(batch)
        groups = [
            GroupMetadata(GroupBatch.gather(query_lens, group, self._table(names, i), rows, lens), torch.tensor(own))
            for i, (group, own) in enumerate(zip(self._groups, slots, strict=True))
        ]
        first_lens = torch.tensor([self._first_lens[name] for name in batch])
        metadata = AttentionMetadata([len(new) for new in batch.values()], groups, first_lens)
        ids = torch.tensor([token for new in batch.values() for token in new])
        attn = Attention(self._cache, metadata)
        logits = self._model.compute_logits(self._model.forward(ids, torch.tensor(positions), attn))
        return dict(zip(batch, logits.split(metadata.query_lens)))

    def _table(self, names: list[str], group: int) -> Tensor:
        """Places past a sequence's own blocks hold the id of any block, as they do in the runner."""
        own = [self._blocks[name][group] for name in names]
        width = max(map(len, own))
        table = torch.tensor([[self._rng.randrange(self._num_blocks) for _ in range(width)] for _ in names])
        for i, blocks in enumerate(own):
            table[i, : len(blocks)] = torch.tensor(blocks)
        return table
