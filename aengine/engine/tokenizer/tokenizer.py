"""`Tokenizer`: text and chat messages to token ids and back, from a checkpoint's files or a GGUF's metadata."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checkpoint.gguf_file import GgufFile
from ...checkpoint.source import ModelSource, locate, weights_in
from ...checkpoint.value_reader import damage_explained
from ...errors import InvalidRequestError, ModelLoadError
from .chat_template import ChatTemplate
from .detokenizer import Detokenizer, MarkedDetokenizer
from .message_encoding import MessageEncoder
from .messages import Messages
from .token_text import token_table
from .traced_text import TracedText
from .vocabularies.folder import has_tokenizer, read_folder
from .vocabularies.gguf import read_gguf_tokenizer
from .vocabularies.loaded import LoadedTokenizer

if TYPE_CHECKING:
    import tokenizers

logger = logging.getLogger("aengine.tokenizer")

_ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|eot|>", "<|eom|>")
"""Special tokens that end an answer, whatever the files name as end of sequence."""
_SAMPLE = "a \U0010fffd"  # the second character is in no vocabulary
_MOST_TOKENS = 1 << 24
"""Largest vocabulary that is read. The largest known have 300,000."""
_ENDS_OF_HARMONY = ("<|return|>", "<|call|>")
_ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")
"""Special tokens that end an answer of a GGUF, which has no generation_config.json to name them."""


class Tokenizer:
    """A model's tokenizer. Immutable once loaded; all methods may be called from any thread."""

    def __init__(
        self,
        encoder: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        ends: Sequence[str] = _ENDS_OF_TURN,
    ) -> None:
        self._encoder = encoder
        self._allows_special_tokens = False
        self._special_tokens = dict(special_tokens or {})
        added = encoder.get_added_tokens_decoder()
        self.vocab_size = max(encoder.get_vocab_size(), max(added, default=-1) + 1)
        """One more than the largest token id. A model's own may be larger, padded."""
        if self.vocab_size > _MOST_TOKENS:
            raise ModelLoadError(f"the tokenizer has the token id {self.vocab_size - 1}: {_MOST_TOKENS - 1} at most")
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_ids = self._eos_token_ids(eos_token_ids, ends)
        """Every id that ends a completion."""
        self.begin = _Begin(encoder)
        self._table = token_table(encoder, self.special_ids, self.vocab_size)
        templates = chat_templates or {}
        self.messages = MessageEncoder(encoder, "\n".join(templates.values()))
        self._chat_templates = {
            name: ChatTemplate(source, self._special_tokens, self.messages.has_marker)
            for name, source in templates.items()
        }

    @classmethod
    def load(cls, source: ModelSource, override: str | None = None, revision: str | None = None) -> Tokenizer:
        """Return the tokenizer of ``source``, or the one of ``override``: a folder, .gguf file, hub id or embedded
        name.

        ``revision``: of the model's repository, and so of an ``override`` in the same one. Blocking: reads files, may
        download. Raises ModelLoadError.
        """
        path = Path(source.path)
        if override is not None:
            try:
                is_same = override.partition(":")[0] == source.name.partition(":")[0]
                path = locate(override, revision if is_same else None, weights=False)
            except ModelLoadError as error:
                raise ModelLoadError(f"tokenizer={override!r}: {error}") from error
        if path.is_dir() and not has_tokenizer(path) and any(path.glob("*.gguf")):
            path = weights_in(path, "gguf")
        with damage_explained(path), _panics_explained(path):
            loaded = _loaded(path)
            tokenizer = cls(
                loaded.encoder,
                special_tokens=loaded.special_tokens,
                chat_templates=loaded.chat_templates,
                eos_token_ids=source.eos_token_ids,
                ends=_ENDS_OF_TURN if path.is_dir() else _ENDS_OF_TURN + _ENDS_OF_TEXT,
            )
            tokenizer._check_encodes(path)
        model_vocab_size = source.vocab_size
        if model_vocab_size is not None and tokenizer.vocab_size > model_vocab_size:
            logger.warning(
                "the tokenizer of %s has %d tokens and the model %d: prompts with ids beyond are refused",
                path,
                tokenizer.vocab_size,
                model_vocab_size,
            )
        return tokenizer

    def _check_encodes(self, path: Path) -> None:
        """Raise ModelLoadError for a tokenizer that can't encode: it would fail at each request."""
        try:
            self.decode(self.encode(_SAMPLE))
        except Exception as error:  # the library raises plain Exception
            raise ModelLoadError(f"the tokenizer of {path} can't encode the text {_SAMPLE!r}: {error}") from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``; names of special tokens in it become those tokens, but for those that came
        out of a message, in what `apply_chat_template` gives.

        ``add_special_tokens``: begin (or end) it as the model was trained to; a text that begins with the name of the
        token that begins each text gets no second one. Lets go of the GIL while it works, so a
        thread may encode a long text without holding up others (the library's ``encode_batch`` does, its ``encode``
        does not). Raises InvalidRequestError if the text is not Unicode.
        """
        _check_unicode(text)
        if isinstance(text, TracedText) and text.spans:
            return self.messages.encode(text)
        ids = self._encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids[1:] if add_special_tokens and self.begin.is_twice(text, ids) else ids

    def encode_plain(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``, in which names of special tokens stay text."""
        _check_unicode(text)
        return self.messages.encode_plain(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; unknown ones are left out, incomplete characters become U+FFFD."""
        known = [i for i in ids if 0 <= i < self.vocab_size]
        return self._encoder.decode(known, skip_special_tokens=skip_special_tokens)

    def detokenizer(
        self,
        stop: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        markers: frozenset[int] = frozenset(),
        after: Sequence[int] = (),
    ) -> Detokenizer:
        """Return a decoder for one completion, token by token. The text leaves out ``stop`` unless ``include_stop``;
        within ``min_tokens`` it does not end at one.

        ``markers``: control tokens that divide the completion into parts; nothing is held back across one. ``after``:
        the tokens whose text the completion goes on with; some decoders take the blank off a text that begins.
        """
        decoder = self._table.decoder(skip_special_tokens, after)
        kind = MarkedDetokenizer if markers else Detokenizer
        return kind(decoder, stop, include_stop=include_stop, min_tokens=min_tokens, markers=markers)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what the token adds to a text in UTF-8, perhaps a part of a character; b"": there is no such token."""
        return self._table.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """Return `token_bytes` as text, with U+FFFD for parts of characters."""
        return self._table.token_bytes(token_id).decode(errors="replace")

    @property
    def special_tokens(self) -> dict[str, int]:
        """The ids of control tokens, by name."""
        added = self._encoder.get_added_tokens_decoder()
        return {added[i].content: i for i in sorted(self.special_ids)}

    @property
    def encoder(self) -> tokenizers.Tokenizer:
        """The library's object. Not to be changed."""
        return self._encoder

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name in the vocabulary, as "<|im_end|>"."""
        return self._encoder.token_to_id(token)

    def added_token_id(self, name: str) -> int | None:
        """Return the id of an added token by its name: one that is found in a text as a whole. None for any other."""
        found = self._encoder.token_to_id(name)
        return found if found in self.messages.added_ids else None

    @property
    def chat_template_source(self) -> str:
        """The templates' Jinja text; "" if there are none."""
        return "\n".join(template.source for template in self._chat_templates.values())

    def to_json(self) -> str:
        """Return the whole tokenizer as a tokenizer.json of the ``tokenizers`` library: megabytes. Blocking."""
        return self._encoder.to_str()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_templates)

    def compile_chat_templates(self) -> None:
        """Import Jinja and compile the templates, ahead of the first chat. Blocking: some 0.03 s."""
        for template in self._chat_templates.values():
            template.compile()

    def apply_chat_template(
        self,
        messages: Messages,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        **extra: Any,
    ) -> TracedText:
        """Return the prompt for messages, as `checked_messages` gives them; encode it with
        ``add_special_tokens=False``.

        ``continue_final_message``: it ends within the last message, an assistant's, for the completion to go on with.
        ``tools``: JSON schemas of functions; ``extra``: variables that this model's template reads. Raises
        InvalidRequestError when there is no template, or when it refuses the messages.
        """
        if not self._chat_templates:
            raise InvalidRequestError(
                "this model has no chat template, so it takes no messages: give it a text", param="messages"
            )
        template = self._chat_templates.get("tool_use") if tools else None
        template = template or self._chat_templates.get("default") or next(iter(self._chat_templates.values()))
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            extra=extra,
            trace=not self._allows_special_tokens,
        )

    def allowing_special_tokens(self) -> Tokenizer:
        """Return a tokenizer for which the names of special tokens in messages are those tokens."""
        tokenizer = copy.copy(self)
        tokenizer._allows_special_tokens = True
        return tokenizer

    def _id_of(self, role: str) -> int | None:
        token = self._special_tokens.get(role)
        return None if token is None else self._encoder.token_to_id(token)

    def _eos_token_ids(self, given: Sequence[int], ends: Sequence[str]) -> frozenset[int]:
        if self._encoder.token_to_id("<|call|>") is not None:  # <|end|> ends only a part of an answer in this format
            ends = _ENDS_OF_HARMONY
        named = (self._encoder.token_to_id(token) for token in ends)
        found = {i for i in named if i is not None and i in self.special_ids} | set(given)
        eos = self._id_of("eos_token")
        return frozenset(found | {eos} if eos is not None else found)


class _Begin:
    """The token that an encoder puts before each text, if there is one."""

    def __init__(self, encoder: tokenizers.Tokenizer) -> None:
        self._name, self._id = "", -1
        for token in encoder.get_added_tokens_decoder().values():  # every vocabulary can encode any of these
            encoding = encoder.encode(token.content)
            if encoding.ids:
                if encoding.special_tokens_mask[0]:
                    self._name, self._id = encoding.tokens[0], encoding.ids[0]
                return

    def is_twice(self, text: str, ids: Sequence[int]) -> bool:
        """Return whether the text's tokens begin with the begin-of-sequence token twice, the second time because the
        text begins with its name."""
        return text.startswith(self._name) and list(ids[:2]) == [self._id, self._id]


def _check_unicode(text: str) -> None:
    try:
        str.encode(text)
    except (UnicodeEncodeError, TypeError) as error:
        raise InvalidRequestError(f"the prompt is not valid Unicode text: {error}", param="prompt") from error


def _loaded(path: Path) -> LoadedTokenizer:
    if path.is_dir():
        return read_folder(path)
    with GgufFile(path) as file:
        return read_gguf_tokenizer(file)


@contextmanager
def _panics_explained(path: Path) -> Iterator[None]:
    """Convert a panic of the tokenizers library, which is no Exception, to a ModelLoadError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ModelLoadError(f"the tokenizer of {path} makes the tokenizers library fail: {error!s:.200}") from error
