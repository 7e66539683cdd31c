"""What a request's sampling parameters become in its message, where they are no number: a feature's columns, by its
name; and from where on it gets results beside tokens.

The features that read them are in runner/sampling/features/.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from ..errors import InvalidRequestError
from ..ipc.messages import ARGUMENTS_OF, NO_RESULTS, Extras, float32, int32
from ..limits.arguments import fault_in
from ..limits.bounds import MAX_BAD_WORD_TOKENS, MAX_PROMPT_LOGPROBS
from ..limits.values import shown
from ..params import SamplingParams
from .tokenizer.tokenizer import Tokenizer


def extras_of(params: SamplingParams, bad_words: Sequence[Sequence[int]] = ()) -> Extras:
    """Return the extras of a request with these parameters, which are checked. ``bad_words``: as `encode_bad_words`
    returns them."""
    extras: Extras = {}
    if params.logit_bias:
        bias = params.logit_bias
        extras["logit_bias"] = [int32(bias.keys()).tobytes(), float32(bias.values()).tobytes()]
    if params.allowed_token_ids is not None:
        extras["allowed_token_ids"] = [int32(params.allowed_token_ids).tobytes()]
    if bad_words:
        extras["bad_words"] = [int32(map(len, bad_words)).tobytes(), int32(chain.from_iterable(bad_words)).tobytes()]
    for name, arguments in params.extra_args.items():
        extras[ARGUMENTS_OF + name] = [json.dumps(arguments).encode()]
    if params.prompt_logprobs is not None:
        extras |= prompt_logprobs_extra(params.prompt_logprobs, samples=params.max_tokens != 0)
    return extras


def check_extra_args(params: SamplingParams, processors: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise InvalidRequestError for arguments that no processor takes. ``processors``: their schemas, by name."""
    for name, arguments in params.extra_args.items():
        if name not in processors:
            known = f"there are {', '.join(processors)}" if processors else "it was started without logits_processors"
            message = f"extra_args names {shown(name)}, which no logits processor of this engine is called: {known}"
            raise InvalidRequestError(message, param="extra_args")
        if fault := fault_in(arguments, processors[name], name):
            raise InvalidRequestError(f"extra_args: {fault}", param="extra_args")


def results_from(params: SamplingParams) -> int:
    """Return from which token of its prompt on such a request gets results beside tokens, see `NewRequest`."""
    return NO_RESULTS if params.prompt_logprobs is None else 0


def check_num_results(params: SamplingParams, num_tokens: int) -> None:
    """Raise InvalidRequestError for more results than a prompt of so many tokens may get."""
    num_asked = params.prompt_logprobs
    if num_asked is not None and num_tokens * (1 + num_asked) > MAX_PROMPT_LOGPROBS:
        most = f"of at most {MAX_PROMPT_LOGPROBS} tokens in all, {1 + num_asked} for each of the prompt's {num_tokens}"
        raise InvalidRequestError(
            f"prompt_logprobs={num_asked} is too many: log-probabilities are given {most}", param="prompt_logprobs"
        )


def prompt_logprobs_extra(num_asked: int, *, samples: bool) -> Extras:
    """Return the extra of a request for its prompt's log-probabilities. ``samples``: it gets tokens as well."""
    return {"prompt_logprobs": [int32((num_asked, not samples)).tobytes()]}


def encode_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Return the sequences of tokens that ``bad_words`` bans: of each word alone, and of it after a blank if that only
    makes its first token another one. Blocking: call it off the loop.

    Raises InvalidRequestError for a word of too many tokens, or of none.
    """
    sequences = []
    for word in words:
        alone, inside = (tokenizer.encode(blank + word.lstrip(), add_special_tokens=False) for blank in ("", " "))
        if not 0 < len(alone) <= MAX_BAD_WORD_TOKENS:
            how_many = f"has {len(alone)} tokens: 1 to {MAX_BAD_WORD_TOKENS} are possible"
            raise InvalidRequestError(f"bad_words: {shown(word)} {how_many}", param="bad_words")
        sequences.append(alone)
        if len(inside) == len(alone) and inside[0] != alone[0]:
            sequences.append(inside)
    return sequences
