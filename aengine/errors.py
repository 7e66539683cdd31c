"""Errors that aengine raises on purpose, by whose fault they are.

    AEngineError
    ├── RequestError                the caller's request; every other request goes on
    │   ├── InvalidRequestError     a parameter, prompt or setting is wrong (also a ValueError); .param
    │   ├── ContextLengthError      prompt longer than the model's context; .num_prompt_tokens, .max_model_len
    │   ├── GrammarError            a structured-output constraint can't be used; .kind, .path
    │   ├── EngineOverloadedError   the queue is full; .retry_after (seconds)
    │   │   └── QuotaExceededError  the tenant has had what its quota allows; .quota
    │   └── DeadlineExceededError   a deadline of the request passed; .deadline (seconds)
    └── EngineError                 the engine; not the caller's doing
        ├── ModelLoadError          the model can't be found, read or fitted
        ├── WorkerDiedError         a worker process died; .rank, .exit_code, .worker_traceback
        ├── WorkerCallError         a method that collective_rpc has called failed; .rank, .worker_traceback
        ├── EngineClosedError       the engine is not running: not started, or closed
        └── InternalError           a bug in aengine; .worker_traceback when it happened in a worker

Raised from a stream, or from `generate` and `chat`, each has ``.completion``: what had come of the request before.

``except RequestError`` is what a web handler answers with 4xx, ``except EngineError`` with 5xx.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .outputs import Completion

__all__ = [
    "AEngineError",
    "ContextLengthError",
    "DeadlineExceededError",
    "EngineClosedError",
    "EngineError",
    "EngineOverloadedError",
    "GrammarError",
    "InternalError",
    "InvalidRequestError",
    "ModelLoadError",
    "NotEnoughMemoryError",
    "QuotaExceededError",
    "RequestError",
    "WorkerCallError",
    "WorkerDiedError",
]


class AEngineError(Exception):
    """The root: catches everything that aengine raises on purpose.

    ``completion`` is what had come of a request that this error cut short, its finish reason ``ERROR``; None if the
    request had not begun. A chat's has its message so far.
    """

    completion: Completion | None = None


class RequestError(AEngineError):
    """This request can't be served; the engine and every other request are unharmed."""


class InvalidRequestError(RequestError, ValueError):
    """A parameter, prompt or setting has a wrong type, name or value.

    ``param`` is its name as the caller wrote it, or None when no single one is at fault.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt leaves no room for a single generated token in the model's context; or a text is too long to get a
    vector or a score.

    ``num_prompt_tokens`` is a lower bound where the message says "at least": a text that can hardly fit is not encoded,
    and counts as one token for each 32 characters.
    """

    def __init__(
        self,
        num_prompt_tokens: int,
        max_model_len: int,
        *,
        at_least: bool = False,
        generates: bool = True,
        what: str = "",
    ) -> None:
        """``generates``: it is the prompt of a completion, no text that gets a vector or a score; ``what``: what has
        so many tokens, if it is neither."""
        if what:
            message = f"{what} have {num_prompt_tokens} tokens, but this model takes {max_model_len} at once"
        elif generates:
            message = (
                f"the prompt has {'at least ' if at_least else ''}{num_prompt_tokens} tokens, but prompt and "
                f"completion together may have {max_model_len} (max_model_len): shorten the prompt, or start the "
                "engine with a larger max_model_len"
            )
        else:
            message = (
                f"a text has {'at least ' if at_least else ''}{num_prompt_tokens} tokens, but this model takes "
                f"{max_model_len} at once: shorten it, or have its end cut off by truncate=True "
                "(embed, classify, score, rerank)"
            )
        super().__init__(message)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


class GrammarError(RequestError):
    """A structured-output constraint can't be used.

    ``kind`` says why; ``path`` is the JSON path of the keyword at fault ("" when it is the whole); ``tool`` the name of
    the tool whose parameters they are (None: the answer's own shape).
    """

    def __init__(
        self,
        message: str,
        *,
        kind: Literal["invalid", "unsupported", "unsatisfiable", "too_complex"],
        path: str = "",
        tool: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.path = path
        self.tool = tool


class EngineOverloadedError(RequestError):
    """The engine's queue is full. ``retry_after`` is a guess, in seconds, of when it is worth another try."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaExceededError(EngineOverloadedError):
    """The request's tenant has had what its quota allows for now; others are served. ``quota`` is the one, a field of
    `Tenant`."""

    def __init__(self, message: str, *, retry_after: float, quota: str) -> None:
        super().__init__(message, retry_after=retry_after)
        self.quota = quota


class DeadlineExceededError(RequestError):
    """The request's deadline passed before it was done, or its first_token_deadline before it had a token; or nobody
    read its stream for the engine's unread_timeout.

    ``deadline`` is the one that passed, as it was given, in seconds; the message says which it is.
    """

    def __init__(self, message: str, *, deadline: float) -> None:
        super().__init__(message)
        self.deadline = deadline


class EngineError(AEngineError):
    """The engine failed; the request was not at fault."""


class ModelLoadError(EngineError):
    """The model can't be found, read, or fitted into memory; the message says what was tried and what helps."""


class NotEnoughMemoryError(ModelLoadError):
    """The model, its KV cache or its largest batch doesn't fit into the memory that is free now."""


class WorkerDiedError(EngineError):
    """A worker process died.

    ``rank`` is the worker's; ``exit_code`` as in subprocess (negative: the signal's number), None if unknown;
    ``worker_traceback`` is the last traceback that it could still report, "" if none; ``is_of_request``: it has died of
    this request again and again, and would once more.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = 0,
        exit_code: int | None = None,
        worker_traceback: str = "",
        is_of_request: bool = False,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.worker_traceback = worker_traceback
        self.is_of_request = is_of_request


class WorkerCallError(EngineError):
    """A method called by `AsyncLLM.collective_rpc` raised in a worker, returned what can't be sent, or took too long.

    ``rank`` is the worker's among those of its replica, the first one's if there are several; ``worker_traceback`` is
    where it was raised, "" if it took too long.
    """

    def __init__(self, message: str, *, rank: int = 0, worker_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.worker_traceback = worker_traceback


class WeightsLostError(EngineError):
    """A weight update ended early, or a worker died, and the weights from before it came as tensors, which are kept
    nowhere: the engine stays paused until all have been sent again."""


class EngineClosedError(EngineError):
    """The engine is not running: it was not started yet, or it has been closed."""

    public: str | None = None
    """What a server's clients read of it, who don't see the text itself. None: that the engine is not running."""


class InternalError(EngineError):
    """A bug in aengine. ``worker_traceback`` is where it happened, when that was in a worker process."""

    def __init__(self, message: str, *, worker_traceback: str = "") -> None:
        super().__init__(message)
        self.worker_traceback = worker_traceback
