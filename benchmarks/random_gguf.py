"""Write a GGUF of one of engine_bench.py's dense Llama shapes with random Q4_K codes and a Q6_K head, as llama.cpp's
Q4_K_S has them: python random_gguf.py --shape llama-3.1-8b /tmp/b.gguf"""

from __future__ import annotations

import argparse

import gguf
import numpy as np
from engine_bench import SHAPES

Q4_K, Q6_K = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K


def random_blocks(rng: np.random.Generator, rows: int, columns: int, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Codes as bytes [rows, bytes a row], whose weights are of the size of a trained model's, some 0.02."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
    if kind is Q4_K:  # d and dmin lead
        blocks[:, :4] = np.array([4e-5, 3e-4], np.float16).view(np.uint8)
    else:  # 16 signed scales, then d
        blocks[:, 192:208] = rng.integers(0, 64, (len(blocks), 16), dtype=np.uint8)
        blocks[:, 208:] = np.array([3e-5], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def write(path: str, c: dict) -> None:
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "llama")
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    hidden, inner, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(c["rope_theta"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_vocab_size(c["vocab_size"])
    writer.add_eos_token_id(c["eos_token_id"])

    def add(name: str, rows: int, columns: int, kind: gguf.GGMLQuantizationType = Q4_K) -> None:
        writer.add_tensor(f"{name}.weight", random_blocks(rng, rows, columns, kind), raw_dtype=kind)

    add("token_embd", c["vocab_size"], hidden)
    add("output", c["vocab_size"], hidden, Q6_K)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for i in range(c["num_hidden_layers"]):
        layer = f"blk.{i}."
        add(layer + "attn_q", heads * head, hidden)
        add(layer + "attn_k", kv_heads * head, hidden)
        add(layer + "attn_v", kv_heads * head, hidden)
        add(layer + "attn_output", hidden, heads * head)
        add(layer + "ffn_gate", inner, hidden)
        add(layer + "ffn_up", inner, hidden)
        add(layer + "ffn_down", hidden, inner)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{layer}{norm}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shape", choices=[name for name, c in SHAPES.items() if c["model_type"] == "llama"], default="llama-3.1-8b"
    )
    parser.add_argument("path")
    arguments = parser.parse_args()
    write(arguments.path, SHAPES[arguments.shape])
