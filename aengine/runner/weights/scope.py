"""Tensors that a model's layers request of its checkpoint: by name, each with its destinations.

A model is built over a `WeightScope`, a view of the checkpoint's names below a prefix. Each layer that has weights says
there what it wants; the loader then finds all the places, in the order in which the model was built, and fills them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import ModelLoadError
from ..distributed.experts_group import ExpertsGroup
from ..distributed.group import ALONE, TensorGroup
from ..distributed.shares import Part, Share, VocabularyShare
from ..distributed.stage import WHOLE, PipelineStage
from .formats import WeightFormats
from .invariant import invariant_format
from .quantised.matrices import UNQUANTISED
from .weight import Drawn, Fault, NotMultiplied, StoredTensor, WeightFormat

_MOST_TENSORS = 1 << 19  # models of a trillion parameters have 70,000


class Place(NamedTuple):
    """Destination of a tensor of the checkpoint.

    A floating ``dtype`` of 16 or 32 bits means numbers: the checkpoint may hold them in any such format, and they come
    in ``dtype``, but on a CPU in the checkpoint's. Any other means codes, which are stored so and come as they are.
    """

    name: str  # name in the checkpoint, in transformers' spelling
    shape: tuple[int, ...]  # shape in the checkpoint
    dtype: torch.dtype
    num_parameters: int  # parameters of the model that the tensor stands for
    put: Callable[[Tensor], None]  # takes the tensor, on the model's device; from any thread
    part: Part | None = None  # the part of the tensor that `put` takes; None: all
    room: Callable[[], Tensor] | None = None  # gives the memory that it is copied to; None: it gets its own
    on_host: bool = False  # `put` takes it where it was read, and copies it to the device itself
    kept: torch.dtype | None = None  # dtype in which `put` keeps its parameters, if that is another one
    drawn: Drawn | None = None  # see `StoredTensor`
    fault: Fault | None = None

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of what `put` takes."""
        return self.shape if self.part is None else self.part.shape_in(self.shape)

    @property
    def kept_bytes(self) -> int:
        """Memory of what `put` keeps."""
        own = prod(self.own_shape)
        if self.kept is None:
            return own * self.dtype.itemsize
        return own * self.num_parameters // max(1, prod(self.shape)) * self.kept.itemsize

    def take(self, tensor: Tensor, device: torch.device) -> Tensor:
        """What `put` takes, of a ``tensor`` as it was read: on the model's device, in the dtype of the place.

        Converted before it is copied: fewer bytes to copy, and no room on the device but its own.
        """
        if self.room is not None:
            return self.room().copy_(tensor)
        if self.on_host or device.type == "cpu":
            return tensor
        return tensor.to(self.dtype).to(device)


class CheckpointNames(Protocol):
    """A model's rules by which it requests tensors of those in a checkpoint, where that depends on their names."""

    def choose(self, stored: Mapping[str, tuple[int, ...]] | None) -> None:
        """Request the tensors that the model wants of ``stored``: names and shapes of all that the checkpoint has;
        None: it has what the model asks for."""

    def finish(self, device: torch.device) -> None:
        """Called when all tensors have come: move whatever else the model has to ``device``. Raises ModelLoadError."""


class Gathering(NamedTuple):
    """What becomes a weight when several tensors have come, while some of a load have not."""

    names: Sequence[str]  # the checkpoint's names of all of them
    num_come: Callable[[], int]  # returns how many have come, if not all have
    forget: Callable[[], None]  # forgets those that have come: the next load begins anew

    @property
    def is_under_way(self) -> bool:
        """Whether some have come, and not all."""
        return self.num_come() > 0


class WeightScope:
    """The names below a prefix. All scopes of a model share ``places``, by name; a tied table has two; and
    ``gatherings``.

    ``group``: the ranks among which the layers are divided, each of which has a model of its own; with
    ``divides_experts`` each has some experts of a mixture, else a part of every one. ``stage``: whose layers the model
    has. ``experts_group``: the ranks among which experts are divided, if these are more than those of ``group``.
    """

    def __init__(
        self,
        formats: WeightFormats,
        prefix: str = "",
        places: dict[str, list[Place]] | None = None,
        group: TensorGroup = ALONE,
        divides_experts: bool = False,
        stage: PipelineStage = WHOLE,
        experts_group: ExpertsGroup | None = None,
        gatherings: list[Gathering] | None = None,
    ) -> None:
        self.formats = formats
        self.group = group
        self.stage = stage
        self.experts_group = experts_group
        self._divides_experts = divides_experts
        self.names: CheckpointNames | None = None  # names in the checkpoint; set on the model's outermost scope
        self.places: dict[str, list[Place]] = {} if places is None else places
        self.gatherings: list[Gathering] = [] if gatherings is None else gatherings
        self._prefix = prefix

    def at(self, name: str) -> WeightScope:
        """Return the scope of the names below ``name``."""
        prefix = f"{self._prefix}{name}."
        shared = self.places, self.group, self._divides_experts, self.stage, self.experts_group, self.gatherings
        return WeightScope(self.formats, prefix, *shared)

    def name_of(self, name: str) -> str:
        """Return the whole name of what is below this scope."""
        return self._prefix + name

    def share(self, size: int, copies: int = 1) -> Share:
        """This rank's ``size`` elements of a dimension that is divided among the ranks; each piece is on ``copies`` of
        them."""
        return Share(size, self.group.rank // copies, self.group.size // copies)

    def experts(self, num_experts: int) -> Share:
        """Return this rank's share of a mixture's experts: all of them, unless they are what is divided."""
        if not self._divides_experts:
            return Share(num_experts)
        group = self.experts_group or self.group
        return Share(num_experts // group.size, group.rank, group.size)

    def share_of_expert(self, size: int) -> Share:
        """This rank's ``size`` inner features of an expert: all of them, if it is the experts that are divided."""
        return Share(size) if self._divides_experts else self.share(size)

    def vocabulary(self, vocab_size: int) -> VocabularyShare:
        """Return this rank's share of a vocabulary."""
        return VocabularyShare.of(vocab_size, self.group.rank, self.group.size)

    def format_of(self, name: str) -> WeightFormat:
        """The format of the matrix of this name. The table of embeddings is plain, also where it is the output matrix
        alone, as on a pipeline's last stage, unless rows can be taken of a weight."""
        full = self.name_of(name)
        form = self.formats.plain
        if self.gives_rows or not full.endswith("embed_tokens"):
            form = self.formats.of(full)
        formats = self.formats
        if not formats.policy.batch_invariant or formats.is_compiled:
            return form
        return invariant_format(form, full, formats.policy, formats.device)

    @property
    def gives_rows(self) -> bool:
        """Whether weights give rows of their matrices (`Weight.rows`): a table of embeddings is a weight then."""
        formats = self.formats
        return formats.is_compiled and self.group.size == 1

    def tensors_of(
        self, name: str, form: WeightFormat, out_features: int, in_features: int, has_bias: bool
    ) -> list[StoredTensor]:
        """Return the tensors of the matrix of this name. Raises ModelLoadError: its format has none of this shape."""
        try:
            return form.tensors(out_features, in_features, has_bias)
        except ValueError as error:
            cure = "" if isinstance(error, NotMultiplied) else f"; {UNQUANTISED}"
            where = f"{self.formats.folder}: " if self.formats.folder else ""
            raise ModelLoadError(f"{where}{self._prefix}{name} in {form.name}: {error}{cure}") from error

    def want(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        put: Callable[[Tensor], None],
        num_parameters: int | None = None,
        part: Part | None = None,
        room: Callable[[], Tensor] | None = None,
        on_host: bool = False,
        kept: torch.dtype | None = None,
        drawn: Drawn | None = None,
        fault: Fault | None = None,
    ) -> None:
        """Request the tensor ``name``, which the loader passes to ``put``: all of it, or that ``part``; see `Place`.
        ``num_parameters``: None: its elements."""
        if len(self.places) >= _MOST_TENSORS:
            raise ModelLoadError(f"config.json: its layers and experts have more than {_MOST_TENSORS} tensors")
        count = prod(shape) if num_parameters is None else num_parameters
        place = Place(self._prefix + name, shape, dtype, count, put, part, room, on_host, kept, drawn, fault)
        self.places.setdefault(place.name, []).append(place)
