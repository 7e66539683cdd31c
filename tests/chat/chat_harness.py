"""A small tokenizer, grammars over it, and random walks through them."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Encoder

from aengine import StructuredOutput
from aengine.chat import ChatMessage, ChatParser, Delta, ReasoningDelta, TextDelta, ToolCallDelta
from aengine.engine.chat.prompt import token_ids_of
from aengine.engine.structured.backend import Backend, Compiled
from aengine.engine.structured.backends import load_backend
from aengine.engine.structured.spec import GrammarSpec, spec_of
from aengine.engine.structured.vocabulary import Vocabulary
from aengine.engine.tokenizer.detokenizer import Detokenizer
from aengine.engine.tokenizer.tokenizer import Tokenizer

EOS = "<|im_end|>"
MARKERS = (
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",  # ends an answer, so that <|end|> does not
    "<|tool_call|>",
    "<|/tool_call|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<|channel>",
    "<channel|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<think>",
    "</think>",
)
_CORPUS = [
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
    '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
    '{"tool_calls": [{"name": "get_weather", "arguments": {"city": "Paris"}}]} the answer is <think>so</think>\n\n',
]


MARKERS_ARE = ("control tokens", "added tokens", "text")
"""As in DeepSeek and Mistral, as in Qwen (tokens that count as text), and as in a model that never saw them."""


@functools.cache
def tokenizer(markers_are: str) -> Tokenizer:
    """Byte-level, with a few merges, so that tokens straddle markers."""
    encoder = Encoder(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=6,
    )
    encoder.train_from_iterator(_CORPUS, trainer)
    encoder.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    if markers_are != "text":
        is_control = markers_are == "control tokens"
        encoder.add_tokens([AddedToken(name, special=is_control, normalized=False) for name in MARKERS])
    return Tokenizer(encoder, special_tokens={"eos_token": EOS})


@functools.cache
def backend(markers_are: str) -> Backend:
    known = tokenizer(markers_are)
    return load_backend("llguidance", Vocabulary.of(known, known.vocab_size))


def shape_of(**wanted) -> GrammarSpec:
    """As `compose` takes it: ``shape_of(regex="a*")``."""
    return spec_of(StructuredOutput(**wanted))


@dataclass(frozen=True)
class Setting:
    """A vocabulary, and a grammar compiled for it."""

    tokenizer: Tokenizer
    compiled: Compiled

    @classmethod
    def of(cls, spec: GrammarSpec | None, markers_are: str) -> Setting:
        assert spec is not None
        return cls(tokenizer(markers_are), backend(markers_are).compile(spec))

    def accepts(self, text: str) -> bool:
        """Whether it is a whole completion."""
        matcher = self.compiled.matcher()
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return matcher.accept(ids) == len(ids) and matcher.is_accepting

    def walk(self, rng: random.Random, goals: Sequence[str], max_tokens: int = 400) -> list[int] | None:
        """A completion by chance, or None if it did not end. Now and then it goes for one of ``goals``."""
        known, matcher = self.tokenizer, self.compiled.matcher()
        mask = np.zeros((1, -(-known.vocab_size // 32)), dtype=np.int32)
        walked: list[int] = []
        goal: list[int] = []
        ends = {i for i in range(known.vocab_size) if known.token_bytes(i) in (b'"', b"}", b"]", b'"}', b"}}")}
        while len(walked) < max_tokens:
            if matcher.is_finished:
                return walked
            matcher.fill(mask, 0)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: known.vocab_size]
            allowed = set(np.flatnonzero(bits).tolist())
            assert allowed, f"nothing is allowed after {known.decode(walked, skip_special_tokens=False)!r}"
            if allowed & known.eos_token_ids and (rng.random() < 0.1 or len(allowed) == 1):
                assert matcher.is_accepting
                return walked
            allowed -= known.eos_token_ids
            if not goal and rng.random() < (0.1 if walked else 0.6):
                goal = known.encode(rng.choice(goals), add_special_tokens=False)
            if goal and goal[0] in allowed:
                token_id = goal.pop(0)
            else:
                goal = []
                closing = sorted(allowed & ends)
                token_id = rng.choice(closing if closing and rng.random() < 0.4 else sorted(allowed))
            accepted = matcher.accept([token_id])
            assert accepted == 1
            walked.append(token_id)
        return None

    def shown(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


def token_id_of(known: Tokenizer):
    """The ids of markers, as `compose` and `ChatParser` want them."""
    return token_ids_of(known)


def parse_ids(
    parser: ChatParser, known: Tokenizer, token_ids: Sequence[int], detokenizer: Detokenizer | None = None
) -> tuple[list[Delta], ChatMessage]:
    """Through the engine's own detokeniser."""
    detokenizer = detokenizer or known.detokenizer()
    deltas: list[Delta] = []
    for token_id in token_ids:
        deltas += parser.feed(detokenizer.put(token_id), token_id)
    deltas += parser.feed(detokenizer.flush())
    deltas += parser.finish()
    return deltas, parser.message


def parse(parser: ChatParser, pieces: Sequence[str]) -> tuple[list[Delta], ChatMessage]:
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    deltas += parser.finish()
    return deltas, parser.message


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """Neighbours of one kind as one: what does not depend on how the text was split. Ids are left out."""
    result: list = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, TextDelta | ReasoningDelta) and type(last) is type(delta):
            result[-1] = type(delta)(last.text + delta.text)
        elif isinstance(delta, ToolCallDelta) and isinstance(last, ToolCallDelta):
            result[-1] = ToolCallDelta(delta.index, last.arguments + delta.arguments)
        else:
            result.append(delta)
    return [("start", delta.index, delta.name) if hasattr(delta, "name") else delta for delta in result]


def is_valid(value: object, schema: object) -> bool:
    import jsonschema

    return jsonschema.Draft202012Validator(schema).is_valid(value)
