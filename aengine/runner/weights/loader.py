"""Weights into a model: from safetensors, from GGUF, or random.

A model names the tensors it wants (`DecoderModel.slots`). Each source is an iterator of tensors under transformers'
names, read or dequantised in threads, a few ahead, and handed over one by one. So no second copy of the model is ever
in memory: what is there at most is the model and once more the largest matrix that is joined from several (q, k, v;
gate, up). Parts that wait for the others of their matrix, wherever those are, are no more than the matrix will be,
since on a GPU all are in the model's own format when they get there.
"""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...checkpoint.gguf_file import GgufFile
from ...checkpoint.source import ModelSource
from ...errors import ModelLoadError
from ..models.decoder import DecoderModel
from ..platforms.platform import DeviceMemory
from .slot import Slot

__all__ = ["LoadedWeights", "load_weights"]

logger = logging.getLogger("aengine.runner")

Progress = Callable[[str, int, int, str], None]
CPU = torch.device("cpu")
T = TypeVar("T")

# A checkpoint may hold these, and no model here needs them.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|rope_freqs|\.masked_bias$|attn_rot_embd")


class LoadedWeights:
    """What was loaded: ``num_parameters``, and ``num_bytes`` in the checkpoint's format; ``last`` names a tensor."""

    def __init__(self) -> None:
        self.num_parameters = 0
        self.num_bytes = 0
        self.last = ""


class Source(NamedTuple):
    """Tensors of a checkpoint, ``total`` bytes of them."""

    tensors: Iterator[Named]
    total: int


class Named(NamedTuple):
    name: str
    tensor: Tensor | None  # where the model is; None: not wanted, and not read
    num_bytes: int = 0  # in the checkpoint's format


class Place(NamedTuple):
    """Where tensors go, and as what."""

    wanted: frozenset[str]
    device: torch.device
    dtype: torch.dtype  # on a GPU; layers on a CPU have formats of their own, and get what the checkpoint has

    def put(self, tensor: Tensor) -> Tensor:
        """Converted before it is copied: fewer bytes to copy, and no room on the device but its own."""
        return tensor if self.device.type == "cpu" else tensor.to(self.dtype).to(self.device)


def load_weights(
    model: DecoderModel,
    source: ModelSource,
    seed: int,
    progress: Progress,
    device: torch.device = CPU,
    memory: Callable[[], DeviceMemory] | None = None,
) -> LoadedWeights:
    """Fill the model. ``progress(stage, done, total, unit)`` is told bytes; ``memory()`` is the device's, for errors.

    Raises:
        ModelLoadError: a file is missing, truncated or corrupt; a tensor is missing, has another shape or is stored in
            codes; the GPU's memory does not hold the model.
    """
    slots = {slot.name: slot for slot in model.slots()}
    place = Place(frozenset(slots), device, model.format.dtype)
    if source.format == "dummy":
        tensors, total = _dummy(slots, seed, place)
    elif source.format == "gguf":
        tensors, total = _gguf(source, model, place)
    else:
        tensors, total = _safetensors(Path(source.path), place)
    loaded = LoadedWeights()
    unexpected: list[str] = []
    tied = "lm_head.weight" if model.config.tie_word_embeddings else ""

    def to_place() -> Iterator[Callable[[], None]]:
        for name, tensor, num_bytes in tensors:
            slot = slots.pop(name, None)
            if slot is not None and tensor is not None:
                _check_shape(slot, tensor, source)
                loaded.num_parameters += tensor.numel()
                loaded.num_bytes += num_bytes
                loaded.last = name
                yield partial(slot.set, tensor)
            elif name != tied and not _IGNORED.search(name):
                unexpected.append(name)
            del tensor  # else it waits here until the next one has come

    progress("weights", 0, total, "bytes")
    with _out_of_memory(loaded, total, place, memory):
        for _ in _placing(to_place(), place):
            progress("weights", min(loaded.num_bytes, total), total, "bytes")
    progress("weights", total, total, "bytes")
    if slots:
        raise ModelLoadError(f"{source.path} lacks {len(slots)} tensors of the model: {_some(sorted(slots))}")
    if unexpected:
        logger.warning(
            "%s has %d tensors that the model does not use: %s", source.path, len(unexpected), _some(unexpected)
        )
    return loaded


@contextmanager
def _out_of_memory(
    loaded: LoadedWeights, total: int, place: Place, memory: Callable[[], DeviceMemory] | None
) -> Iterator[None]:
    """Running out of GPU memory within is an error that says how far the weights came and what helps."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        whole = ""
        if memory is not None:
            now = memory()
            whole = f"; the GPU has {_gib(now.total)}, of which this process holds {_gib(now.allocated)} and "
            whole += f"{_gib(now.free)} is free"
        smaller = "dtype='bfloat16' or 'float16', " if place.dtype == torch.float32 else ""
        raise ModelLoadError(
            f"the weights do not fit into the memory of {place.device}: it ran out at {loaded.last or 'the first'}, "
            f"{_gib(loaded.num_bytes)} of {_gib(total)}{whole}: use {smaller}a smaller model or a larger GPU, or end "
            f"other processes on this one"
        ) from error


def _check_shape(slot: Slot, tensor: Tensor, source: ModelSource) -> None:
    if tuple(tensor.shape) != slot.shape:
        raise ModelLoadError(
            f"{source.path}: {slot.name} has the shape {list(tensor.shape)}, but by the config it is {list(slot.shape)}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def _placing(jobs: Iterable[Callable[[], None]], place: Place) -> Iterator[None]:
    """Do the jobs. On a CPU weights are packed, which takes most of a start: 26 ns each, in one thread."""
    if place.device.type == "cpu":
        yield from _in_threads(jobs, max(1, torch.get_num_threads()))
    else:
        yield from (job() for job in jobs)


def _in_threads(jobs: Iterable[Callable[[], T]], num_threads: int) -> Iterator[T]:
    """What the jobs return, in their order; no more than one a thread is ahead of who takes it."""
    # Not pool.map: it takes all jobs at once, and a model larger than memory would be read into it.
    ahead: deque[Future[T]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as pool:
        for job in jobs:
            ahead.append(pool.submit(job))
            if len(ahead) > num_threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


# -- safetensors

_READERS = 8
"""Threads that read files. One copies 2 to 4 GB/s out of the page cache to a GPU; from a disk the more are better."""
_NUMBERS = frozenset({"F16", "BF16", "F32"})
"""Formats whose elements are the weights themselves; others are codes, which mean nothing without their scales."""


def _safetensors(folder: Path, place: Place) -> Source:
    files = _shards(folder)
    return Source(_read_safetensors(files, place), sum(path.stat().st_size for path in files))


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"{index} can't be read: {error!r}") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelLoadError(f"{index} names {_some(missing)}, which are not in {folder}")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{folder} has no .safetensors file")
    return files


def _read_safetensors(files: list[Path], place: Place) -> Iterator[Named]:
    """A tensor of each file by turns, so that several files are read at once."""
    from safetensors import safe_open

    with ExitStack() as stack:
        jobs: list[list[Callable[[], Named]]] = []
        for path in files:
            with _corrupt(path):
                file = stack.enter_context(safe_open(path, framework="pt"))
                jobs.append([partial(_read_tensor, path, file, name, place) for name in file.keys()])  # noqa: SIM118
        by_turns = chain.from_iterable(zip_longest(*jobs))
        yield from _in_threads((job for job in by_turns if job is not None), _READERS)


def _read_tensor(path: Path, file: Any, name: str, place: Place) -> Named:
    if name not in place.wanted:
        return Named(name, None)
    with _corrupt(path):
        stored_as = file.get_slice(name).get_dtype()
    if stored_as not in _NUMBERS:
        raise ModelLoadError(
            f"{path}: {name} is stored as {stored_as}, the codes of a quantised checkpoint, and of those aengine reads "
            f"GGUF only: give the checkpoint in 16 or 32 bits that it was made from, or a .gguf file of the model"
        )
    with _corrupt(path):
        tensor = file.get_tensor(name)  # a view of the mapped file: nothing is read yet
    return Named(name, place.put(tensor), tensor.nbytes)


@contextmanager
def _corrupt(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is truncated or corrupt: {error}; fetch it again") from error


# -- GGUF


_GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(name: str) -> str:
    """transformers' name of a GGUF tensor; names that have none are returned as they are."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{_GGUF_LAYER[part]}.{kind}" if part in _GGUF_LAYER else name
    return f"{_GGUF_TOP[stem]}.{kind}" if stem in _GGUF_TOP else name


def _gguf(source: ModelSource, model: DecoderModel, place: Place) -> Source:
    file = GgufFile(source.path)
    total = sum(4 * torch.Size(tensor.shape).numel() for tensor in file.tensors.values())
    return Source(_read_gguf(file, model, place), total)


def _read_gguf(file: GgufFile, model: DecoderModel, place: Place) -> Iterator[Named]:
    """Dequantised to float32 on the CPU (numpy lets the GIL go)."""
    config = model.config
    interleaved = config.model_type in ("llama", "mistral")

    def read(name: str) -> Named:
        hf_name = _hf_name(name)
        if hf_name not in place.wanted:
            return Named(hf_name, None)
        tensor = _dequantise(file, name)
        if interleaved and ".self_attn.q_proj." in hf_name:
            tensor = _separate_halves(tensor, config.num_heads)
        elif interleaved and ".self_attn.k_proj." in hf_name:
            tensor = _separate_halves(tensor, config.num_kv_heads)
        return Named(hf_name, place.put(tensor), tensor.nbytes)

    return _in_threads((partial(read, name) for name in file.tensors), max(1, torch.get_num_threads()))


def _dequantise(file: GgufFile, name: str) -> Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    tensor = file.tensors[name]
    try:
        data = dequantize(file.tensor_data(name), GGMLQuantizationType(tensor.type_code))
    except (NotImplementedError, KeyError, ValueError) as error:
        raise ModelLoadError(
            f"{file.path}: tensor {name} is quantised as {tensor.type.name}, which the gguf package can't read: {error}"
        ) from error
    if not data.flags.writeable:  # float32 already: a view of the file
        data = data.copy()
    return torch.from_numpy(data.reshape(tensor.shape))


def _separate_halves(tensor: Tensor, num_heads: int) -> Tensor:
    """llama.cpp interleaves the two elements of each rotary pair; here the first halves of a head come first."""
    rows = tensor.shape[0]
    pairs = tensor.view(num_heads, rows // num_heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(tensor.shape)


# -- random

_DUMMY_CHUNK = 2**26
"""Numbers made at once on a GPU: 256 MiB of float32, for weights of any format."""


def _dummy(slots: dict[str, Slot], seed: int, place: Place) -> Source:
    """Norm weights near one, the rest small: activations keep their size through any number of layers."""
    make = _random if place.device.type == "cpu" else _random_on_gpu
    generator = torch.Generator(place.device).manual_seed(seed)
    num_bytes = 4 if place.device.type == "cpu" else place.dtype.itemsize
    sizes = [(slot, num_bytes * torch.Size(slot.shape).numel()) for slot in slots.values()]
    tensors = (Named(slot.name, make(slot, generator, place), size) for slot, size in sizes)
    return Source(tensors, sum(size for _, size in sizes))


def _random(slot: Slot, generator: torch.Generator, place: Place) -> Tensor:
    tensor = torch.empty(slot.shape).uniform_(-0.04, 0.04, generator=generator)
    return tensor.add_(1.0) if "norm" in slot.name else tensor


def _random_on_gpu(slot: Slot, generator: torch.Generator, place: Place) -> Tensor:
    """The same numbers in every format, up to rounding."""
    tensor = torch.empty(slot.shape, dtype=place.dtype, device=place.device)
    middle = 1.0 if "norm" in slot.name else 0.0
    for chunk in tensor.view(-1).split(_DUMMY_CHUNK):
        numbers = torch.empty(chunk.shape, device=place.device)
        chunk.copy_(numbers.uniform_(middle - 0.04, middle + 0.04, generator=generator))
    return tensor
