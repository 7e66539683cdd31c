"""Compile the Triton kernels for GPUs that are not there: the interpreter accepts what the compiler refuses.

python tests/kernels/compile_everything.py 90                 # for compute capability 9.0: each kernel, and the largest
python tests/kernels/compile_everything.py --sparse 90        # each kernel with each of its flags, and the largest
python tests/kernels/compile_everything.py --largest 75 89    # what takes the most shared memory, for several
python tests/kernels/compile_everything.py --grid 75 89       # every tiling, format and head size; some minutes each

Fails if a kernel takes more shared memory than a program may have there.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import os
import pkgutil
import re
import sys
from collections.abc import Iterator
from typing import Any, get_args

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from aengine.kernels import (
    activation,
    bitmask,
    commit_drafts,
    copy_pages,
    decode_attention,
    decode_plan,
    drafted_states,
    expert_gate,
    expert_plan,
    experts,
    find_drafts,
    gated_delta,
    gumbel,
    input_prep,
    invariant_attention,
    latent_attention,
    linear,
    linear_tilings,
    logit_bias,
    logprobs,
    lora,
    ordered_linear,
    penalties,
    rms_norm,
    routing,
    select_rows,
    short_conv,
    signal,
    staged_write,
    top_k_top_p,
    varlen_attention,
    write_qkv,
)
from aengine.kernels import triton as triton_kernels
from aengine.kernels.decode_plan import BatchSize, PartsWorkspace
from aengine.kernels.delta_memory import DeltaGates, DeltaInputs, DeltaMemory
from aengine.kernels.dispatch import triton_everywhere
from aengine.kernels.exchange_buffers import MAX_PROGRAMS, ExchangeBuffers
from aengine.kernels.expert_tilings import ExpertShape, default_tiling
from aengine.kernels.expert_types import ExpertCodes, ExpertGate, ExpertMatrices, InputNorm, Routing, RoutingRule
from aengine.kernels.grouped_codes import CodeKind, GroupedCodes
from aengine.kernels.matrix import Matrix
from aengine.kernels.paged_attention import PromptLayers, Scores
from aengine.kernels.rotary import HeadNorms, Rope
from aengine.kernels.sequences import Cut
from aengine.kernels.shared_prefix import ITEM_COLUMNS, SEQ_COLUMNS, PrefixSizes, SharedKeys
from aengine.kernels.triton import exchange_bulk, exchange_words, linear_fp8, linear_streamed
from aengine.kernels.triton import launch as launching
from aengine.runner.state_tables import sequences_of

LIMITS = {
    75: 65_536,
    80: 166_912,
    86: 101_376,
    87: 166_912,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    103: 232_448,
    120: 101_376,
    121: 101_376,
}
"""Bytes of shared memory that a program may have, by compute capability (CUDA programming guide, "Compute
Capabilities": maximum amount of shared memory per thread block)."""
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
OPTIONS = {"num_warps", "num_stages", "launch_pdl", "maxnreg"}


def check_first_keys(ptx: str, is_raw: bool) -> None:
    """Of the raw form they are asked for before the wait for the product; else they may be new, and it comes first."""
    wait, copies = ptx.index("griddepcontrol.wait"), ptx.find("cp.async.cg")  # none: they go to registers
    assert copies < 0 or (copies < wait) == is_raw, "the first keys are read on the wrong side of the wait"


def check_lanes(ttgir: str) -> None:
    """What is written for the tensor cores has in each thread what they want there, whatever layout loads would get."""
    lanes = "sizePerThread = [1, 4], threadsPerWarp = [8, 4]"
    layouts = set(re.findall(r'elementwise_inline_asm "[^"]*mma[^"]*".*-> tensor<[^,]*, (#\w+)>', ttgir))
    assert layouts, "no product by the tensor cores"
    assert all(re.search(rf"^{name} = .*{re.escape(lanes)}", ttgir, re.M) for name in layouts), "other lanes"


class Compiler:
    """In place of `launch` for one compute capability. ``shared``: bytes of shared memory by kernel and what it was
    compiled for. ``is_sparse``: what differs from earlier launches by numbers alone, as tiles do, is left out."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.shared: dict[str, int] = {}
        self.note = ""  # of the launches to come
        self.is_sparse = False
        self._seen: set[tuple] = set()
        self._flags: set[tuple] = set()

    def __call__(self, kernel: Any, grid: tuple, *args: Any, **options: Any) -> None:
        values = dict(zip(kernel.arg_names, args)) | {k: v for k, v in options.items() if k not in OPTIONS}
        signature, constants, attributes = {}, {}, {}
        for i, param in enumerate(kernel.params):
            value = values[param.name]
            is_aligned = False
            if isinstance(value, TensorDescriptor):
                signature[param.name] = f"tensordesc<{TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
            elif isinstance(value, torch.Tensor):
                signature[param.name] = TYPES[value.dtype]
                is_aligned = not (param.do_not_specialize or param.do_not_specialize_on_alignment)
            elif value is None or param.is_constexpr:
                signature[param.name] = "constexpr"
                constants[(i,)] = value
            else:
                signature[param.name] = "fp32" if isinstance(value, float) else "i32"
                is_aligned = isinstance(value, int) and value % 16 == 0 and not param.do_not_specialize
            if is_aligned:  # as at run time: what is copied without registers, and so the shared memory, depends on it
                attributes[(i,)] = [["tt.divisibility", 16]]
        key = (kernel.__name__, tuple(signature.items()), tuple(constants.items()), tuple(attributes))
        flags = {(kernel.__name__, *of) for of in signature.items()}
        flags |= {(kernel.__name__, i, repr(v)) for (i,), v in constants.items() if type(v) is not int}
        if key in self._seen or (self.is_sparse and flags <= self._flags):
            return
        self._seen.add(key)
        self._flags |= flags
        asked = {k: v for k, v in options.items() if k in OPTIONS}
        source = ASTSource(kernel, signature, constants, attributes)
        compiled = self.compile(source, GPUTarget("cuda", self.capability, 32), asked)
        if compiled is None:
            return
        if kernel.__name__ == "_decode_attention" and self.capability >= 90:
            check_first_keys(compiled.asm["ptx"], values["RAW"])
        if kernel.__name__ == "_row_by_codes":
            check_lanes(compiled.asm["ttgir"])
        sizes = " ".join(f"{n}={values[n]}" for n in ("BM", "BN", "GROUPS", "BK", "STAGES") if n in values)
        name = f"{kernel.__name__} {self.note} {sizes}"
        self.shared[name] = max(self.shared.get(name, 0), compiled.metadata.shared)

    def compile(self, source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> Any:
        """The compiled kernel; None where a subclass has it later, and nothing of it is checked."""
        return triton.compile(source, target=target, options=options)

    @property
    def half(self) -> torch.dtype:
        """What serving takes for 16 bit there (runner/platforms/cuda.py)."""
        return torch.bfloat16 if self.capability >= 80 else torch.float16

    def install(self) -> None:
        for info in pkgutil.iter_modules(triton_kernels.__path__):
            module = importlib.import_module(f"{triton_kernels.__name__}.{info.name}")
            replaced = {
                "launch": self,
                "max_shared_memory": lambda: LIMITS[self.capability],
                "is_hopper": lambda: self.capability == 90,
                "has_mma": lambda: self.capability >= 80,
                "has_fp8": lambda: self.capability >= 89,
                "has_pdl": lambda: self.capability >= 90,
                "_library_has_scales": lambda: False,  # a product of torch's own is not compiled here
            }
            for name, value in replaced.items():
                if name in vars(module) and not inspect.ismodule(getattr(module, name)):
                    setattr(module, name, value)
        vars(launching).update(launch=self)


# -- calls of the ops with CPU tensors; nothing is computed


def products(
    compiler: Compiler,
    rows: int,
    n: int,
    k: int,
    kind: str,
    biased: bool = False,
    activated: activation.Activation = "silu",
) -> None:
    dtype = compiler.half
    compiler.note = f"{kind} {rows}x{k}x{n}"
    x, norm = torch.zeros(rows, k, dtype=dtype), torch.zeros(k, dtype=dtype)
    weight = torch.empty(n * (2 if kind == "gated" else 1), k, dtype=dtype)
    bias = torch.zeros(len(weight), dtype=dtype) if biased else None
    if kind == "add":
        linear.add_linear(torch.zeros(rows, n, dtype=dtype), x, Matrix(weight, bias))
    elif kind == "gated":
        activation.computed(linear.norm_gated_linear(x, InputNorm(norm, 1e-6), Matrix(weight, bias), activated))
    else:
        linear.norm_linear(x, InputNorm(norm, 1e-6), Matrix(weight, bias), torch.float32)


def measured_products(compiler: Compiler) -> None:
    """With the tilings that were measured on Hopper."""
    for shape, rows, tiling in linear_tilings.measured_tilings() if compiler.capability == 90 else ():
        compiler.note = f"{shape} {rows}"
        is_gated = shape.kind == "gated"
        x, out = (torch.zeros(rows, size, dtype=compiler.half) for size in (shape.in_features, shape.out_features))
        weight = torch.empty(shape.out_features * (2 if is_gated else 1), shape.in_features, dtype=compiler.half)
        how = {"add": shape.kind == "add", "activation": "silu" if is_gated else None}
        if shape.weight_bytes == 2:
            linear_streamed.stream(linear_streamed.fit(tiling, is_gated), x, weight, None, out, **how)
        else:
            codes, scale = weight.to(torch.float8_e4m3fn), torch.zeros(len(weight))
            linear_fp8.stream(tiling, linear_fp8.split(x), codes, None, scale, out, **how)


def codes(compiler: Compiler, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    """Products by 8-bit weights: of one row, of several, of so many that the weights become numbers first."""
    compiler.note = f"{dtype} {rows}x{k}x{n}"
    x, norm = torch.zeros(rows, k, dtype=compiler.half), torch.zeros(k, dtype=compiler.half)
    weight, scale = torch.empty(2 * n, k, dtype=torch.int8).view(dtype), torch.zeros(2 * n)
    for rounds in (False, True) if dtype == torch.float8_e4m3fn else (False,):
        verbs(x, norm, Matrix(weight, None, scale, rounds), torch.zeros(2 * n, dtype=compiler.half))


def of_groups(compiler: Compiler, kind: CodeKind, group: int, rows: int, n: int, k: int, **more: Any) -> None:
    """As `codes`, with a scale a group of columns. ``more``: "zero", "offset", "row_scale"; "scale" is its dtype,
    "block" how many rows share one."""
    compiler.note = f"{kind} {group} {rows}x{k}x{n}"
    x, norm = torch.zeros(rows, k, dtype=compiler.half), torch.zeros(k, dtype=compiler.half)
    weight = codes_of_groups(kind, group, 2 * n, k, rows=more.pop("block", 1), **more)
    for rounds in (False, True) if kind == "e4m3" else (False,):
        verbs(x, norm, Matrix(weight, quantises_x=rounds), torch.zeros(2 * n))


def verbs(x: torch.Tensor, norm: torch.Tensor, matrix: Matrix, bias: torch.Tensor) -> None:
    """All products by a matrix [2 n, k], for x [rows, k] and 2 x, and gated x."""
    rows, k = x.shape
    activation.computed(linear.norm_gated_linear(x, InputNorm(norm, 1e-6), matrix))
    linear.norm_linear(x, InputNorm(norm, 1e-6), matrix._replace(bias=bias))
    residual = torch.zeros(rows, matrix.shape[0], dtype=x.dtype)
    linear.add_linear(residual, x, matrix)
    linear.add_linear(residual, activation.Gated(torch.zeros(rows, 2 * k, dtype=x.dtype), "silu"), matrix)


Heads = tuple[int, int, int]  # query heads, key-value heads, size


def decodes(
    compiler: Compiler,
    dtype: torch.dtype,
    heads: Heads,
    size: BatchSize,
    *,
    is_raw: bool = True,
    window: int | None = None,
    with_norm: bool = False,
    extras: bool = False,
    fp8: bool = False,
    shares: bool = False,
) -> None:
    """``extras``: all that a layer may have beside the usual; ``fp8``: keys and values are codes with scales;
    ``shares``: some are read by several sequences together."""
    num_heads, num_kv_heads, dim = heads
    compiler.note = f"{dtype} {heads} {size.name} {'raw' if is_raw else 'turned'}{' extras' if extras else ''}"
    compiler.note += f"{' fp8' if fp8 else ''}{' shared' if shares else ''}"
    fewest = {BatchSize.FEW: 0, BatchSize.SMALL: 16, BatchSize.MIDDLING: 64, BatchSize.LARGE: 512}
    n = fewest[size] // num_kv_heads + 1
    qkv, cache, table, scales = kv_of(dtype, heads, n, fp8)
    rows, lens, rope = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int32), Rope(torch.zeros(99, dim))
    if extras:
        rope = Rope(torch.zeros(99, dim // 2), True, torch.zeros(99), lens)
    workspace = decode_attention.DecodeWorkspace(n, *heads, torch.device("cpu"))
    assert workspace.batch_size(n) is size
    shared = shared_keys(dtype, heads, rows, lens) if shares else None
    plan = decode_attention.plan_decode(rows, lens, workspace, window, shared)
    norms = HeadNorms(*torch.zeros(2, dim, dtype=dtype), 1e-6) if with_norm else None
    scores = Scores(0.1, window, 30.0, torch.zeros(num_heads, dtype=dtype)) if extras else Scores(0.1, window)
    decode_attention.decode_step_attention(
        qkv,
        cache,
        table,
        rope,
        norms,
        num_heads,
        scores,
        plan,
        workspace,
        is_raw=is_raw,
        kv_scales=scales,
        shared=shared,
    )
    if extras:  # neither rotated nor normalised
        bare = (cache, table, None, None, num_heads, Scores(0.1, window), plan, workspace)
        decode_attention.decode_step_attention(qkv, *bare, kv_scales=scales)
        write_qkv.apply_rope_and_write_kv(qkv, rows, rows, None, None, num_heads, cache, scales)
        halves = Rope(rope.table)
        write_qkv.apply_rope_and_write_kv(qkv, rows, rows, halves, None, num_heads, cache, scales)
    write_qkv.apply_rope_and_write_kv(qkv, rows, rows, rope, norms, num_heads, cache, scales)


def shared_keys(dtype: torch.dtype, heads: Heads, rows: torch.Tensor, lens: torch.Tensor) -> SharedKeys:
    sizes = PrefixSizes.of(len(rows), heads[0] // heads[1], heads[1], dtype)
    columns = (sizes.num_items, ITEM_COLUMNS), (sizes.num_tiles, sizes.tile_seqs), (len(rows), SEQ_COLUMNS)
    return SharedKeys(*(torch.zeros(shape, dtype=torch.int32) for shape in columns), rows, lens)


def prompts(
    compiler: Compiler,
    dtype: torch.dtype,
    heads: Heads,
    num_tokens: int,
    n: int = 1,
    window: int | None = None,
    extras: bool = False,
    fp8: bool = False,
) -> None:
    num_heads, num_kv_heads, dim = heads
    compiler.note = f"{dtype} {heads} {num_tokens} tokens{' fp8' if fp8 else ''}"
    qkv, cache, table, kv_scales = kv_of(dtype, heads, num_tokens, fp8)
    q = qkv.view(num_tokens, -1, dim)[:, :num_heads]
    starts, lens = torch.zeros(n + 1, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
    batch = (torch.zeros(n, dtype=torch.int64), starts, lens, num_tokens)
    layers = PromptLayers(*heads, dtype, window, fp8)
    plan = varlen_attention.plan_prompts(*batch, layers, skip_single=n > 1)
    scores = Scores(0.1, window, 30.0, torch.zeros(num_heads, dtype=dtype)) if extras else Scores(0.1, window)
    varlen_attention.varlen_attention(q, cache, table, plan, n, scores, kv_scales)


def latents(compiler: Compiler, dtype: torch.dtype, num_heads: int = 16, value: int = 512, turns: int = 64) -> None:
    """Attention to latents, DeepSeek's by default."""
    compiler.note = f"{dtype} {num_heads} heads, latents of {turns} + {value}"
    n, size, device = 3, turns + value, torch.device("cpu")
    cache = torch.zeros(4, 1, 1, 16, size, dtype=dtype).permute(0, 3, 1, 2, 4).expand(-1, -1, 2, -1, -1)
    q, table = torch.zeros(n, num_heads, size, dtype=dtype), torch.zeros(n, 4, dtype=torch.int32)
    rows, lens = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int32)
    for rope in (Rope(torch.zeros(99, turns), True), Rope(torch.zeros(99, turns)), None):
        latent_attention.write_latents(q, q[:, 0].contiguous(), rows, rows, rope, cache)
    workspace = decode_attention.DecodeWorkspace(n, num_heads, decode_plan.lanes_of(num_heads), value, device)
    plan = decode_attention.plan_decode(rows, lens, workspace)
    for out in (None, torch.zeros(n, num_heads * value, dtype=dtype)):
        latent_attention.attend_to_decodes(q, cache, table, 0.1, value, plan, workspace, out)
    starts = torch.zeros(n + 1, dtype=torch.int32)
    plan = latent_attention.plan_prompts(rows, starts, lens, n, num_heads, dtype)
    latent_attention.attend_to_prompts(q, cache, table, plan, 0.1, value)


def invariant(compiler: Compiler, dtype: torch.dtype, heads: Heads, extras: bool = False) -> None:
    """What a batch-invariant policy has of its own, on the GPUs that it is for."""
    if compiler.capability != 90:
        return
    num_heads, num_kv_heads, dim = heads
    compiler.note = f"{dtype} {heads} invariant"
    qkv, cache, table, _ = kv_of(dtype, heads, 3, False)
    q, rows, lens = qkv.view(3, -1, dim)[:, :num_heads], torch.zeros(3, dtype=torch.int64), torch.zeros(3).int()
    scores = Scores(0.1, 40, 30.0, torch.zeros(num_heads, dtype=dtype)) if extras else Scores(0.1)
    starts = torch.zeros(4, dtype=torch.int32)
    plan = invariant_attention.plan_prompts(rows, starts, lens, 300, num_heads // num_kv_heads, dim)
    invariant_attention.attend_to_prompts(q, cache, table, plan, scores)
    workspace = PartsWorkspace(3, *heads, torch.device("cpu"))
    out = torch.zeros(3, num_heads * dim, dtype=dtype)
    invariant_attention.attend_alone(q, cache, table, rows, lens, scores, workspace, out)
    for tokens in (1, 100, 300):
        compiler.note = f"in order {tokens}"
        x, weight = torch.zeros(tokens, 2048, dtype=dtype), torch.empty(2048, 2048, dtype=dtype)
        ordered_linear.ordered_linear(x, weight, None, torch.float32)
        ordered_linear.ordered_linear(x, weight, None, activation="silu")
        ordered_linear.add_ordered_linear(torch.zeros(tokens, 2048, dtype=dtype), x, weight, None)


def kv_of(dtype: torch.dtype, heads: Heads, n: int, fp8: bool) -> tuple[Any, ...]:
    """qkv of n tokens, a cache, a block table, and the scales of keys and values, or None."""
    num_heads, num_kv_heads, dim = heads
    qkv = torch.zeros(n, (num_heads + 2 * num_kv_heads) * dim, dtype=dtype)
    shape = (4, 2, num_kv_heads, 16, dim)
    cache = torch.zeros(shape, dtype=torch.uint8 if fp8 else dtype).permute(0, 3, 1, 2, 4)
    scales = torch.ones(2, num_kv_heads) if fp8 else None
    return qkv, cache, torch.zeros(n, 16, dtype=torch.int32), scales


def mixtures(
    compiler: Compiler,
    n: int,
    shape: ExpertShape,
    gate: ExpertGate,
    biased: bool = False,
    codes: bool = False,
    others: int = 0,
) -> None:
    """A layer of experts for n tokens; ``codes``: int8 weights; ``others``: experts that another rank has."""
    dtype, (num_experts, hidden, inner, top_k) = compiler.half, shape
    tiling = default_tiling(shape, n, can_group=False)
    compiler.note = f"{tiling.way} {tiling.block_m} {gate.kind} {shape} {n} tokens"
    rule = RoutingRule(top_k)
    own = range(num_experts) if others else None
    rows = torch.zeros(n, dtype=torch.int64) if others else None
    chosen = routing.route(torch.zeros(n, num_experts + others), rule, None, own, rows)
    plan = expert_plan.plan_experts(chosen, shape, tiling, is_partial=others > 0)
    x, norm = torch.zeros(n, hidden, dtype=dtype), InputNorm(torch.zeros(hidden, dtype=dtype), 1e-6)
    first, second = (
        ExpertMatrices(
            torch.empty(num_experts, rows, columns, dtype=torch.int8 if codes else dtype, device="meta"),
            torch.zeros(num_experts, rows, dtype=dtype) if biased else None,
            torch.zeros(num_experts, rows) if codes else None,
        )
        for rows, columns in ((2 * inner, hidden), (hidden, inner))
    )
    h = experts.expert_product(x, first, plan, gate, norm)
    experts.add_experts(x, h, second, plan)


def codes_of_groups(kind: CodeKind, group: int, n: int, k: int, **more: Any) -> GroupedCodes:
    """``more``: "zero", "row_scale", "rows"; "offset" is whether there is one; "scale" is its dtype."""
    width = k // 2 if kind in ("int4", "uint4", "e2m1", "iq4_nl") else k
    dtype = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}.get(kind, torch.uint8)
    scale = torch.ones(-(-n // more.get("rows", 1)), -(-k // group)).to(more.pop("scale", torch.float16))
    if more.get("offset") is True:
        more["offset"] = torch.zeros(scale.shape)
    return GroupedCodes(kind, torch.empty(n, width, dtype=torch.uint8).view(dtype), scale, group, **more)


def mixtures_of_groups(
    compiler: Compiler, n: int, shape: ExpertShape, gate: ExpertGate, kind: CodeKind, group: int, **more: Any
) -> None:
    """As `mixtures`, in codes with a scale a group of columns; of few experts. ``more``: also whether "quantises_x"."""
    rounds = more.pop("quantises_x", False)
    dtype, (num_experts, hidden, inner, top_k) = compiler.half, shape
    tiling = default_tiling(shape, n, can_group=False, kind=kind)
    compiler.note = f"{tiling.way} {tiling.block_m} {gate.kind} {shape} {n} tokens {kind} {group}"
    chosen = routing.route(torch.zeros(n, num_experts), RoutingRule(top_k), None, None)
    plan = expert_plan.plan_experts(chosen, shape, tiling)
    x, norm = torch.zeros(n, hidden, dtype=dtype), InputNorm(torch.zeros(hidden, dtype=dtype), 1e-6)
    first, second = (
        ExpertCodes(
            codes_of_groups(kind, group, num_experts * rows, columns, **more),
            num_experts,
            torch.zeros(num_experts, rows, dtype=dtype),
            rounds,
        )
        for rows, columns in ((2 * inner, hidden), (hidden, inner))
    )
    h = experts.expert_product(x, first, plan, gate, norm)
    experts.add_experts(x, h, second, plan)


def states(compiler: Compiler) -> None:
    """Qwen3-Next's gated delta net and convolution; LFM2's."""
    compiler.note = ""
    pages, begins = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)
    x = torch.zeros(70, 8192, dtype=compiler.half)
    inputs = DeltaInputs(x, x[:, :4096], x[:, :32], x[:, :32], 16)
    gates, memory = DeltaGates(*torch.zeros(2, 32), torch.zeros(128), 1e-6), torch.zeros(2, 32, 128, 128)
    gated_delta.gated_delta_of_tokens(inputs.of(slice(2)), gates, memory, pages, begins)
    sequences = sequences_of([1, 69], 1, [0, 1], [True, True], [Cut(1, 9, 0)], x.device)
    gated_delta.gated_delta_of_prompts(inputs, gates, memory, sequences)
    drafted = DeltaMemory(memory, torch.zeros(2, 8, 2048 + 4096 + 64), torch.zeros(2, 8, dtype=torch.int32))
    drafted_states.gated_delta_of_drafts(inputs.of(slice(2)), gates, drafted, pages, pages)
    drafted_states.settle_drafts(drafted, pages, pages, pages)
    for width, bias in ((4, None), (3, torch.zeros(8192))):
        memory = torch.zeros(2, width - 1, 8192)
        short_conv.conv_of_tokens(x[:2], torch.zeros(width, 8192), bias, memory, pages, begins)
        short_conv.conv_of_prompts(x, torch.zeros(width, 8192), bias, memory, sequences)
    memory, filters = torch.zeros(2, 2, 1024), torch.zeros(3, 1024)
    conv = short_conv.TokenConv(filters, None, memory, pages[:1], begins[:1])
    short_conv.conv_of_tokens(x[:, :3072], filters, None, memory, pages, begins)
    for k in (1024, 2048):
        own = torch.zeros(1, k, dtype=compiler.half)
        matrix = Matrix(torch.zeros(3072, k, dtype=compiler.half))
        linear.norm_conv_linear(own, InputNorm(torch.zeros(k, dtype=compiler.half), 1e-6), matrix, conv)
    input_prep.state_pages(torch.zeros(4, 3, dtype=torch.int32), pages, torch.zeros(2, dtype=torch.int32), 3)


def adapters(compiler: Compiler) -> None:
    compiler.note = "adapters"
    k, rank = 4096, 64
    for dtype, n in ((compiler.half, 1), (compiler.half, 64), (compiler.half, 600), (torch.float32, 64)):
        a, b = torch.zeros(5, 2 * rank, k, dtype=dtype), torch.zeros(5, 256, rank, dtype=dtype)
        matrices = lora.AdapterMatrices(a, b, torch.zeros(3, dtype=torch.int32), (128, 128))
        plan, x = lora.plan_adapters(torch.zeros(n, dtype=torch.int32), 5), torch.zeros(n, k, dtype=dtype)
        h = lora.shrink(x, InputNorm(torch.zeros(k, dtype=dtype), 1e-6), matrices, plan)
        lora.shrink(x, None, matrices, plan)
        lora.expand(torch.zeros(n, 256, dtype=dtype), h, matrices, plan)
        lora.expand_gated(torch.zeros(n, 256, dtype=dtype), h, matrices, plan)
        ids, top_k = torch.zeros(n, 8, dtype=torch.int32), 8
        pairs = lora.plan_pairs(plan, Routing(ids, torch.zeros(n, 8)), 5, 1)
        h = lora.shrink(x, None, matrices, pairs, top_k)
        lora.expand(torch.zeros(top_k * n, 256, dtype=dtype), h, matrices, pairs)
        lora.add_pairs(torch.zeros(n, 256, dtype=dtype), h, matrices, pairs)


def inputs_and_sampling(compiler: Compiler) -> None:
    compiler.note = ""
    ids, table = torch.zeros(4, 32, dtype=torch.int32), torch.zeros(1, 4, 2, dtype=torch.int32)
    scalars, rows = torch.zeros(4, 16, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    columns = input_prep.ScalarColumns(0, 2, 10, 11)
    input_prep.prepare_inputs(ids, scalars[:, 11], table, rows, rows, torch.full((1,), 16, dtype=torch.int32), 4)
    inputs = input_prep.prepare_decode(ids, scalars, columns, rows)
    input_prep.append_tokens(ids, scalars[:, 10], rows, rows)
    input_prep.advance_rows(scalars[:, 11], rows, inputs.seq_lens)
    published, cursor = torch.zeros(3, 2, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    input_prep.commit_decode(ids, scalars, columns, rows, rows, torch.zeros(4), published, cursor)
    input_prep.prepare_decode(ids, scalars, columns, rows, rows, rows)
    find_drafts.find_drafts(ids, scalars[:, 10], rows, rows, 4)
    commit_drafts.commit_drafts(ids, scalars, columns, rows, rows, rows, torch.zeros(4), published, cursor)
    logits, ones = torch.zeros(4, 200_000), torch.ones(4)
    gumbel.gumbel_sample(logits, inputs.temperature, inputs.seeds, inputs.sample_positions)
    where = (inputs.temperature, inputs.seeds, inputs.sample_positions)
    share = gumbel.draw_share(logits, *where, 200_192, 400_000)
    for ranks in (2, 4, 8):
        gumbel.best_of_shares(share.expand(ranks, -1, -1).contiguous())
    cutoff = top_k_top_p.find_cutoff(logits, inputs.temperature, torch.zeros(4, dtype=torch.int32), ones, ones)
    ids, _ = gumbel.gumbel_sample(logits, inputs.temperature, inputs.seeds, inputs.sample_positions, cutoff)
    asked = select_rows.select_rows(scalars, rows)[:, 13]
    kept = logprobs.keep_logits(logits, asked)
    logprobs.token_logprobs(kept, ids, asked, torch.zeros(1, 4, 9, dtype=torch.int32), cursor)
    logit_bias.apply_lists(logits, ids, torch.zeros(4, logit_bias.WIDTH, dtype=torch.int32), asked)
    given = penalties.PenaltyInputs(ids, torch.zeros(4, 200_000, dtype=torch.int32), ones, ones, ones)
    penalties.apply_penalties(logits, given)
    penalties.count_sampled(ids, given)
    penalties.count_tokens(given.counts[0], scalars[0], 2)
    bitmask.apply_bitmask(logits, ids, torch.zeros(4, 25_000, dtype=torch.uint8))
    starts = torch.zeros(2, dtype=torch.int64)
    nothing = torch.zeros(0, dtype=torch.int32)
    staged_write.apply_staged_writes(torch.zeros(9, dtype=torch.int32), starts, starts, nothing)
    for dtype in (torch.int64, torch.uint8):
        slabs = copy_pages.Slabs([torch.zeros(4, 8, dtype=dtype)] * 2)
        for copy in (copy_pages.gather_pages, copy_pages.scatter_pages):
            copy(slabs, starts, torch.zeros(len(starts), 2, 8, dtype=dtype))


def exchanges(compiler: Compiler) -> None:
    """What each of two ranks, and one of four, launches."""
    for rank, size in ((0, 2), (1, 2), (3, 4)):
        compiler.note = f"rank {rank} of {size}"
        addresses, calls = torch.zeros(size, dtype=torch.int64), torch.zeros(MAX_PROGRAMS, dtype=torch.int32)
        buffers = ExchangeBuffers(rank, size, 4096, 65536, addresses, calls)
        for dtype in (compiler.half, torch.float32):
            x = torch.zeros(2, 1024, dtype=dtype)
            for op in (exchange_words.sum_in_words, exchange_bulk.sum_in_bulk, exchange_bulk.sum_in_two_shots):
                for add in (True, False):
                    op(x, x, buffers, add=add)
        words = torch.zeros(4096, dtype=torch.int32)
        for gather in (exchange_words.gather_in_words, exchange_bulk.gather_in_bulk):
            gather(torch.zeros(size, 4096, dtype=torch.int32), words, buffers)
    compiler.note = "pipeline"
    signal.signal(torch.zeros(1, dtype=torch.int64), 5)
    signal.wait(torch.zeros(1, dtype=torch.int64), 5)


# -- what to call


def largest(compiler: Compiler) -> None:
    """What takes the most shared memory: of each kernel whose tilings depend on the GPU, those that come near."""
    half, full = compiler.half, torch.float32
    for rows, n, kind in ((8, 1024, "add"), (32, 1024, "add"), (8, 4096, "add"), (64, 1024, "gated"), (128, 1024, "")):
        products(compiler, rows, n, 2048, kind)
    for rows in (1, 8, 64, 600):
        codes(compiler, torch.float8_e4m3fn, rows, 1024, 2048)
    decodes(compiler, half, (16, 8, 128), BatchSize.SMALL, is_raw=False)
    decodes(compiler, half, (32, 8, 128), BatchSize.SMALL)
    decodes(compiler, half, (32, 8, 128), BatchSize.SMALL, is_raw=False)
    decodes(compiler, half, (16, 8, 256), BatchSize.MIDDLING)
    decodes(compiler, full, (16, 8, 128), BatchSize.SMALL)
    for heads, fp8 in itertools.product(((32, 8, 128), (8, 8, 64)), (False, True)):
        decodes(compiler, half, heads, BatchSize.MIDDLING, shares=True, fp8=fp8)
    for dim, fp8 in itertools.product((64, 128, 256), (False, True)):
        prompts(compiler, half, (16, 8, dim), 4096, fp8=fp8)
    for heads, size in (
        ((16, 8, 128), BatchSize.SMALL),
        ((32, 8, 128), BatchSize.FEW),
        ((32, 8, 128), BatchSize.SMALL),
        ((16, 8, 256), BatchSize.MIDDLING),
    ):
        for is_raw in (True, False):
            decodes(compiler, half, heads, size, is_raw=is_raw, fp8=True)
    prompts(compiler, full, (16, 8, 256), 1024)
    for dim in (64, 128, 256):
        invariant(compiler, half, (16, 8, dim))
    for dtype in (half, full) if compiler.capability >= 80 else ():  # older GPUs have no room for such a row
        latents(compiler, dtype)
    for n in (8, 512, 8192):
        mixtures(compiler, n, ExpertShape(128, 2048, 768, 8), ExpertGate())
    in_blocks = {"rows": 128, "scale": torch.float32}
    for n in (8, 64, 512):
        for rounds in (False, True):
            shape = ExpertShape(4, 2048, 768, 4)
            mixtures_of_groups(compiler, n, shape, ExpertGate(), "e4m3", 128, quantises_x=rounds, **in_blocks)
        clamped = ExpertGate("clamped_swiglu", is_interleaved=True)
        mixtures_of_groups(compiler, n, ExpertShape(4, 2880, 2880, 4), clamped, "e2m1", 32, scale=torch.float8_e8m0fnu)


def every_kernel(compiler: Compiler) -> None:
    dtype = compiler.half
    for rows, kind in itertools.product((1, 8, 16, 64), ("", "gated", "add")):
        products(compiler, rows, 1024, 2048, kind, biased=kind == "")
    measured_products(compiler)
    for rows, code in itertools.product((1, 16, 64, 600), (torch.float8_e4m3fn, torch.int8)):
        codes(compiler, code, rows, 1024, 2048)
    for rows in (1, 16, 64, 600):
        of_groups(compiler, "int4", 128, rows, 1024, 2048)
        of_groups(compiler, "e2m1", 16, rows, 1024, 2048, scale=torch.float8_e4m3fn, row_scale=torch.zeros(2048))
        of_groups(compiler, "uint4", 32, rows, 1001, 576, offset=True)
        of_groups(compiler, "e4m3", 128, rows, 1024, 2048, scale=torch.float32, block=128)
    products(compiler, 1, 1023, 576, "gated")
    products(compiler, 1, 1001, 4864, "gated")
    compiler.note = ""
    rms_norm.rms_norm(torch.zeros(3, 576, dtype=dtype), torch.zeros(576, dtype=dtype), 1e-6)
    rms_norm.add_rms_norm(*(torch.zeros(3, 576, dtype=dtype) for _ in range(2)), torch.zeros(576), 1e-6)
    activation.weigh(torch.zeros(3, 64, dtype=dtype), torch.zeros(3, 1))
    for name in get_args(activation.Activation):
        activation.act_and_mul(torch.zeros(3, 64, dtype=dtype), name)
        for rows in (1, 16, 64):
            products(compiler, rows, 1024, 2048, "gated", activated=name)
    for size in BatchSize:
        decodes(compiler, dtype, (9, 3, 64), size, window=40, with_norm=True)
        decodes(compiler, dtype, (9, 3, 64), size, is_raw=False)
        decodes(compiler, dtype, (9, 3, 64), size, is_raw=False, shares=True)
        decodes(compiler, dtype, (8, 1, 64), size, with_norm=True, extras=True, shares=True)
        decodes(compiler, dtype, (8, 1, 64), size, window=40, with_norm=True, extras=True)
        decodes(compiler, dtype, (8, 1, 64), size, window=40, with_norm=True, extras=True, fp8=True)
    for num_tokens, n in ((16, 1), (300, 300), (3072, 1)):
        prompts(compiler, dtype, (9, 3, 64), num_tokens, n, window=40)
        prompts(compiler, dtype, (16, 8, 128), num_tokens, n)
        prompts(compiler, dtype, (8, 1, 64), num_tokens, n, window=40, extras=True)
        prompts(compiler, dtype, (8, 1, 64), num_tokens, n, window=40, extras=True, fp8=True)
    invariant(compiler, dtype, (9, 3, 64), extras=True)
    invariant(compiler, dtype, (32, 8, 128))
    silu = ExpertGate()
    clamped = ExpertGate("clamped_swiglu", is_interleaved=True)
    for n in (1, 8, 512, 1024, 8192):
        mixtures(compiler, n, ExpertShape(128, 2048, 768, 8), silu)
    for n in (1, 64, 8192):
        mixtures(compiler, n, ExpertShape(32, 2880, 2880, 4), clamped, biased=True)
    mixtures(compiler, 8, ExpertShape(6, 72, 40, 2), silu._replace(kind="gelu_tanh"), codes=True)
    for n in (1, 8, 512):
        mixtures(compiler, n, ExpertShape(64, 2048, 768, 8), silu, others=64)
        for rounds in (False, True):
            in_blocks = {"rows": 128, "scale": torch.float32, "quantises_x": rounds}
            mixtures_of_groups(compiler, n, ExpertShape(4, 2048, 768, 4), silu, "e4m3", 128, **in_blocks)
        mixtures_of_groups(compiler, n, ExpertShape(4, 2880, 2880, 4), clamped, "e2m1", 32, scale=torch.float8_e8m0fnu)
        mixtures_of_groups(compiler, n, ExpertShape(4, 2048, 768, 4), silu, "int4", 128)
    mixtures_of_groups(compiler, 8, ExpertShape(4, 576, 384, 2), silu, "uint4", 32, offset=True)
    grouped = RoutingRule(8, "sigmoid", num_groups=8, top_groups=4)
    routing.route(torch.zeros(4, 256), grouped, torch.zeros(256))
    routing.route(torch.zeros(4, 160), RoutingRule(6, num_groups=8, top_groups=3))
    for n, size, bias in ((8, 2048, None), (64, 2880, torch.zeros(32, dtype=dtype))):
        x, norm = torch.zeros(n, size, dtype=dtype), InputNorm(torch.zeros(size, dtype=dtype), 1e-6)
        routing.route_after_norm(x, norm, Matrix(torch.zeros(32, size, dtype=dtype), bias), RoutingRule(4))
    expert_gate.gate_experts(torch.zeros(4, 512, dtype=dtype), clamped)
    states(compiler)
    adapters(compiler)
    inputs_and_sampling(compiler)
    exchanges(compiler)


def grid(compiler: Compiler) -> None:
    for kind, rows, n in itertools.product(("", "gated", "add"), (2, 16, 32, 64, 128), (1024, 4096)):
        for k in (2048, 2048 + 64):
            products(compiler, rows, n, k, kind)
    for dtype, dim in itertools.product((compiler.half, torch.float16, torch.float32), (16, 64, 80, 128, 256)):
        for size, is_raw, fp8 in itertools.product(BatchSize, (True, False), (False, True)):
            decodes(compiler, dtype, (16, 8, dim), size, is_raw=is_raw, fp8=fp8)
        for num_tokens, fp8 in itertools.product((64, 1024, 4096), (False, True)):
            prompts(compiler, dtype, (16, 8, dim), num_tokens, fp8=fp8)
            prompts(compiler, dtype, (7, 1, dim), num_tokens, window=40)
        decodes(compiler, dtype, (7, 1, dim), BatchSize.SMALL, window=40, with_norm=True)
        decodes(compiler, dtype, (64, 8, dim), BatchSize.SMALL)
    for dim, size in itertools.product((64, 128), BatchSize):
        decodes(compiler, compiler.half, (33, 1, dim), size)


def too_large(compiler: Compiler) -> Iterator[str]:
    limit = LIMITS[compiler.capability]
    for name, shared in sorted(compiler.shared.items()):
        if shared > limit:
            yield f"{compiler.capability}: {name} takes {shared} bytes of shared memory, of {limit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capability", type=int, nargs="+", choices=LIMITS)
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--sparse", action="store_true")
    args = parser.parse_args()
    failures: list[str] = []
    for capability in args.capability:
        compiler = Compiler(capability)
        compiler.install()
        with triton_everywhere():
            largest(compiler)
            compiler.is_sparse = args.sparse
            if args.grid:
                grid(compiler)
            if not args.largest:
                every_kernel(compiler)
        print(f"{len(compiler._seen)} kernels for {capability}")
        for name, shared in sorted(compiler.shared.items()):
            print(f"{capability} {shared:7} {name}")
        failures += too_large(compiler)
    sys.exit("\n".join(failures) or 0)


if __name__ == "__main__":
    main()
