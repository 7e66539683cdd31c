"""Texts that get vectors or scores: encoded many at a time, alone or in pairs, and cut if that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import ContextLengthError, InvalidRequestError
from ...limits.checks import check_num_characters, most_characters
from ...limits.values import is_unicode

if TYPE_CHECKING:
    import tokenizers

    from .tokenizer import Tokenizer


class EncodedText(NamedTuple):
    """The tokens of a text, or of a pair of texts."""

    token_ids: list[int]
    num_first_tokens: int = 0  # tokens of a pair's first text, for models that mark the second; 0: there is one text


def encode_texts(
    tokenizer: Tokenizer, inputs: Sequence[str | tuple[str, str]], most: int, *, truncate: bool
) -> list[EncodedText]:
    """Return the tokens of each text, special ones included, and of each pair, as the model was trained to tell them
    apart; ``truncate``: of a pair that is too long the longer text is cut. Blocking, without the GIL.

    Raises:
        ContextLengthError: one has more than ``most`` tokens, and ``truncate`` is False.
        InvalidRequestError: one is not valid Unicode, or has no tokens.
    """
    encoder = tokenizer.encoder
    inputs = [_bounded(given, most, truncate) for given in inputs]
    try:
        encodings = encoder.encode_batch_fast(list(inputs))
    except (UnicodeEncodeError, TypeError) as error:
        texts = ((given,) if isinstance(given, str) else given for given in inputs)
        wrong = next((i for i, pair in enumerate(texts) if not all(map(is_unicode, pair))), None)
        if wrong is None:
            raise
        raise InvalidRequestError(
            f"inputs[{wrong}] is not valid Unicode: it has a lone surrogate", param="inputs"
        ) from error
    found = []
    for given, encoding in zip(inputs, encodings, strict=True):
        ids, types = _ids_and_types(tokenizer, given, encoding)
        if len(ids) > most:
            if not truncate:
                raise ContextLengthError(len(ids), most, generates=False)
            ids, types = _ids_and_types(tokenizer, given, _cut(encoder, given, most))
        if not ids:
            raise InvalidRequestError("a text has no tokens", param="inputs")
        found.append(EncodedText(ids, types.index(1) if 1 in types else 0))
    return found


def _ids_and_types(
    tokenizer: Tokenizer, given: str | tuple[str, str], encoding: tokenizers.Encoding
) -> tuple[list[int], list[int]]:
    first = given if isinstance(given, str) else given[0]
    ids, types = encoding.ids, encoding.type_ids
    return (ids[1:], types[1:]) if tokenizer.begin.is_twice(first, ids) else (ids, types)


def _bounded(given: str | tuple[str, str], most: int, truncate: bool) -> Any:
    """Return the texts, cut where no token could be kept. Raises ContextLengthError for one that could not fit."""
    texts = [given] if isinstance(given, str) else given
    if truncate:
        end = most_characters(most)
        texts = [text[:end] for text in texts]
        return texts[0] if isinstance(given, str) else tuple(texts)
    for text in texts:
        check_num_characters(len(text), most, generates=False)
    return given


def _cut(encoder: tokenizers.Tokenizer, given: str | tuple[str, str], most: int) -> tokenizers.Encoding:
    """Return the text's tokens without its end, but with the special tokens that belong there."""
    texts = [given] if isinstance(given, str) else list(given)
    parts = encoder.encode_batch_fast(texts, add_special_tokens=False)
    room = max(0, most - encoder.num_special_tokens_to_add(len(parts) == 2))
    *shorter, longer = sorted(parts, key=len)
    for part in shorter:  # the shorter text of a pair keeps up to half of the room
        part.truncate(min(len(part), room // 2))
        room -= len(part)
    longer.truncate(room)
    return encoder.post_process(parts[0], parts[1] if len(parts) == 2 else None)


class YesNoPrompt:
    """The question of Qwen3-Reranker (Zhang et al. 2025, arXiv:2506.05176), which it answers with yes or no.

    Raises InvalidRequestError if these are no tokens of the model.
    """

    _SYSTEM = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".'
    )
    _INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

    def __init__(self, tokenizer: Tokenizer, instruction: str | None) -> None:
        self._tokenizer = tokenizer
        self._instruction = instruction or self._INSTRUCTION
        answers = [tokenizer.token_id(word) for word in ("yes", "no")]
        if None in answers:
            message = "the model's vocabulary has no tokens 'yes' and 'no', by which a decoder scores: use a reranker"
            raise InvalidRequestError(message)
        self.answers = tuple(token_id for token_id in answers if token_id is not None)
        """The ids of yes and no."""
        self._begin = tokenizer.encode(f"<|im_start|>system\n{self._SYSTEM}<|im_end|>\n<|im_start|>user\n", False)
        self._end = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", False)

    def encode(self, pairs: Sequence[tuple[str, str]], most: int, *, truncate: bool) -> list[EncodedText]:
        """Return the token ids of the question for each pair of query and document, in which names of special tokens
        stay text. Raises the errors of `encode_texts`."""
        room = most - len(self._begin) - len(self._end)
        found = []
        for query, document in pairs:
            query, document = _bounded((query, document), most, truncate)
            body = f"<Instruct>: {self._instruction}\n<Query>: {query}\n<Document>: {document}"
            ids = self._tokenizer.encode_plain(body, False)
            if len(ids) > room:
                if not truncate:
                    raise ContextLengthError(len(self._begin) + len(ids) + len(self._end), most, generates=False)
                ids = ids[: max(0, room)]
            found.append(EncodedText([*self._begin, *ids, *self._end]))
        return found
