"""A decoder with mixtures of experts on this machine's CPU, random weights: tokens a second. JSON lines to stdout.

    python benchmarks/cpu_experts.py [--experts 16] [--kinds q4_0 q8_0 bfloat16] [--streams 1 8] [--eager]
    python benchmarks/cpu_experts.py --before FOLDER       another checkout of aengine, in the same rounds
    python benchmarks/cpu_experts.py --layer               one layer's experts: microseconds of one thread's CPU time,
                                                           as a tape, and op by op as experts of several kinds are

A line has for a kind of weights and a round: decoded tokens a second of as many streams, tokens a second of a prompt,
the process' resident memory, and how the layers ran. The model is Qwen3-MoE's, of ``--layers`` layers, written as a
GGUF into a folder that is removed; ``bfloat16`` as a checkpoint's config, with dummy weights.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np

VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 4096, 16, 4, 64


def sizes_of(args: argparse.Namespace) -> dict[str, int]:
    return {
        "hidden_size": args.hidden,
        "moe_intermediate_size": args.inner,
        "num_experts": args.experts,
        "num_experts_per_tok": args.top_k,
        "num_hidden_layers": args.layers,
    }


def write_config(folder: Path, args: argparse.Namespace) -> Path:
    config: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "intermediate_size": args.inner,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "eos_token_id": 1,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | sizes_of(args)))
    return folder


def write_gguf(path: Path, kind: str, args: argparse.Namespace) -> Path:
    """Codes are random bytes, scales some thousandths."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_context_length(4096)
    writer.add_embedding_length(args.hidden)
    writer.add_block_count(args.layers)
    writer.add_feed_forward_length(args.inner)
    writer.add_expert_feed_forward_length(args.inner)
    writer.add_expert_count(args.experts)
    writer.add_expert_used_count(args.top_k)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["a", "b", "ab", *(f"t{i}" for i in range(3, VOCABULARY))])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    rng = np.random.default_rng(0)
    raw = gguf.GGMLQuantizationType[kind.upper()]
    length, num_bytes = gguf.GGML_QUANT_SIZES[raw]

    def codes(name: str, *shape: int) -> None:
        blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // length, num_bytes), dtype=np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(0.004).tobytes(), np.uint8)
        writer.add_tensor(name, blocks.reshape(*shape[:-1], -1), raw_dtype=raw)

    def numbers(name: str, *shape: int, mean: float = 1.0) -> None:
        writer.add_tensor(name, rng.normal(mean, 0.1, shape).astype(np.float32))

    codes("token_embd.weight", VOCABULARY, args.hidden)
    numbers("output_norm.weight", args.hidden)
    for layer in range(args.layers):
        own = f"blk.{layer}"
        for name, rows in (("attn_q", HEADS), ("attn_k", KV_HEADS), ("attn_v", KV_HEADS)):
            codes(f"{own}.{name}.weight", rows * HEAD_DIM, args.hidden)
        codes(f"{own}.attn_output.weight", args.hidden, HEADS * HEAD_DIM)
        for name, size in (("attn_norm", args.hidden), ("ffn_norm", args.hidden)):
            numbers(f"{own}.{name}.weight", size)
        for name in ("attn_q_norm", "attn_k_norm"):
            numbers(f"{own}.{name}.weight", HEAD_DIM)
        numbers(f"{own}.ffn_gate_inp.weight", args.experts, args.hidden, mean=0.0)
        for name in ("ffn_gate_exps", "ffn_up_exps"):
            codes(f"{own}.{name}.weight", args.experts, args.inner, args.hidden)
        codes(f"{own}.ffn_down_exps.weight", args.experts, args.hidden, args.inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def measure(model: str, streams: list[int], eager: bool) -> None:
    from aengine import LLM, SamplingParams

    settings: dict[str, Any] = {"device": "cpu", "max_model_len": 1024, "enforce_eager": eager}
    if not model.endswith(".gguf"):
        settings |= {"load_format": "dummy", "skip_tokenizer": True}
    begun = time.perf_counter()
    with LLM(model, **settings) as llm:
        result: dict[str, Any] = {"start_s": round(time.perf_counter() - begun, 1)}
        rng = np.random.default_rng(1)

        def prompt(count: int) -> list[int]:
            return [int(token) for token in rng.integers(2, VOCABULARY, count)]

        def seconds(count: int, length: int, tokens: int) -> float:
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            prompts = [prompt(length) for _ in range(count)]
            begin = time.perf_counter()
            llm.generate(prompts, params)
            return time.perf_counter() - begin

        seconds(1, 32, 8)
        for count in streams:
            short, long = (seconds(count, 16, tokens) for tokens in (8, 72))
            result[f"decode_{count}"] = round(64 * count / (long - short), 1)
        result["prefill"] = round(512 / seconds(1, 512, 1), 1)
        described = llm.describe()
        result["attention"] = described.get("attention_backend")
        children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    result["rss_mb"] = max(children, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) // 1024
    print("RESULT", json.dumps(result))


def measure_layer(kind: str, args: argparse.Namespace) -> None:
    import torch

    from aengine.kernels.cpu import tape
    from aengine.kernels.cpu.codes import pack
    from aengine.kernels.expert_plan import plan_experts
    from aengine.kernels.expert_tilings import ExpertShape
    from aengine.kernels.expert_types import ExpertGate, RoutingRule
    from aengine.kernels.routing import route
    from aengine.runner.layers.norm import RMSNorm
    from aengine.runner.weights.compiled import CompiledWeight
    from aengine.runner.weights.expert_weights import SeparateExperts

    class Made(SeparateExperts):
        def __init__(self, rows: int, columns: int) -> None:
            super().__init__(lambda tensors: self.weight(rows, columns), [])
            for expert in range(args.experts):
                self._rooms[expert] = {}
                self.finish(expert)

        def weight(self, rows: int, columns: int) -> CompiledWeight:
            if kind == "bfloat16":
                return CompiledWeight(pack(kind, torch.randn(rows, columns).bfloat16()), None, as_codes=False)
            length, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
            blocks = torch.randint(30, 60, (rows, columns // length, num_bytes), dtype=torch.uint8)
            return CompiledWeight(pack(kind, blocks), None, as_codes=True)

    torch.set_num_threads(1)
    layers = [(Made(2 * args.inner, args.hidden), Made(args.hidden, args.inner)) for _ in range(args.layers)]
    norm, rule = RMSNorm.of(torch.ones(args.hidden), 1e-6), RoutingRule(args.top_k)
    shape = ExpertShape(args.experts, args.hidden, args.inner, args.top_k)
    assert all(part.is_compiled for layer in layers for part in layer)

    def run(is_compiled: bool) -> None:
        for own, (gate_up, down) in zip(logits, layers, strict=True):
            plan = plan_experts(route(own, rule, is_compiled=is_compiled), shape, is_compiled=is_compiled)
            down.add_to(residual, gate_up.gated_after_norm(x, norm, plan, ExpertGate()), plan)

    def microseconds(work: Any) -> float:
        begin = time.process_time()
        work()
        return (time.process_time() - begin) / args.layers * 1e6

    for rows in (1, 8, 64):
        x, residual = torch.randn(rows, args.hidden), torch.zeros(rows, args.hidden)
        logits = [torch.randn(rows, args.experts) for _ in layers]
        with tape.record(rows) as recorded:
            run(True)
        rounds = [(microseconds(lambda: recorded.run(rows)), microseconds(lambda: run(False))) for _ in range(9)]  # noqa: B023
        on_tape, by_op = (round(statistics.median(times)) for times in zip(*rounds, strict=True))
        print(json.dumps({"kind": kind, "rows": rows, "tape_us": on_tape, "op_by_op_us": by_op}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["q4_0", "q8_0", "bfloat16"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8])
    for name, value in (("experts", 16), ("top-k", 4), ("hidden", 1024), ("inner", 512), ("layers", 8), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--layer", action="store_true")
    parser.add_argument("--before", default="")
    parser.add_argument("--measure", default="")
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.streams, args.eager)
        return
    if args.layer:
        for kind in args.kinds:
            measure_layer(kind, args)
        return
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kinds:
            path = Path(folder, kind if kind == "bfloat16" else f"{kind}.gguf")
            path = write_config(path, args) if kind == "bfloat16" else write_gguf(path, kind, args)
            for _ in range(args.rounds):
                for label, package in (("now", ""), *([("before", args.before)] if args.before else [])):
                    run(kind, label, package, path, args)


def run(kind: str, label: str, package: str, path: Path, args: argparse.Namespace) -> None:
    environment = os.environ | ({"PYTHONPATH": package} if package else {})
    command = [sys.executable, __file__, "--measure", str(path), "--streams", *map(str, args.streams)]
    done = subprocess.run(
        command + ["--eager"] * args.eager, capture_output=True, text=True, env=environment, cwd=package or None
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(f"{kind} {label}:\n{done.stderr[-3000:]}")
    print(json.dumps({"kind": kind, "aengine": label} | json.loads(lines[-1][7:])), flush=True)


if __name__ == "__main__":
    main()
