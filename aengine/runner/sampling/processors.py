"""`LogitsProcessor`: a sampling feature in a file of somebody else's, which the setting ``logits_processors`` names.

SamplingParams.extra_args ── the host compares it with `arguments` ──> prepare() ──> process(), in every step
                                                                       once a row    for all rows at once
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ...errors import InvalidRequestError, ModelLoadError
from ...ipc.messages import ARGUMENTS_OF, NewRequest
from ...limits.arguments import check_schema
from ...limits.registry import PROCESSORS, registered, target_of
from ..input_batch import Rows
from ..request_state import RequestState, Scalars
from ..speculation.positions import SpecDecode
from ..transfer import to_device
from .features.feature import OpByOpFeature

logger = logging.getLogger("aengine")
_MOST_BYTES = 1 << 20  # bytes that `prepare` may return


@dataclass(frozen=True, slots=True)
class ProcessedRows:
    """The m rows of logits of the requests that use a processor: of a request one, or one for each of the positions at
    which guesses are verified. All tensors are on the device."""

    places: Tensor  # int64 [m]: which rows of the logits
    states: list[Tensor]  # [m]: what `LogitsProcessor.prepare` returned for the request of each
    token_ids: Tensor  # int32 [m, longest]: prompt and completion, of which the first ``num_tokens`` count
    num_tokens: Tensor  # int32 [m]: tokens before the one that is to be sampled
    num_prompt_tokens: Tensor  # int32 [m]: tokens of these that are the prompt's


class LogitsProcessor(OpByOpFeature):
    """Changes the logits of requests that name it in their ``extra_args``; after penalties, before the grammar's mask,
    temperature and cutoffs. The logits of a row must follow from its tokens and arguments alone: after a worker's death
    and a preemption the row is computed anew, and each rank does the same.

    Its rows are sampled op by op. A subclass with ``is_in_graphs = True`` has the verbs of `SamplingFeature` instead of
    these, over memory that it allocates in `reserve`; graphs hold what its `apply` queues.
    """

    name = ""
    """What ``extra_args`` calls it: an identifier."""
    arguments: ClassVar[Mapping[str, Any]] = {"type": "object"}
    """The JSON schema of its arguments (aengine/limits/arguments.py)."""
    changes_argmax = True
    """Whether the likeliest token may be another after it. If not, greedy requests are not given to it."""

    def __init_subclass__(cls) -> None:
        cls.extra = ARGUMENTS_OF + cls.name

    def __init__(self, requests: RequestState, vocab_size: int) -> None:
        super().__init__(requests, vocab_size)
        self._faults: dict[int, str] = {}

    def prepare(self, arguments: Any) -> Any:
        """Return what `process` needs of a request with these arguments, as a numpy array of booleans, integers or
        floats, of at most 1 MiB. Raises InvalidRequestError, which is the request's; so is whatever else goes wrong."""
        return np.zeros(0)

    def process(self, logits: Tensor, rows: ProcessedRows) -> None:
        """Change ``rows.places`` of the logits, float32 [n, vocab_size], in place. What it raises fails the requests of
        these rows."""
        raise NotImplementedError

    def arguments_of(self, request: NewRequest) -> Any:
        """Return the request's arguments, which have it in their extras."""
        return json.loads(request.extras[self.extra][0])

    def add_request(self, request: NewRequest) -> None:
        super().add_request(request)
        if not self.changes_argmax and (request.temperature == 0 or request.top_k == 1):
            self.remove_request(request.req_idx)

    def read(self, columns: list[bytes]) -> Any:
        try:
            state = np.asarray(self.prepare(json.loads(columns[0])))
            if state.dtype.kind not in "biuf" or state.nbytes > _MOST_BYTES or state.ndim > 8:
                raise ValueError(
                    f"{state.ndim} dimensions of {state.dtype}, {state.nbytes} bytes, are no state of a row"
                )
            return torch.from_numpy(state.astype(state.dtype.newbyteorder("="), order="C")).numpy()  # torch takes it
        except InvalidRequestError:
            raise
        except BaseException as error:  # nothing but the processor raises here: the host's interrupts don't come
            logger.exception("logits processor %s: a request is refused", self.name)
            raise InvalidRequestError(f"extra_args: {self.name} can't take its arguments: {error!r:.200}") from None

    def apply(self, logits: Tensor, rows: Rows, rows_device: Tensor, scalars: Scalars, spec_decode: SpecDecode) -> None:
        places = np.flatnonzero(self.uses[rows])
        own = rows[places]
        place = to_device(places, logits.device)
        longest = int(self._requests.num_tokens[own].max()) + len(rows) - len(np.unique(rows))  # with all guesses
        processed = ProcessedRows(
            place,
            [self._of_row[row] for row in own.tolist()],
            self._requests.token_ids[:, :longest].index_select(0, rows_device.index_select(0, place)),
            scalars.num_tokens.index_select(0, place),
            scalars.num_prompt_tokens.index_select(0, place),
        )
        try:
            self.process(logits.view(logits.shape), processed)  # one that it resizes is its own view
        except torch.OutOfMemoryError:
            raise
        except (
            BaseException
        ) as error:  # the logits of its rows are lost, and so their requests; those of others are not
            logger.exception("logits processor %s: the requests that use it fail", self.name)
            logits.index_fill_(0, place, torch.nan)
            self._faults |= dict.fromkeys(own.tolist(), f"logits processor {self.name}: {error!r:.200}")
            self.uses[own] = False  # in the steps that are on their way it is not asked again

    def take_faults(self) -> dict[int, str]:
        faults, self._faults = self._faults, {}
        return faults


def make_processor(processor: type[LogitsProcessor], requests: RequestState, vocab_size: int) -> LogitsProcessor:
    """Return the object of a class that the setting names. Raises ModelLoadError."""
    try:
        made = processor(requests, vocab_size)
        if not hasattr(made, "uses"):
            raise TypeError("its __init__ has to call super().__init__(requests, vocab_size)")
    except (Exception, SystemExit) as error:  # whatever its __init__ may raise
        raise ModelLoadError(f"logits_processors: {processor.name} can't be made: {error!r:.300}") from error
    return made


def load_processors(names: Sequence[str]) -> tuple[type[LogitsProcessor], ...]:
    """Import the classes that the setting names. Raises ModelLoadError."""
    found = tuple(map(_class_of, names))
    twice = {one.name for one in found if sum(one.name == other.name for other in found) > 1}
    if twice:
        raise ModelLoadError(f"logits_processors: several are called {', '.join(sorted(twice))}: name each once")
    return found


def _class_of(name: str) -> type[LogitsProcessor]:
    target = name if ":" in name else target_of(PROCESSORS, name)
    if target is None:
        known = ", ".join(map(repr, registered(PROCESSORS)))
        raise ModelLoadError(f"logits_processors={name!r}: this worker finds no such processor; there are {known}")
    try:
        processor = resolve_name(target)
        if not issubclass(processor, LogitsProcessor):
            raise TypeError("it is no subclass of LogitsProcessor")
        if not processor.name.isidentifier():
            raise ValueError("its name is no identifier")
        check_schema(processor.arguments)
    except (Exception, SystemExit) as error:  # whatever an import may raise
        raise ModelLoadError(f"logits_processors: {name!r} can't be used: {error!r:.300}") from error
    return processor
