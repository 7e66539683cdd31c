"""Small checkpoints of every kind for fuzz_files.py, and the ways to spoil them."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HERE = Path(__file__).parent

Change = Callable[[random.Random, Path], str]

ODD: list[Any] = [
    None, True, False, 0, 1, -1, -5, 3, 7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1, 2**64,
    10**30, 10**400, 0.0, 0.5, -1.5, 1e-45, 1e300, float("nan"), float("inf"), "", "x", "{}", "{0}", "\ud800",
    "é" * 300, "y" * 5000, ["y" * 5000], {"y" * 5000: "y" * 5000}, ["re:(a+)+$"], [], [[]], [1], [None], ["x"], {},
    {"a": 1}, {"a": {"b": []}}, {"rope_type": "yarn"}, "../x", "/etc/passwd", "a\0b",
]  # fmt: skip
EXTRA_KEYS = (
    "rope_scaling", "rope_theta", "rope_parameters", "sliding_window", "layer_types", "quantization_config",
    "num_experts", "num_local_experts", "head_dim", "eos_token_id", "architectures", "id2label", "num_labels",
    "text_config", "partial_rotary_factor", "use_sliding_window", "max_window_layers", "sentence_transformers",
    "hidden_act", "model_type", "tie_word_embeddings", "attention_bias", "torch_dtype", "model_max_length",
    "is_decoder", "use_bidirectional_attention", "mlp_only_layers", "no_rope_layers", "auto_map", "chat_template",
    "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens", "bos_token", "add_bos_token",
    "tokenizer_class", "ignore",
)  # fmt: skip
ROPES: list[Any] = [
    {"rope_type": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "short_factor": [1.0] * 4,
     "long_factor": [2.0] * 4, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
    for kind in ("linear", "yarn", "llama3", "longrope", "dynamic", "su", "x")
]  # fmt: skip
PLAIN: dict[str, Any] = {  # 8-bit integers, but for all matrices
    "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head", "re:.*_proj$"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}}},
}  # fmt: skip


# -- the files that are spoiled


def write_bases(folder: Path) -> list[Path]:
    """Write a checkpoint of each kind."""
    from transformers import BertConfig, BertModel

    sys.path += [str(HERE.parent / "models")]  # behind all else: that folder has a conftest.py too
    from tiny import ARCHITECTURES, write_tiny_model

    bases = [write_tiny_model(folder / arch, arch) for arch in ARCHITECTURES]
    tokenizer = (bases[0] / "tokenizer.json").read_bytes()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    bert = BertModel(BertConfig(vocab_size=64, **sizes))
    bert.save_pretrained(folder / "bert")
    (folder / "bert" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n##a\n##b\n")
    (folder / "bert" / "modules.json").write_text(
        json.dumps([{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}])
    )
    (folder / "bert" / "1_Pooling").mkdir()
    (folder / "bert" / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    bases.append(folder / "bert")
    sharded = write_tiny_model(folder / "sharded", "llama", max_shard_size="60KB")
    (sharded / "tokenizer.json").write_bytes(tokenizer)
    bases.append(sharded)
    ignoring = Path(shutil.copytree(folder / "llama", folder / "ignoring"))
    config = json.loads((ignoring / "config.json").read_text())
    (ignoring / "config.json").write_text(json.dumps({**config, "quantization_config": PLAIN}))
    bases.append(ignoring)
    for name, write in (("tekken", write_tekken), ("sentencepiece", write_sentencepiece)):
        path = folder / name
        shutil.copytree(folder / "mistral", path)
        (path / "tokenizer.json").unlink()
        write(path)
        bases.append(path)
    bases += [write_gguf(folder / f"{kind}.gguf", kind) for kind in ("gpt2", "llama", "t5", "bert")]
    return bases


def write_tekken(folder: Path) -> None:
    vocab = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)]
    vocab.append({"rank": 256, "token_bytes": base64.b64encode(b"ab").decode(), "token_str": "ab"})
    config = {"pattern": r"\p{L}+|.", "default_vocab_size": 277, "default_num_special_tokens": 20}
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab}))


def write_sentencepiece(folder: Path) -> None:
    models = json.loads((HERE.parent / "tokenizer" / "sentencepiece_models.json").read_text())
    (folder / "tokenizer.model").write_bytes(base64.b64decode(models[0]["model"]))


TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁a"]


def write_gguf(path: Path, kind: str = "llama", changes: dict[str, Any] | None = None) -> Path:
    """A model of Llama's with a tokenizer of that kind. ``changes``: metadata by key; None: left out."""
    letters = [chr(i) for i in range(33, 127)] if kind == "gpt2" else []
    tokens = [*TOKENS, *letters]
    values: dict[str, Any] = {
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 48,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": 8,
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.cls_token_id": 1,
        "tokenizer.ggml.seperator_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    } | (changes or {})
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        add(writer, key, value)
    rng = np.random.default_rng(1)
    shapes = {"token_embd": (len(tokens), 32), "output_norm": (32,)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.attn_norm": (32,), f"blk.{layer}.ffn_norm": (32,)}
        shapes |= {f"blk.{layer}.attn_q": (32, 32), f"blk.{layer}.attn_k": (16, 32), f"blk.{layer}.attn_v": (16, 32)}
        shapes |= {f"blk.{layer}.attn_output": (32, 32), f"blk.{layer}.ffn_gate": (48, 32)}
        shapes |= {f"blk.{layer}.ffn_up": (48, 32), f"blk.{layer}.ffn_down": (32, 48)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = gguf.GGUFValueType
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        kind = kinds.UINT32 if 0 <= value < 2**32 else kinds.UINT64 if value > 0 else kinds.INT64
        writer.add_key_value(key, max(-(2**63), min(value, 2**64 - 1)), kind)
    elif isinstance(value, float):
        writer.add_float64(key, value)
    elif isinstance(value, list) and value:
        with contextlib.suppress(ValueError):  # of kinds that can't be mixed
            writer.add_array(key, value)


# -- the ways to spoil them


def spoil_json(rng: random.Random, folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*.json") if path.is_file() and path.stat().st_size < 1 << 20)
    if not files:
        return spoil_bytes(rng, folder)
    path = rng.choice(files)
    try:
        value = json.loads(path.read_text())
    except (ValueError, OSError, RecursionError):  # spoiled already
        return "nothing"
    place, key = a_place(rng, value)
    odd = copy.deepcopy(rng.choice(ROPES if "rope" in str(key) and rng.random() < 0.5 else ODD))
    kind = rng.random()
    if not isinstance(place, (dict, list)):
        value = odd
    elif kind < 0.1 and len(place):
        del place[key]
    elif kind < 0.25 and isinstance(place, dict):
        key = rng.choice(EXTRA_KEYS)
        place[key] = odd
    elif len(place):
        place[key] = odd
    path.write_text(json.dumps(value))
    return f"{path.name}: {key}={odd!r:.60}"


def a_place(rng: random.Random, value: Any) -> tuple[Any, Any]:
    """A container within the value, and a key of it. Those near the top are the likelier."""
    place, key = value, None
    while isinstance(place, (dict, list)) and len(place):
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.4:
            break
        place = inner
    return place, key


def spoil_bytes(rng: random.Random, folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    at = min(len(data), int(len(data) ** rng.random()))  # most at the beginning, where the headers are
    kind = rng.choice(("flip", "cut", "insert", "number", "number", "repeat"))
    if kind == "flip" and data:
        data[at % len(data)] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "insert":
        data[at:at] = rng.randbytes(rng.randrange(1, 9))
    elif kind == "number":
        number = rng.choice((0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1))
        data[at : at + 8] = struct.pack("<Q", number)
    else:
        data[at:at] = data[at : at + 64] * rng.choice((2, 50))
    path.write_bytes(data)
    return f"{path.name}: {kind} at {at}"


def spoil_file(rng: random.Random, folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = rng.choice(files)
    path.unlink()
    kind = rng.choice(("pipe", "loop", "empty", "folder", "none", "long"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "folder":
        path.mkdir()
    elif kind == "long":
        path.write_text(rng.choice(("[", '{"a":', '"', "1")) * rng.choice((5000, 2_000_000)))
    return f"{path.name}: {kind}"


def spoil_index(rng: random.Random, folder: Path) -> str:
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return spoil_json(rng, folder)
    try:
        names = json.loads(path.read_text())["weight_map"]
    except (ValueError, LookupError, TypeError, RecursionError):  # spoiled already
        return "nothing"
    if not isinstance(names, dict) or not names:
        return "nothing"
    name = rng.choice(("../x.safetensors", "/etc/passwd", "x" * 5000, "a\0b", "", ".", "config.json", "\ud800", 5))
    names[rng.choice(list(names))] = name
    path.write_text(json.dumps({"weight_map": names}))
    return f"index: {name!r:.40}"


def spoil_header(rng: random.Random, folder: Path) -> str:
    """The header of a safetensors file: its JSON with one thing changed."""
    path = folder / "model.safetensors"
    if not path.is_file():
        return spoil_bytes(rng, folder)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")  # another way may have cut it shorter
    try:
        header = json.loads(data[8 : 8 + size])
    except (ValueError, RecursionError):
        return "nothing"
    place, key = a_place(rng, header)
    odd = copy.deepcopy(rng.choice([*ODD, "F64", "I8", "U8", "BOOL", "F8_E4M3", [2**40, 2**40], [0], [32, -1]]))
    if rng.random() < 0.3:
        name = rng.choice(("{0:>2000000000}{}.weight", "model.layers.99999999999.x", "x" * 100_000, "lm_head.bias"))
        header[name] = header[rng.choice(list(header))]
        key, odd = name, "another tensor"
    elif isinstance(place, (dict, list)) and len(place):
        place[key] = odd
    new = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + data[8 + size :])
    return f"header: {key!s:.40}={odd!r:.60}"


def spoil_gguf(rng: random.Random, folder: Path) -> str:
    """A GGUF with one value of its metadata changed."""
    path = next(folder.glob("*.gguf"), None)
    if path is None or rng.random() < 0.3:
        return spoil_bytes(rng, folder)
    keys = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
            "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count",
            "attention.key_length", "attention.value_length", "attention.sliding_window", "rope.scaling.type",
            "rope.scaling.factor", "rope.scaling.original_context_length", "expert_count", "attention.causal",
            "pooling_type", "vocab_size", "classifier.output_labels")  # fmt: skip
    own = ("model", "pre", "tokens", "scores", "token_type", "merges", "bos_token_id", "eos_token_id",
           "eot_token_id", "unknown_token_id", "add_bos_token", "add_space_prefix", "precompiled_charsmap",
           "padding_token_id")  # fmt: skip
    names = [*(f"llama.{key}" for key in keys), *(f"tokenizer.ggml.{name}" for name in own)]
    names += ["general.alignment", "tokenizer.chat_template", "tokenizer.chat_templates", "split.count"]
    key = rng.choice(names)
    plain = [value for value in ODD if not isinstance(value, dict)]
    lists = [["a"] * 264, [1.5] * 264, [[1], [2]], ["x" * 200_000], [0, 2], [2, 2]]
    odd = rng.choice([*plain, *lists, "yarn", "llama", "bert", "t5", "gemma4"])
    try:
        write_gguf(path, path.stem, {key: odd})
    except Exception as error:  # the writer's own bounds
        return f"nothing ({type(error).__name__})"
    return f"{key}={odd!r:.60}"


SPOILERS: list[Change] = [spoil_json, spoil_json, spoil_json, spoil_bytes, spoil_file, spoil_index, spoil_header]


def spoiled(rng: random.Random, base: Path, folder: Path) -> tuple[Path, str]:
    """A copy of ``base`` in which some things are changed; and what."""
    if base.is_dir():
        shutil.copytree(base, folder)
    else:
        folder.mkdir()
        shutil.copy(base, folder)
    ways = SPOILERS if base.is_dir() else [spoil_gguf, spoil_gguf, spoil_bytes, spoil_file]
    whats = [
        rng.choice(ways)(rng, folder)
        for _ in range(rng.choice((1, 1, 1, 2, 3)))
        if any(path.is_file() for path in folder.rglob("*"))
    ]
    return (folder if base.is_dir() else folder / base.name), f"{base.name}: {'; '.join(whats)}"
