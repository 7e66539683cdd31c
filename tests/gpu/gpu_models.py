"""Checkpoints for the GPU, what transformers says of them, and runners over them in the test's own process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from runner_fakes import request
from tiny import ARCHITECTURES, VARIANTS, VOCAB_SIZE, _quietly, make_tiny_model, write_tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from aengine import Completion
from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig
from aengine.ipc.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput, int32
from aengine.runner.model_runner import ModelRunner
from aengine.runner.startup.load import load_model
from aengine.workers.rank import ranks_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # so that the tests themselves can be tried without a GPU
SHARED_GPU = {"worker": "one_gpu:load_model"} if torch.cuda.device_count() == 1 else {}
"""Settings with which several processes share the only GPU; with the fixture ``shared_gpu``."""
MIB = 2**20
HALF_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GPU_VARIANTS = VARIANTS | {
    "gemma2": {"head_dim": 16, "sliding_window": 256, "attn_logit_softcapping": 2.0},
    "phi3": {"sliding_window": 7, "rope_parameters": HALF_ROTARY},
    "gpt_oss": {"sliding_window": 7},  # transformers before 5.20 computes with a limit of 7, whatever the config says
}
"""And families whose attention has features that the others lack."""
MEDIUM = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "long": {"max_position_embeddings": 8192},
    "medium": MEDIUM,
    "9 heads": MEDIUM | {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
    "14 heads": MEDIUM | {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64},
    "one key-value head": {"num_key_value_heads": 1},
    "heads of 256": MEDIUM | {"head_dim": 256, "num_hidden_layers": 3},
}
SETTINGS: dict[str, Any] = {
    "device": DEVICE,
    "dtype": "float32",
    "max_model_len": 96,
    "block_size": 4,
    "kv_cache_memory_bytes": 8 * MIB,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "num_threads": 4,
}


class Checkpoint:
    """A folder, and transformers' readings of it."""

    def __init__(self, folder: Path, arch: str, dtype: str, size: str) -> None:
        self.folder, self.arch = folder, arch
        fields = GPU_VARIANTS[arch] | SIZES[size]
        if size != "tiny":
            fields.pop("sliding_window", None)
        model = make_tiny_model(arch, seed=11, **fields)
        if size != "tiny":
            _scale(model)
        model = model.to(getattr(torch, dtype))
        _quietly(lambda: model.save_pretrained(folder))
        write_tiny_tokenizer(folder)
        self.vocab_size = fields.get("vocab_size", VOCAB_SIZE)
        self._references: dict[str, PreTrainedModel] = {}

    def reference(self, dtype: str) -> PreTrainedModel:
        """transformers' own on the GPU: in float32 with its plainest attention, else with the one that it chooses."""
        if dtype not in self._references:
            model_class = ARCHITECTURES[self.arch][1]
            how: dict[str, Any] = {"dtype": getattr(torch, dtype)}
            if dtype == "float32":
                how["attn_implementation"] = "eager"
            model = _quietly(lambda: model_class.from_pretrained(self.folder, **how).eval())
            self._references[dtype] = model.to(DEVICE)
        return self._references[dtype]

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], output: Sequence[int], dtype: str = "float32") -> Tensor:
        """float32 [len(output), vocab_size]: of each position of the output, given all before it."""
        ids = torch.tensor([[*prompt, *output]], device=DEVICE)
        return self.reference(dtype)(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()

    def check_greedy(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Each token is the likeliest, given those before: by induction the sequence is transformers' greedy one."""
        logprobs = torch.log_softmax(self.logits(prompt, output), -1).cpu()
        best = logprobs.max(-1)
        for i, token_id in enumerate(output):
            gap = float(best.values[i] - logprobs[i, token_id])
            # Two tokens this close are one to float32 in another order of summation.
            assert gap <= 1e-4, f"position {i}: {token_id} instead of {int(best.indices[i])}, {gap:.2g} less likely"

    def check_all(self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion], length: int) -> None:
        for prompt, completion in zip(prompts, completions, strict=True):
            assert completion.usage.prompt_tokens == len(prompt) and len(completion.token_ids) == length
            self.check_greedy(prompt, completion.token_ids)


def _scale(model: PreTrainedModel) -> None:
    """Activations of size one in every layer, whatever its width: as in a trained model, rounding errors stay small."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(12)
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 1.0 if "embed" in name else 0.8 / weight.shape[-1] ** 0.5)


def make_runner(folder: Path, *, bitmasks: memoryview | None = None, **settings: Any) -> ModelRunner:
    config = EngineConfig.create(str(folder), SETTINGS | settings)
    source = resolve_model(config).to_wire()
    (rank,) = ranks_of(config)
    model = load_model(config, source, rank, lambda *report: None)
    return model.allocate(model.offer, bitmasks)[0]


class Batch:
    """Requests that run together in rows 0, 1, ...; each has all its blocks from the start. If there is a bitmask,
    every other one is masked."""

    def __init__(self, runner: ModelRunner, max_len: int = 96) -> None:
        self._runner = runner
        self.bitmask: bytes | None = None  # those of the steps to come are parts of it
        self.shared: memoryview | None = None  # where they are put, if they fit
        self._num_steps = 0
        groups = runner.tables.groups
        self._widths = [1 if group.kind == "state" else -(-max_len // group.block_size) for group in groups]

    def start(
        self, prompts: Sequence[Sequence[int]], rows: Sequence[int] | None = None, **how: Any
    ) -> tuple[ModelRunnerOutput, Tensor | None]:
        """The whole prompts in one step. ``how``: fields of the requests; a list: one for each."""
        rows = range(len(prompts)) if rows is None else rows
        new = []
        for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            fields = {name: value[i] if isinstance(value, list) else value for name, value in how.items()}
            first = row * sum(self._widths)
            fields["block_spans"] = tuple(number for width in self._widths for number in (0, width))
            new.append(request(row, prompt, range(first, first + sum(self._widths)), **fields))
        return self._step(list(rows), [len(p) for p in prompts], new_requests=new)

    def decode(self, rows: Sequence[int]) -> tuple[ModelRunnerOutput, Tensor | None]:
        return self._step(rows, [1] * len(rows))

    def end(self, rows: Sequence[int]) -> None:
        self._step([], [], removed=int32(rows))

    def _step(
        self, rows: Sequence[int], counts: Sequence[int], **fields: Any
    ) -> tuple[ModelRunnerOutput, Tensor | None]:
        """Its answer, and a copy of its logits, in the order of ``rows``; None where a graph samples all at once."""
        out = SchedulerOutput(1, req_idx=int32(rows), num_scheduled_tokens=int32(counts), **fields)
        grammar = None
        if self.bitmask is not None and rows:
            out.sample_now = False
            size = 4 * ((self._runner.vocab_size + 31) // 32)
            grammar = GrammarOutput(1, int32(range(0, len(rows), 2)), self._next_bitmask(size * ((len(rows) + 1) // 2)))
        self._runner.execute_model(out)
        state = self._runner._state
        assert state is not None
        logits = state.logits
        if state.graphs is not None and state.graphs is self._runner.graphs and state.graphs._half is not None:
            logits = self._runner.graphs._half[1].logits[: len(rows)]
        if state.ends_by_graph:
            logits = self._logits_of_end(len(state.plan.sampling))  # type: ignore[union-attr]
        if logits is not None and state.plan is not None:  # the runner puts single tokens first
            order = torch.from_numpy(state.plan.batch_idx[state.plan.sampling]).to(logits.device)
            logits = torch.empty_like(logits).index_copy_(0, order, logits)
        return self._runner.sample_tokens(grammar).get(), logits

    @torch.inference_mode()
    def _logits_of_end(self, num_rows: int) -> Tensor:
        """Of the step with prompts that waits to be sampled, by the same kernels in the same shape."""
        graphs = self._runner.graphs
        assert graphs is not None and graphs.step._hidden is not None
        return self._runner.compute_logits(graphs.step._hidden[: graphs._held])[:num_rows].clone()

    def _next_bitmask(self, num_bytes: int) -> bytes | memoryview:
        assert self.bitmask is not None
        self._num_steps += 1
        start = 4 * (97 * self._num_steps % ((len(self.bitmask) - num_bytes) // 4))
        bits = self.bitmask[start : start + num_bytes]
        if self.shared is None or self._num_steps % 7 == 0:  # as through the ring
            return bits
        self.shared[:num_bytes] = bits
        return self.shared[:num_bytes]

    def tokens_and_logits(self, prompts: Sequence[Sequence[int]], num_decodes: int) -> tuple[list[list[int]], Tensor]:
        """Greedy: token ids [n][1 + num_decodes], and the logits of each, float32 [n, 1 + num_decodes, vocab_size]."""
        rows = list(range(len(prompts)))
        graphs = self._runner.graphs
        if graphs is not None:  # the same kernels one by one: logits inside a graph can't be seen
            graphs._graphs.clear()
        steps = [self.start(prompts, logprobs=0)]
        steps += [self.decode(rows) for _ in range(num_decodes)]
        self.end(rows)
        tokens = [[int(out.token_ids[i]) for out, _ in steps] for i in rows]
        assert all(logits is not None for _, logits in steps)
        return tokens, torch.stack([logits for _, logits in steps if logits is not None], dim=1)
