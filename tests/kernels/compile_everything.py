"""Compile every Triton kernel for a GPU that is not there: the interpreter accepts what the compiler refuses.

python tests/kernels/compile_everything.py 90      # for compute capability 9.0
"""

from __future__ import annotations

import inspect
import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from aengine.kernels.bodies import launch as launching

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
OPTIONS = {"num_warps", "num_stages", "launch_pdl"}
seen: dict[tuple, str] = {}


def compile_only(kernel: Any, grid: tuple, *args: Any, **options: Any) -> None:
    """In place of `launch`."""
    has_pdl = CAPABILITY >= 90
    if "PDL" in options:
        options["PDL"] = has_pdl
    values = dict(zip(kernel.arg_names, args)) | {k: v for k, v in options.items() if k not in OPTIONS}
    signature, constants = {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
        elif value is None or kernel.params[i].is_constexpr:
            signature[name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, bool):
            signature[name] = "i1"
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    key = (kernel.__name__, tuple(signature.items()), tuple(constants.items()))
    if key in seen:
        return
    asked = {k: v for k, v in options.items() if k in OPTIONS}
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=asked)
    seen[key] = f"{kernel.__name__}: {compiled.metadata.shared} bytes of shared memory"


def drive() -> None:
    """Call the ops with CPU tensors; nothing is computed."""
    from aengine.kernels import (
        activation,
        decode_attention,
        gumbel,
        input_prep,
        linear,
        rms_norm,
        varlen_attention,
        write_qkv,
    )

    for dtype in (torch.bfloat16,) if CAPABILITY >= 80 else (torch.float16,):
        for rows in (1, 8, 16, 64):
            for k in (576, 1024):
                x, norm = torch.zeros(rows, k, dtype=dtype), torch.zeros(k, dtype=dtype)
                weight, bias = torch.zeros(1024, k, dtype=dtype), torch.zeros(1024, dtype=dtype)
                linear.norm_linear(x, norm, 1e-6, weight, bias, torch.float32)
                linear.norm_gated_linear(x, norm, 1e-6, weight, None)
                linear.add_linear(torch.zeros(rows, 1024, dtype=dtype), x, weight)
        rms_norm.rms_norm(torch.zeros(3, 576, dtype=dtype), torch.zeros(576, dtype=dtype), 1e-6)
        activation.silu_and_mul(torch.zeros(3, 64, dtype=dtype))
        for heads, kv_heads, dim, window in ((16, 8, 128, None), (9, 3, 64, 40)):
            for n in (1, 64, 300):
                qkv = torch.zeros(n, (heads + 2 * kv_heads) * dim, dtype=dtype)
                cache = torch.zeros(4, 2, kv_heads, 16, dim, dtype=dtype).permute(0, 3, 1, 2, 4)
                table, rows = torch.zeros(n, 8, dtype=torch.int32), torch.zeros(n, dtype=torch.int64)
                lens, rope = torch.zeros(n, dtype=torch.int32), torch.zeros(99, dim)
                workspace = decode_attention.DecodeWorkspace(n, heads, kv_heads, dim, torch.device("cpu"))
                plan = decode_attention.plan_decode(rows, lens, workspace)
                for norm in (None, torch.zeros(dim, dtype=dtype)):
                    for is_raw in (True, False):
                        where = (cache, table, rope, norm, norm, 1e-6, heads, 0.1, window, plan, workspace)
                        decode_attention.decode_step_attention(qkv, *where, is_raw=is_raw)
                    write_qkv.turn_and_write(qkv, rows, rows, rope, norm, norm, 1e-6, heads, cache)
                q = qkv.view(n, -1, dim)[:, :heads]
                starts = torch.zeros(n + 1, dtype=torch.int32)
                prompts = varlen_attention.plan_prompts(
                    rows, starts, lens, n, heads // kv_heads, dtype, skip_single=n > 1
                )
                varlen_attention.varlen_attention(q, cache, table, prompts, n, 0.1, window)
    ids, table = torch.zeros(4, 32, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    scalars, rows = torch.zeros(4, 16, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    columns = input_prep.ScalarColumns(0, 2, 10, 11)
    input_prep.prepare_inputs(ids, scalars[:, 11], table, rows, rows, 16, 4)
    inputs = input_prep.prepare_decode(ids, scalars, columns, rows)
    input_prep.append_tokens(ids, scalars[:, 10], rows, rows)
    published, cursor = torch.zeros(3, 2, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    input_prep.commit_decode(ids, scalars, columns, rows, rows, torch.zeros(4), published, cursor)
    logits = torch.zeros(4, 1000)
    gumbel.gumbel_sample(logits, inputs.temperature, inputs.seeds, inputs.sample_positions)
    drive_sampler(logits, inputs)


def drive_sampler(logits: torch.Tensor, inputs: Any) -> None:
    from aengine.kernels import bitmask, gumbel, logit_bias, logprobs, staged_write, top_k_top_p

    ones = torch.ones(4)
    cutoff = top_k_top_p.find_cutoff(logits, inputs.temperature, torch.zeros(4, dtype=torch.int32), ones, ones)
    ids, _ = gumbel.gumbel_sample(logits, inputs.temperature, inputs.seeds, inputs.sample_positions, cutoff)
    logprobs.top_logprobs(logits, ids, 4)
    logit_bias.add_bias(logits, ids, ids, ones)
    logit_bias.ban_tokens(logits, ids, ids)
    bitmask.apply_bitmask(logits, ids, torch.zeros(4, 128, dtype=torch.uint8))
    starts = torch.zeros(2, dtype=torch.int64)
    nothing = torch.zeros(0, dtype=torch.int32)
    staged_write.apply_staged_writes(torch.zeros(9, dtype=torch.int32), starts, starts, nothing)


def main() -> None:
    import importlib
    import pkgutil

    from aengine.kernels import bodies
    from aengine.kernels.seat import triton_everywhere

    for info in pkgutil.iter_modules(bodies.__path__):
        module = importlib.import_module(f"{bodies.__name__}.{info.name}")
        if "launch" in vars(module) and not inspect.ismodule(module.launch):
            module.launch = compile_only
    launching.launch = compile_only
    with triton_everywhere():
        drive()
    print(f"{len(seen)} kernels")
    for line in sorted(set(seen.values())):
        print(line)


if __name__ == "__main__":
    CAPABILITY = int(sys.argv[1])
    main()
