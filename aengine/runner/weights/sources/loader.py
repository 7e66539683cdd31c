"""Weights into a model: from safetensors, from GGUF, or random.

A model names the tensors that it wants (`WeightScope`). Each source is an iterator of tensors under transformers'
names, read or dequantised on the host in threads, a few ahead. Each is then copied to its place on the device: where a
matrix is joined from several (q, k, v; gate, up; all experts'), to its rows of that one, whose memory is allocated when
the first of them comes. So what is on the device at most is the weights, and one tensor where that is made there or
has to be transposed or decoded; and what is on the host beside them are the few tensors that are being read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from ....checkpoint.safetensors_files import stored_names, text_name
from ....checkpoint.source import ModelSource
from ....errors import ModelLoadError, NotEnoughMemoryError
from ...models.causal_lm import CausalLM
from ...models.encoders.encoder import Encoder
from ...platforms.platform import DeviceMemory
from ..formats import WeightFormats
from ..quantised.matrices import UNQUANTISED, of_first_expert
from ..scope import Place
from .gguf_source import gguf_shape, read_gguf
from .leftovers import other_form
from .random_source import make_random
from .reading import Named, Source, Target, in_threads
from .safetensors_source import READERS, read_safetensors, read_shapes

logger = logging.getLogger("aengine.runner")

Progress = Callable[[str, int, int, str], None]
"""Gets stage, done, total (0: not known) and their unit."""

IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|\.(input|activation|input_global|k|v|kv)_scale$|rope_(freqs|factors_)|\.masked_bias$|attn_rot_embd|\.weight_shape$|^lm_head\.weight$"
    r"|^score\.weight$|^t2d$|^(model\.)?mtp(_layers)?\."
)
"""Tensors of a checkpoint for which the model may have no place: constants, the output matrix of a tied model, the
head of a decoder that classifies texts, which is read apart, which tokens EAGLE-3 predicts, as d2t says too, and layers
that predict later tokens, which are read where they are asked for."""
_HEADS_OF_ENCODERS = re.compile(
    r"embeddings\.position_ids$|^(\w+\.)?pooler\.dense|^(cls|lm_head)\.|^(head|decoder)\."
    r"|^vocab_(transform|layer_norm|projector)\."
)
"""Those of an encoder that predict masked tokens."""

_NUMBER = re.compile(r"\.(\d{1,9})\.")
"""The number of a layer, in the name of a tensor."""
_LAYER = re.compile(r"(?:model\.)?layers\.(\d{1,9})\.(.+)")
_OTHER_MODEL = "config.json and the weights are not of one model, or a file is missing: fetch the model again"
_OTHER_METADATA = "the metadata and the tensors of the file are not of one model: get the file again"


class LoadedWeights:
    """The loaded weights: ``num_parameters``, and ``num_bytes`` in the checkpoint's format, both of the whole model,
    or of a pipeline stage; ``own_bytes``: of what this rank has of it; ``last`` names a tensor."""

    def __init__(self) -> None:
        self.num_parameters = 0
        self.num_bytes = 0
        self.own_bytes = 0
        self.last = ""


def load_weights(
    model: CausalLM | Encoder[Any],
    source: ModelSource,
    seed: int,
    progress: Progress,
    memory: Callable[[], DeviceMemory] | None = None,
    is_whole: bool = True,
) -> LoadedWeights:
    """Fill the model. ``progress(stage, done, total, unit)`` gets bytes; ``memory()`` is the device's, for errors;
    ``is_whole``: the checkpoint has nothing beside the model, so that whatever else is there is worth a warning.

    Raises:
        ModelLoadError: a file is missing, truncated or corrupt; a tensor is missing, has another shape or is not stored
            as its format needs it; the memory does not hold the model.
    """
    names = model.weights.names
    if names is not None:
        names.choose(stored_shapes(source))
    stage, device = model.weights.stage, model.weights.formats.device
    if memory is not None:
        _check_room(model, source, device, memory())
    name_in_file = model.gguf.name_in_file if source.format == "gguf" and model.gguf is not None else str
    target = Target(
        {name: first for name, (first, *_) in model.weights.places.items()}, device, name_in_file, source.path
    )
    tensors, total = _open(model, source, seed, target)
    loaded = LoadedWeights()
    unexpected: list[str] = []
    wanted = _wanted(model, source, tensors, name_in_file, unexpected)

    def to_put() -> Iterator[Callable[[], None]]:
        for own, named in wanted:
            assert named.tensor is not None
            loaded.own_bytes += named.tensor.nbytes
            # on another stage this is a tied table, which the first stage counts
            if stage.is_first or ".embed_tokens." not in named.name:
                loaded.num_parameters += own[0].num_parameters
            loaded.num_bytes += named.num_bytes
            loaded.last = named.name
            yield partial(target.put, own, named.tensor)
            del named  # this reference would keep the tensor until the next one has come

    progress("weights", 0, total, "bytes")
    with _out_of_memory(loaded, total, model, device, memory):
        for _ in _putting(to_put(), source, device):
            progress("weights", min(loaded.num_bytes, total), total, "bytes")
    progress("weights", total, total, "bytes")
    if names is not None:
        names.finish(device)
    unexpected = [name for name in unexpected if not _predicts_later(name, model.config.num_layers)]
    if unexpected and is_whole and stage.size == 1:  # others may be another stage's
        logger.warning(
            "%s has %d tensors that the model does not use: %s", source.path, len(unexpected), _some(unexpected)
        )
    return loaded


def check_tensors(model: CausalLM, source: ModelSource) -> None:
    """Raise ModelLoadError as `load_weights` for what the headers of safetensors files show."""
    if source.format == "safetensors":
        places = {name: first for name, (first, *_) in model.weights.places.items()}
        tensors, _ = read_safetensors(Path(source.path), Target(places, torch.device("meta"), has_numbers=False))
        for _ in _wanted(model, source, tensors, str, []):
            pass


def _wanted(
    model: CausalLM | Encoder[Any],
    source: ModelSource,
    tensors: Iterable[Named],
    name_in_file: Callable[[str], str],
    unexpected: list[str],
) -> Iterator[tuple[list[Place], Named]]:
    """Yield the tensors that the model wants, each with its places; the names of others are added to ``unexpected``.

    Raises ModelLoadError: a tensor has another shape; at the end: some are missing.
    """
    places, is_encoder = dict(model.weights.places), isinstance(model, Encoder)
    for named in tensors:
        own = places.pop(named.name, None)
        if own is not None and named.tensor is not None:
            _check_shape(own[0], named.shape, source, name_in_file(named.name), model.weights.formats)
            yield own, named
        elif (
            not named.is_idle
            and not IGNORED.search(named.name)
            and not (is_encoder and _HEADS_OF_ENCODERS.search(named.name))
        ):
            unexpected.append(named.name)
        del named  # see `load_weights`
    if places:
        count = f"{len(places)} tensors" if len(places) > 1 else "a tensor"
        other = next((name for name in unexpected if other_form(text_name(name), places)), None)
        why = "is of a quantised one, of which config.json has no quantization_config"
        if model.weights.formats.quantised is not None:
            why = "is in another format than by config.json, or than a layer's first expert, whose format all have"
        why = f"{other} {why}: {UNQUANTISED}"
        why = why if other else _OTHER_METADATA if source.format == "gguf" else _OTHER_MODEL
        missing = sorted({name_in_file(name) for name in places})
        raise ModelLoadError(f"{source.path} lacks {count} of the model: {_some(missing)}; {why}")
    for name in unexpected:
        if twin := other_form(text_name(name), model.weights.places):
            problem = f"has both {name} and {twin}, and which of them counts is not known: {UNQUANTISED}"
            raise ModelLoadError(f"{source.path} {problem}")


def _predicts_later(name: str, num_layers: int) -> bool:
    """Whether the tensor is of a layer behind the model's last one, see `check_layers`."""
    layer = _LAYER.match(name)
    return layer is not None and int(layer[1]) >= num_layers


def check_layers(source: ModelSource, num_layers: int) -> None:
    """Raise ModelLoadError if the files have fewer layers than config.json says, before as many are made, or more. (Of
    a GGUF it is checked as its metadata are read.) A layer that predicts a later token has tensors that others have
    not, and counts as none."""
    if source.format != "safetensors":
        return
    names = stored_names(Path(source.path))
    found = 1 + max((int(number[1]) for number in map(_NUMBER.search, names) if number is not None), default=-1)
    tensors: dict[int, set[str]] = {}
    for layer in filter(None, map(_LAYER.match, map(text_name, names))):
        tensors.setdefault(int(layer[1]), set()).add(layer[2])
    kinds = [own for number, own in tensors.items() if number < num_layers]
    if num_layers > found or any(own in kinds for number, own in tensors.items() if number >= num_layers):
        raise ModelLoadError(
            f"{source.path}: by config.json there are {num_layers} layers, and the files have {found}; {_OTHER_MODEL}"
        )


def tensor_names(source: ModelSource) -> frozenset[str] | None:
    """Return the names of the tensors in safetensors files, as transformers spells them; None: there are none. Raises
    ModelLoadError as `stored_names`."""
    if source.format != "safetensors":
        return None
    return frozenset(text_name(name) for name in stored_names(Path(source.path)))


def _open(model: CausalLM | Encoder[Any], source: ModelSource, seed: int, target: Target) -> Source:
    if source.format == "dummy":
        return make_random(target, seed)
    if source.format == "gguf":
        if isinstance(model, Encoder):
            if model.gguf is None:
                raise ModelLoadError(f"{source.path}: GGUF files of {model.config.model_type!r} are not read")
            return read_gguf(source.path, model.gguf, model.config.head_dim, target)
        head_dim = model.config.head_dim
        if model.gguf.interleaved and any(rope.rotary_dim != head_dim for rope in model.config.ropes):
            raise ModelLoadError(
                f"{source.path}: rope.dimension_count is less than the head's size, {head_dim}; where llama.cpp "
                f"reorders the rows of q and k, aengine needs heads that are rotated as a whole"
            )
        return read_gguf(source.path, model.gguf, head_dim, target)
    return read_safetensors(Path(source.path), target)


def stored_shapes(source: ModelSource) -> dict[str, tuple[int, ...]] | None:
    return read_shapes(Path(source.path)) if source.format == "safetensors" else None


def _putting(jobs: Iterable[Callable[[], None]], source: ModelSource, device: torch.device) -> Iterator[None]:
    """Run the jobs. On a CPU weights are packed, which takes most of a start: 26 ns each, in one thread. What is copied
    to a GPU out of mapped files is read only then. What is made there is put away before the next is made."""
    if device.type == "cpu":
        return in_threads(jobs, max(1, torch.get_num_threads()))
    if source.format == "safetensors":
        return in_threads(jobs, READERS)
    return _one_by_one(jobs)


def _one_by_one(jobs: Iterable[Callable[[], None]]) -> Iterator[None]:
    for job in jobs:
        job()
        del job  # frees the job's tensor before the next job is made
        yield


@contextmanager
def _out_of_memory(
    loaded: LoadedWeights,
    total: int,
    model: CausalLM | Encoder[Any],
    device: torch.device,
    memory: Callable[[], DeviceMemory] | None,
) -> Iterator[None]:
    """Make running out of GPU memory within an error that says how far the weights came and what helps."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        whole = ""
        if memory is not None:
            now = memory()
            whole = f"; the GPU has {_gib(now.total)}, of which this process holds {_gib(now.allocated)} and "
            whole += f"{_gib(now.free)} is free"
        smaller = "dtype='bfloat16' or 'float16', " if model.weights.formats.dtype == torch.float32 else ""
        raise NotEnoughMemoryError(
            f"the weights do not fit into the memory of {device}: it ran out at {loaded.last or 'the first'}, "
            f"{_gib(loaded.num_bytes)} of {_gib(total)}{whole}: use {smaller}a smaller model or a larger GPU, or end "
            f"other processes on this one"
        ) from error


def _check_room(
    model: CausalLM | Encoder[Any], source: ModelSource, device: torch.device, memory: DeviceMemory
) -> None:
    """Raise NotEnoughMemoryError if the weights are larger than what is free; nothing has been read of them yet."""
    needed = sum(first.kept_bytes for first, *_ in model.weights.places.values())
    room = memory.free + memory.reserved - memory.allocated
    if needed > room:
        dtype = model.weights.formats.dtype
        smaller = "dtype='bfloat16' or 'float16' for half of that, " if dtype == torch.float32 else ""
        where = "memory" if device.type == "cpu" else f"the memory of {device}"
        raise NotEnoughMemoryError(
            f"{source.path} is too large by {_gib(needed - room)}: its weights take {_gib(needed)} in "
            f"{str(dtype).removeprefix('torch.')}, and {_gib(room)} of {where} is free; use {smaller}a smaller model, "
            f"or end other processes"
        )


def _check_shape(place: Place, shape: tuple[int, ...], source: ModelSource, name: str, formats: WeightFormats) -> None:
    if shape == place.shape or (place.shape == () and prod(shape) == 1):  # a single number, in brackets or not
        return
    if source.format != "gguf":
        own, first = (formats.of(one.rpartition(".")[0]).name for one in (place.name, of_first_expert(place.name)))
        if own != first:
            raise ModelLoadError(
                f"{source.path}: {name} is in {own}, and the layer's first expert in {first}, whose format all have: "
                f"{UNQUANTISED}"
            )
        raise ModelLoadError(
            f"{source.path}: {name} has the shape {list(shape)}, but by the config it is {list(place.shape)}; "
            f"{_OTHER_MODEL}"
        )
    found, wanted = (gguf_shape(source.path, name, own, place.dtype == torch.uint8) for own in (shape, place.shape))
    raise ModelLoadError(
        f"{source.path}: {name} has the shape {found}, but by the metadata it is {wanted}; {_OTHER_METADATA}"
    )


def _some(names: list[str]) -> str:
    return ", ".join(f"{name:.200}" for name in names[:5]) + (", ..." if len(names) > 5 else "")


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count < 1 << 60 else "more than 2**30 GiB"
