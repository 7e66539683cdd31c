"""Trains a head that drafts for a small model, and writes it as such heads are published: safetensors and config.json.

    python benchmarks/train_draft_heads.py texts --out DIR --seconds 250           what the target writes, captured
    python benchmarks/train_draft_heads.py eagle3 --out DIR --seconds 250
    python benchmarks/train_draft_heads.py texts eagle3 mtp --out DIR --seconds 35 --batches 48     on a GPU
    python benchmarks/train_draft_heads.py texts dflash peagle --out DIR --total 95 --batches 64 --at-once 64 \\
        --batch 64 --texts 0 --rate 1e-3                                 in one go: texts stay in the GPU's memory

Each of them takes --seconds, and goes on where it was stopped: a machine that is shared is held for minutes at a time.
With --total all of it takes so many, and what the texts leave is divided among the heads.
The texts begin with Python's own documentation, as a text and as a question in a chat; the target goes on, greedily and
at temperature 0.8. Those that are held out begin in a part of it with which no other one does.
What is trained are the reference's heads (tests/models/draft_heads.py), on drafts of --steps tokens: each step reads
the state that the one before has made, as when drafting, and learns the target's distribution there.

"tokens a step": of texts that were held out, the target's own greedy ones, gone through as speculation would: a step
brings the drafts that are what comes, and one token more.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import pydoc_data.topics
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

sys.path += [str(Path(__file__).parents[1] / "tests" / "models")]

from draft_heads import DFlash, DraftHead, Eagle3, Mtp, PEagle
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from aengine.checkpoint.gguf_file import GgufFile
from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig
from aengine.engine.tokenizer.tokenizer import Tokenizer
from aengine.runner.models import gguf_names, read_config
from aengine.runner.weights.sources.gguf_source import read_gguf_tensor

BEGUN = time.monotonic()
PROMPT, LENGTH, HELD_OUT = 40, 256, 2
Texts = list[dict[str, Tensor]]
"""Batches of texts, and of what the target computes of them."""
KINDS: dict[str, type[DraftHead]] = {"eagle3": Eagle3, "peagle": PEagle, "mtp": Mtp, "dflash": DFlash}
LAYERS = {"dflash": 3, "peagle": 2}
MASK = 5
"""A token that texts do not have: of repositories' files."""
CHAT = "<|im_start|>user\n{}", "<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = ("Explain this: ", "Write an example of it. ", "What is meant by this? ", "Say it in other words: ")


def load_target(model: str, device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[LlamaForCausalLM, Any]:
    """The model of a GGUF as transformers computes it, and its tokenizer."""
    source = resolve_model(EngineConfig.create(model, {}))
    config = LlamaConfig(**source.hf_config)
    names, state = gguf_names(read_config(source.hf_config)), dict[str, Tensor]()
    with GgufFile(source.path) as file:
        stored = list(file.tensors)
    for name in stored:
        full = names.hf_name(name)
        weight = read_gguf_tensor(source.path, name)
        if isinstance(full, str) and full.endswith(("q_proj.weight", "k_proj.weight")):  # pairs are interleaved
            weight = weight.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        state[str(full)] = weight
    with torch.device("meta"):
        target = LlamaForCausalLM(config)
    target.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    target.model.rotary_emb = type(target.model.rotary_emb)(config)
    return target.to(device, dtype).eval(), Tokenizer.load(source)


def documentation(most_files: int = 400) -> str:
    """Python's documentation: of the language, and the docstrings of its library."""
    parts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:most_files]:
        try:
            tree = ast.parse(path.read_text())
        except (SyntaxError, UnicodeDecodeError):
            continue
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
        parts += [text for node in ast.walk(tree) if isinstance(node, nodes) and (text := ast.get_docstring(node))]
    return "\n\n".join(parts)


def prompts(tokenizer: Any, rows: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of prompts of PROMPT tokens, int64 [rows, PROMPT], of texts and of chats in turn, from number ``first``
    on, without end; and of the documentation as it is, [rows, LENGTH]. Its last tenth is for those held out."""
    ids, rng = torch.tensor(tokenizer.encode(documentation())), torch.Generator().manual_seed(first)
    border = len(ids) * 9 // 10
    end = torch.tensor(tokenizer.encode(CHAT[1]))
    heads = [torch.tensor(tokenizer.encode(CHAT[0].format(question))) for question in QUESTIONS]
    for number in itertools.count(first):
        is_chat, made = number % 4 in (1, 2), []  # each of both greedily and at a temperature
        low, high = (border, len(ids)) if number < HELD_OUT else (0, border)
        starts = torch.randint(low, high - LENGTH, (rows,), generator=rng)
        for start in starts:
            head = heads[int(start) % len(heads)] if is_chat else ids[:0]
            tail = end if is_chat else end[:0]
            inner = ids[start : start + PROMPT - len(head) - len(tail)]
            made.append(torch.cat((head, inner, tail)))
        yield torch.stack(made), torch.stack([ids[start : start + LENGTH] for start in starts])


@torch.inference_mode()
def written(target: LlamaForCausalLM, prompt: Tensor, temperature: Tensor) -> Tensor:
    """What the target makes of prompts at the temperatures [rows, 1]: int64 [rows, LENGTH]."""
    cache, ids, step = DynamicCache(config=target.config), [prompt], prompt
    for _ in range(LENGTH - prompt.shape[1]):
        logits = target(step, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
        noise = -torch.empty_like(logits).exponential_().log() * temperature
        step = (logits + noise).argmax(-1, keepdim=True)
        ids.append(step)
    return torch.cat(ids, 1)


def layers_of(target: LlamaForCausalLM) -> tuple[int, int, int]:
    """The layers whose inputs EAGLE-3 reads."""
    count = target.config.num_hidden_layers
    return 2, count // 2, count - 3


@torch.inference_mode()
def captured(target: LlamaForCausalLM, ids: Tensor) -> dict[str, Tensor]:
    """What the heads learn from: the target's states."""
    states = target.model(ids, output_hidden_states=True).hidden_states
    aux = torch.cat([states[i] for i in layers_of(target)], -1)
    return {"ids": ids, "aux": aux, "last": states[-1]}


def make_texts(args: argparse.Namespace, target: LlamaForCausalLM, tokenizer: Any) -> Texts:
    """Write batches of texts to files, the first of them greedy and held out, until the seconds are over. With --total
    they are returned instead."""
    until = time.monotonic() + args.seconds
    made: Texts = []
    done = len(list(args.out.glob("texts-*.pt")))
    torch.manual_seed(done)
    source = prompts(tokenizer, args.rows, done)
    while done < args.batches and time.monotonic() < until:
        begun = time.monotonic()
        temperatures = torch.tensor([0.8 * (done + i >= HELD_OUT and (done + i) % 2) for i in range(args.at_once)])
        prompt, ids = (torch.cat(own).to(args.device) for own in zip(*(next(source) for _ in temperatures)))
        if done < HELD_OUT + args.written:
            ids = written(target, prompt, temperatures.repeat_interleave(args.rows)[:, None].to(args.device))
        for part in ids.split(args.rows):
            made.append(captured(target, part))
            if not args.total:
                own = {name: tensor.cpu() for name, tensor in made.pop().items()}
                torch.save(own, args.out / f"texts-{done:04}.pt")
            done += 1
        print(f"texts {done}: {ids.numel()} tokens in {time.monotonic() - begun:.1f} s", flush=True)
    return made


def own_settings(kind: str, num_layers: int, draft_vocab: int, target: LlamaForCausalLM) -> dict[str, Any]:
    """What the config.json of a kind of head has of its own, as such heads are published."""
    if kind == "mtp":
        return {"architectures": ["MiMoMTP"], "model_type": "mimo_mtp", "num_nextn_predict_layers": 1}
    if kind == "dflash":
        read = {"mask_token_id": MASK, "target_layer_ids": [i - 1 for i in layers_of(target)]}
        names = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": num_layers}
        return names | {"block_size": 8, "num_target_layers": target.config.num_hidden_layers, "dflash_config": read}
    own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": draft_vocab}
    return own if kind == "eagle3" else own | {"num_hidden_layers": num_layers, "ptd_token_id": MASK}


def make_head(kind: str, target: LlamaForCausalLM, texts: Texts, args: argparse.Namespace) -> DraftHead:
    """A head that begins as the target's last layers and output."""
    config, draft_vocab = target.config, args.draft_vocab
    own = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": config.hidden_act,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    own |= own_settings(kind, LAYERS.get(kind, 1), draft_vocab, target)
    table, size = target.model.embed_tokens.weight.detach(), config.hidden_size
    with table.device, torch.no_grad():
        head = KINDS[kind](own, table, table)
        layers: list[Any] = list(getattr(head, "layers", [head]))
        if isinstance(head, Mtp):
            head.final_layernorm.weight.copy_(target.model.norm.weight)
            head.input_proj.weight.mul_(0.1)[:, :size].add_(torch.eye(size))
        else:
            head.norm.weight.copy_(target.model.norm.weight)
            head.fc.weight.mul_(0.1)[:, 2 * size :].add_(torch.eye(size))
        if isinstance(head, Eagle3):
            counts = torch.zeros(config.vocab_size, device="cpu")
            for one in texts:
                counts += one["ids"].flatten().bincount(minlength=config.vocab_size).cpu()
            ids = counts.topk(draft_vocab).indices.sort().values
            print(f"draft vocabulary: {counts[ids].sum() / counts.sum():.4f} of the tokens", flush=True)
            head.d2t.copy_(ids - torch.arange(draft_vocab, device="cpu"))
            head.t2d[ids.to(table.device)] = True
            head.lm_head.weight.copy_(table[ids.to(table.device)])
            layers = head.eagle_layers()
        for layer, theirs in zip(layers, target.model.layers[-len(layers) :], strict=True):
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                mine, other = getattr(layer.self_attn, name).weight, getattr(theirs.self_attn, name).weight
                mine.mul_(0.1)[:, -other.shape[1] :].add_(other)
            layer.mlp.load_state_dict(theirs.mlp.state_dict())
            layer.post_attention_layernorm.load_state_dict(theirs.post_attention_layernorm.state_dict())
    return head


class Batches:
    """The captured texts, on the device."""

    def __init__(self, texts: Texts, kind: str, device: str) -> None:
        self._device, self.ids = device, torch.cat([one["ids"] for one in texts])
        self._last = torch.cat([one["last"] for one in texts])
        self._read = torch.cat([one["aux"] for one in texts]) if kind != "mtp" else self._last
        if device != "cpu":
            self.ids, self._last, self._read = (x.to(device) for x in (self.ids, self._last, self._read))

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, index: Tensor | slice) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, what the head reads, and the target's last states, of some texts."""
        return self.ids[index], self._read[index], self._last[index]


def loss_of(head: DraftHead, batch: tuple[Tensor, Tensor, Tensor], output: Tensor, steps: int, blocks: int) -> Tensor:
    """Cross entropy of the target's distributions, of all steps, those that come later counting for less. ``blocks``:
    so many rows of a text are drafted behind, where each has a block of its own."""
    ids, read, last = batch
    rows = ids.shape[1] - steps
    forced = [ids[:, 1 + step : 1 + step + rows] for step in range(1, steps)]
    given, at = (read[:, :rows], ids[:, 1 : 1 + rows], steps), torch.arange(rows, device=ids.device)
    if isinstance(head, DFlash):
        at = torch.randperm(rows, device=ids.device)[:blocks]
        all_logits, _ = head.roll_out(*given, at=at)
    else:
        all_logits, _ = head.roll_out(*given, forced)
    loss = torch.zeros((), device=ids.device)
    for step, logits in enumerate(all_logits):
        with torch.no_grad():
            wanted = F.linear(last[:, 1 + step + at], output).float().softmax(-1)
        loss = loss - 0.8**step * (wanted * logits.float().log_softmax(-1)).sum(-1).mean()
    return loss


@torch.inference_mode()
def tokens_a_step(head: DraftHead, held_out: Batches, steps: int) -> tuple[float, list[float]]:
    """Tokens a step of speculation with ``steps`` drafts over greedy texts, and how often each draft was right if the
    ones before it were."""
    ids, read, _ = held_out.rows(slice(None))
    rows = ids.shape[1] - steps - 1
    forced = [ids[:, 1 + step : 1 + step + rows] for step in range(1, steps)]
    _, drafts = head.roll_out(read[:, :rows], ids[:, 1 : 1 + rows], steps, forced)
    right = torch.stack([drafts[j] == ids[:, 2 + j : 2 + j + rows] for j in range(steps)], -1).int().cumprod(-1)
    accepted, num_tokens, num_steps = right.sum(-1).tolist(), 0, 0
    for text in accepted:
        place = PROMPT  # the first token was sampled after the prompt
        while place < rows:
            num_tokens, num_steps = num_tokens + 1 + text[place], num_steps + 1
            place += 1 + text[place]
    shares = right[:, PROMPT:].float().mean((0, 1))
    return num_tokens / num_steps, [float(x) for x in shares / torch.cat((torch.ones_like(shares[:1]), shares[:-1]))]


def train(args: argparse.Namespace, kind: str, target: LlamaForCausalLM, seconds: float, texts: Texts) -> None:
    begun = time.monotonic()
    head = make_head(kind, target, texts, args)
    output = target.lm_head.weight.detach()
    if isinstance(head, Eagle3):
        output = output[head.ids(torch.arange(args.draft_vocab, device=args.device))]
    held_out, learned = (Batches(own, kind, args.device) for own in (texts[:HELD_OUT], texts[HELD_OUT:]))
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, args.rate, (0.9, 0.95), weight_decay=0.0, fused=args.device != "cpu")
    folder, seen = args.out / kind, 0
    folder.mkdir(exist_ok=True)
    if (folder / "state.pt").exists():
        state = torch.load(folder / "state.pt", map_location=args.device)
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        seen = state["seen"]
    torch.manual_seed(seen)
    last_print = time.monotonic()

    def report() -> None:
        with torch.autocast(args.device, torch.bfloat16):
            rate, shares = tokens_a_step(head.eval(), held_out, args.steps)
        shown = " ".join(f"{share:.2f}" for share in shares)
        print(f"{kind}: {seen} texts, {time.monotonic() - begun:.0f} s: {rate:.3f} tokens a step; {shown}", flush=True)

    report()
    progress = 0.0
    while progress < 1 and time.monotonic() - begun < seconds:
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1.0, (seen + 1) / (50 * args.batch)) * max(0.02, 1 - progress)
        batch = learned.rows(torch.randint(0, len(learned), (args.batch,)))
        with torch.autocast(args.device, torch.bfloat16):
            loss = loss_of(head.train(), batch, output, args.steps, args.blocks)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 0.5)
        optimizer.step()
        seen += args.batch
        progress = seen / args.texts if args.texts else (time.monotonic() - begun) / seconds
        if time.monotonic() - last_print > args.every:
            print(f"loss {loss.item():.3f}", end=", ", flush=True)
            report()
            last_print = time.monotonic()
    if not args.total:
        torch.save({"head": head.state_dict(), "optimizer": optimizer.state_dict(), "seen": seen}, folder / "state.pt")
    tensors = {head.prefix + name: x.contiguous().cpu() for name, x in head.state_dict().items()}
    tensors = {name: x.bfloat16() if x.is_floating_point() else x for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(head.config, indent=2) + "\n")
    report()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", choices=("texts", *KINDS), nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=250, help="of each stage")
    parser.add_argument("--total", type=float, default=0, help="seconds of all stages, which go in one then")
    parser.add_argument("--every", type=float, default=30, help="seconds between two reports")
    parser.add_argument("--batches", type=int, default=20, help="of texts of 256 tokens, two of them held out")
    parser.add_argument("--rows", type=int, default=64, help="texts of a batch")
    parser.add_argument(
        "--written",
        type=int,
        default=1 << 30,
        help="batches that the target writes beside those held "
        "out; the others are the documentation as it is, which takes a CPU less time",
    )
    parser.add_argument("--at-once", type=int, default=1, help="batches that are made together")
    parser.add_argument("--texts", type=int, default=6000, help="learned from in all; 0: by --seconds, in one go")
    parser.add_argument("--batch", type=int, default=8, help="texts of one step of the optimizer")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=48, help="of a text, in a step of the optimizer: DFlash's")
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    target, tokenizer = load_target(args.model, args.device)
    print(f"loaded after {time.monotonic() - BEGUN:.0f} s", flush=True)
    texts: Texts = []
    for number, stage in enumerate(args.stages):
        if stage == "texts":
            texts = make_texts(args, target, tokenizer)
            continue
        if not args.total:
            texts = [torch.load(file) for file in sorted(args.out.glob("texts-*.pt"))]
        left = (args.total - (time.monotonic() - BEGUN)) / (len(args.stages) - number)
        train(args, stage, target, left if args.total else args.seconds, texts)


if __name__ == "__main__":
    main()
