"""What can be seen wrong with a call before anything is done for it."""

from __future__ import annotations

from ..errors import InvalidRequestError
from ..params import SamplingParams, is_unicode, shown
from .user_request import Limits

__all__ = ["MAX_DEADLINE", "check_call"]

MAX_DEADLINE = 1e8
"""Seconds; three years, which every event loop's timers can hold."""


def check_call(
    limits: Limits,
    has_tokenizer: bool,
    kind: str,
    params: SamplingParams,
    deadline: float | None,
    first_token_deadline: float | None,
    priority: int,
    request_id: str | None,
    cache_salt: str | None,
) -> None:
    """Raises InvalidRequestError for options and parameters that this engine can't take. ``kind``: of the prompt."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be SamplingParams, not {type(params).__name__}", param="params")
    for name, limit in (("deadline", deadline), ("first_token_deadline", first_token_deadline)):
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit <= MAX_DEADLINE
        ):
            raise InvalidRequestError(
                f"{name} must be a number of seconds above 0 and at most {MAX_DEADLINE:g}", param=name
            )
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequestError(f"priority={shown(priority)} is not valid: an integer", param="priority")
    for name, value in (("request_id", request_id), ("cache_salt", cache_salt)):
        if value is not None and (not isinstance(value, str) or not value or not is_unicode(value)):
            raise InvalidRequestError(f"{name}={shown(value)} is not valid: a non-empty string", param=name)
    if not has_tokenizer and (kind != "token_ids" or params.stop):
        what = "stop strings need" if kind == "token_ids" else f"a prompt of {kind} needs"
        raise InvalidRequestError(
            f"{what} a tokenizer, and the engine was started with skip_tokenizer=True", param="prompt"
        )
    vocab_size = limits.vocab_size
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token_id in ids:
            if token_id >= vocab_size:
                raise InvalidRequestError(
                    f"{name} names token {token_id}, but this model has {vocab_size} tokens", param=name
                )
