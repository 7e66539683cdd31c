"""Weights from safetensors and from nothing; files that are damaged, incomplete or of another model."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import CPU, Driver, build, check_near, load, source_of
from safetensors.torch import load_file, save_file
from tiny import load_reference, make_tiny_model
from zoo import write_zoo_model

from aengine.config import EngineConfig
from aengine.errors import ModelLoadError
from aengine.runner.platforms.platform import DeviceMemory
from aengine.runner.startup.load import load_model
from aengine.runner.weights.scope import Place
from aengine.runner.weights.sources import loader, random_source, safetensors_source
from aengine.runner.weights.sources.loader import check_layers, load_weights
from aengine.runner.weights.sources.reading import Named, Target
from aengine.workers.rank import Rank

TinyModel = Callable[..., Path]
TOKENS = list(range(40, 60))


@pytest.fixture
def copied(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A llama's folder that the test may damage."""
    return Path(shutil.copytree(tiny_model("llama", seed=3), tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def logits(folder: Path, dtype: str = "float32") -> torch.Tensor:
    return Driver(load(source_of(folder), dtype)[0], random.Random(0)).step({"a": TOKENS})["a"]


def test_sharded(tiny_model: TinyModel) -> None:
    one, many = tiny_model("qwen3", seed=3), tiny_model("qwen3", seed=3, max_shard_size="30KB")
    assert len(list(many.glob("*.safetensors"))) > 3 and (many / "model.safetensors.index.json").is_file()
    assert torch.equal(logits(one), logits(many))


@pytest.mark.parametrize("prefixes", [("language_model.model.", "language_model."), ("model.language_model.", "")])
def test_the_text_model_of_a_model_for_images(copied: Path, prefixes: tuple[str, str]) -> None:
    """As models of two generations of transformers have its settings and tensors."""
    before = logits(copied)

    def wrap(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            below = name.removeprefix("model.")
            tensors[prefixes[0] + below if below != name else prefixes[1] + name] = tensors.pop(name)
        tensors["model.vision_tower.layers.0.weight"] = torch.ones(3)

    rewrite(copied, wrap)
    text = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text, "vision_config": {}}))
    assert torch.equal(logits(copied), before)


def test_bfloat16_checkpoint_runs_in_float32(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen2", seed=3, dtype="bfloat16")
    with torch.inference_mode():
        wanted = load_reference(folder, "qwen2")(torch.tensor([TOKENS]), use_cache=False).logits[0]
    check_near(logits(folder), wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_reported(tiny_model: TinyModel, tied: bool) -> None:
    source = source_of(tiny_model("llama", seed=3, tie_word_embeddings=tied))
    model = build(source)
    reports: list[tuple[str, int, int, str]] = []
    loaded = load_weights(model, source, 0, lambda *report: reports.append(report))
    assert loaded.num_parameters == make_tiny_model("llama", tie_word_embeddings=tied).num_parameters()
    assert loaded.num_bytes == 4 * loaded.num_parameters
    done = [report[1] for report in reports]
    assert done == sorted(done) and done[0] == 0 and done[-1] == reports[-1][2]
    assert {(stage, unit, total) for stage, _, total, unit in reports} == {("weights", "bytes", done[-1])}
    assert all(0 <= d <= done[-1] for d in done) and len(set(done)) > 10


def test_a_missing_tensor(copied: Path) -> None:
    rewrite(copied, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"lacks a tensor.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load(source_of(copied))


def test_a_mis_shaped_tensor(copied: Path) -> None:
    rewrite(copied, lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(ModelLoadError, match=r"norm\.weight has the shape \[47\], but by the config it is \[48\]"):
        load(source_of(copied))


def test_unexpected_tensors_are_reported(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = logits(copied)
    extra = {"model.vision.weight": torch.ones(3), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    rewrite(copied, lambda tensors: tensors.update(extra))
    with caplog.at_level(logging.WARNING, logger="aengine"):
        assert torch.equal(logits(copied), before)
    assert "model.vision.weight" in caplog.text and "inv_freq" not in caplog.text


def test_the_output_matrix_of_a_tied_model_is_not_used(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Some checkpoints hold it all the same; transformers goes by the config."""
    folder = Path(shutil.copytree(tiny_model("llama", seed=3, tie_word_embeddings=True), tmp_path / "model"))
    before = logits(folder)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(320, 48)}))
    assert torch.equal(logits(folder), before)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_truncated(copied: Path, kept: float) -> None:
    path = copied / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is truncated or corrupt: .*fetch it again"):
        load(source_of(copied))


def test_corrupt_headers(copied: Path, rng: random.Random) -> None:
    """Whatever is written over the header: a ModelLoadError, or weights that can be multiplied."""
    path = copied / "model.safetensors"
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    refused = 0
    for _ in range(40):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            load(source_of(copied))
        except ModelLoadError as error:
            assert str(path.parent) in str(error)
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 3}', "{}"])
def test_a_damaged_index(tiny_model: TinyModel, tmp_path: Path, text: str) -> None:
    folder = Path(shutil.copytree(tiny_model("qwen3", seed=3, max_shard_size="30KB"), tmp_path / "model"))
    source = source_of(folder)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match="index"):
        load(source)


def test_a_shard_that_vanished(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Between the host's look at the folder and the worker's."""
    folder = Path(shutil.copytree(tiny_model("qwen3", seed=3, max_shard_size="30KB"), tmp_path / "model"))
    source = source_of(folder)
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelLoadError, match=gone.name):
        load(source)


def test_dummy(copied: Path) -> None:
    """No weight files are read; the seed decides; activations neither vanish nor explode."""
    (copied / "model.safetensors").unlink()
    source = source_of(copied, "dummy")
    outcomes = []
    for seed in (1, 1, 2):
        model, loaded = load(source, seed=seed)
        outcomes.append(Driver(model, random.Random(0)).step({"a": TOKENS})["a"])
    assert torch.equal(outcomes[0], outcomes[1]) and not torch.equal(outcomes[0], outcomes[2])
    assert outcomes[0].isfinite().all() and 1e-3 < float(outcomes[0].std()) < 100
    assert loaded.num_parameters == make_tiny_model("llama").num_parameters()


META = torch.device("meta")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_another_device_gets_tensors_in_the_models_format(tiny_model: TinyModel, dtype: str) -> None:
    """So that parts of a matrix that wait for the others take no more room than it will. (meta: needs no GPU.)"""
    source = source_of(tiny_model("qwen3", seed=3, max_shard_size="30KB", tie_word_embeddings=True))
    model = build(source, dtype, META)
    seen: list[torch.Tensor] = []
    for own in model.weights.places.values():
        own.append(own[0]._replace(put=seen.append))
    loaded = load_weights(model, source, 0, lambda *report: None)
    assert len(seen) == len(model.weights.places)
    assert {(t.device, t.dtype) for t in seen} == {(META, getattr(torch, dtype))}
    assert loaded.num_bytes == 4 * loaded.num_parameters, "of the checkpoint, which is float32"
    assert model.lm_head.weight.weight is model.embed.table, "a tied table is there once"


def tensors_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors, as the sources read them from now on."""
    read: list[tuple[str, torch.Tensor]] = []
    named = Target.named

    def noted(self: Target, name: str, tensor: torch.Tensor, *, keep: bool) -> Named:
        read.append((name, tensor))
        return named(self, name, tensor, keep=keep)

    monkeypatch.setattr(Target, "named", noted)
    return read


def test_what_is_not_wanted_is_not_read(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(copied, lambda tensors: tensors.update({"model.vision.weight": torch.ones(3)}))
    read = tensors_read(monkeypatch)
    load(source_of(copied))
    assert sorted(name for name, _ in read) == sorted(
        load_file(copied / "model.safetensors").keys() - {"model.vision.weight"}
    )


def test_few_tensors_are_read_ahead(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several files, by turns."""
    source = source_of(tiny_model("llama", seed=3, num_hidden_layers=12, max_shard_size="60KB"))
    model = build(source)
    monkeypatch.setattr(safetensors_source, "READERS", 3)
    read = tensors_read(monkeypatch)
    target = Target({name: own[0] for name, own in model.weights.places.items()}, CPU)
    tensors, total = safetensors_source.read_safetensors(Path(source.path), target)
    first = [next(tensors).name for _ in range(3)]
    assert len(read) <= 3 + 3 + 1
    files = [load_file(path).keys() for path in sorted(Path(source.path).glob("*.safetensors"))]
    assert len(files) > 3 and all(name in names for name, names in zip(first, files))
    names = first + [named.name for named in tensors]
    assert sorted(names) == sorted(target.places) and total > 4 * sum(t.numel() for _, t in read)


@pytest.mark.parametrize("name", ["a.weight", "a.norm.weight"])
def test_dummy_weights_of_a_gpu_are_alike_in_every_format(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made chunk by chunk. (Here on the CPU.)"""
    monkeypatch.setattr(random_source, "CHUNK", 100)
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        place = Place(name, (37, 11), dtype, 37 * 11, lambda tensor: None)
        made.append(random_source._on_gpu(place, torch.Generator().manual_seed(5), CPU))
    assert made[1].dtype == torch.bfloat16 and torch.equal(made[0].bfloat16(), made[1])
    middle = 1.0 if "norm" in name else 0.0
    assert float((made[0] - middle).abs().max()) <= 0.04 and 0.02 < float(made[0].std()) < 0.027
    assert len(set(made[0].flatten().tolist())) > 350


def test_out_of_gpu_memory(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(place: Place, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.shape == (48,):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot\nof memory")
        return tensor

    monkeypatch.setattr(Place, "take", take)
    memory = DeviceMemory(total=8 * 2**30, free=2**30, allocated=7 * 2**30, reserved=7 * 2**30)
    with pytest.raises(ModelLoadError) as caught:
        load(source_of(copied), memory=lambda: memory)
    text = str(caught.value)
    assert "\n" not in text and "8.00 GiB" in text and "1.00 GiB is free" in text and "dtype='bfloat16'" in text
    assert "ran out at" in text and "larger GPU" in text


def test_a_model_that_is_too_large_says_by_how_much_before_it_loads(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "named", lambda *args, **how: pytest.fail("a tensor was read"))
    size = sum(tensor.numel() * 4 for tensor in load_file(copied / "model.safetensors").values())
    for free, allocated, reserved in ((size - 2**20, 0, 0), (size - 2**21, 2**20, 2**21)):  # torch's own is free to it
        memory = DeviceMemory(2 * size, free, allocated, reserved)
        with pytest.raises(ModelLoadError, match=r"is too large by 0.00 GiB: its weights take .* float32.*'bfloat16'"):
            load(source_of(copied), memory=lambda: memory)
    monkeypatch.undo()
    load(source_of(copied), memory=lambda: DeviceMemory(size, size, 0, 0))


def test_tokenizer_of_the_tiny_models(tiny_model: TinyModel) -> None:
    """Other tests rely on it: any text can be encoded, and comes back."""
    from tokenizers import Tokenizer

    folder = tiny_model("llama", seed=3)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "Grüße, 世界\n\t!"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text and len(ids) == len(text.encode())
    special = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer.token_to_id(special["bos_token"]) == 256 and tokenizer.token_to_id(special["eos_token"]) == 257


def quantised(folder: Path, dtype: torch.dtype, most: float) -> None:
    """Write the projections as codes of ``dtype`` with a scale a row, as compressed checkpoints have them."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            scale = tensors[name].abs().amax(1, keepdim=True) / most
            tensors[name] = (tensors[name] / scale).to(dtype)
            tensors[f"{name}_scale"] = scale

    rewrite(folder, change)


def set_config(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize(
    ("key", "settings", "method"),
    [
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128]}, "fp8"),
        ("compression_config", {"format": "float-quantized"}, "float-quantized"),
        ("quantization_config", {"bits": 4}, "no quant_method"),
    ],
)
def test_a_quantised_checkpoint_is_refused(copied: Path, key: str, settings: dict[str, Any], method: str) -> None:
    quantised(copied, torch.float8_e4m3fn, 448)
    set_config(copied, **{key: settings})
    with pytest.raises(ModelLoadError, match=rf"{key} of config\.json: {method}\).*\.gguf file") as caught:
        load(source_of(copied))
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelLoadError, match=key):  # random weights would be of that format too
        load(source_of(copied, "dummy"))


@pytest.mark.parametrize(
    ("dtype", "most", "name"),
    [(torch.float8_e4m3fn, 448, "F8_E4M3"), (torch.int8, 127, "I8"), (torch.uint8, 127, "U8")],
)
def test_codes_are_not_taken_for_weights(copied: Path, dtype: torch.dtype, most: float, name: str) -> None:
    """Of a checkpoint whose config.json does not tell; codes that the model does not use do no harm."""
    before = logits(copied)
    rewrite(copied, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(3, dtype=dtype)}))
    set_config(copied, quantization_config=None)
    assert torch.equal(logits(copied), before)
    quantised(copied, dtype, most)
    with pytest.raises(ModelLoadError, match=rf"model\.layers\.\d\..*proj\.weight is stored as {name}.*\.gguf file"):
        load(source_of(copied))


def test_float64_is_a_number(copied: Path) -> None:
    wanted = logits(copied)
    rewrite(copied, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].double()}))
    assert torch.equal(logits(copied), wanted)


def test_a_bias_of_the_output_matrix_is_missed(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The logits lack it; only an encoder's belongs to a head that nobody asks for, as do heads that draft."""
    names = ("lm_head.bias", "model.mtp_layers.0.input_proj.weight", "mtp.fc.weight")
    rewrite(copied, lambda tensors: tensors.update({name: torch.ones(320) for name in names}))
    with caplog.at_level(logging.WARNING):
        load(source_of(copied))
    assert "has 1 tensors that the model does not use: lm_head.bias" in caplog.text


def test_quantised_weights_of_a_model_that_transformers_computes(tmp_path: Path) -> None:
    """The error does not say that config.json has no quantization_config."""
    write_zoo_model(tmp_path, "olmo")
    config = json.loads((tmp_path / "config.json").read_text())
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = EngineConfig.create(str(tmp_path), {"dtype": "float32", "num_threads": 1})
    with pytest.raises(ModelLoadError, match="int8, by .*quantization_config.*a model of 'olmo', which transformers"):
        load_model(settings, source_of(tmp_path).to_wire(), Rank(), lambda *progress: None)


@pytest.mark.parametrize("num_layers", [1, 4000])
def test_other_layers_than_config_json_says(copied: Path, num_layers: int) -> None:
    set_config(copied, num_hidden_layers=num_layers)
    settings = EngineConfig.create(str(copied), {"dtype": "float32", "num_threads": 1})
    with pytest.raises(ModelLoadError, match=f"by config.json there are {num_layers} layers, and the files have 3"):
        load_model(settings, source_of(copied).to_wire(), Rank(), lambda *progress: None)


def test_a_layer_that_predicts_later_tokens_is_none_of_the_stack(copied: Path) -> None:
    """It has the number behind the last one's, in DeepSeek-V3's manner; and towers have layers of their own."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
        tensors |= {name.replace(".2.", ".3.", 1): tensor.clone() for name, tensor in last.items()}
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(2)
        tensors["vision_tower.layers.7.mlp.up_proj.weight"] = torch.ones(2)

    rewrite(copied, add)
    check_layers(source_of(copied), 3)


def test_what_is_left_is_an_error_that_names_the_model(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.runner.startup.load.read_config", lambda *_, **__: {}["x"])
    settings = EngineConfig.create(str(copied), {"dtype": "float32", "num_threads": 1})
    with pytest.raises(ModelLoadError, match="model: config.json or a file beside it is damaged: KeyError: 'x'"):
        load_model(settings, source_of(copied).to_wire(), Rank(), lambda *progress: None)


def test_sizes_in_errors_have_no_bound() -> None:
    assert loader._gib(3 * 2**29) == "1.50 GiB"
    assert loader._gib(10**400) == "more than 2**30 GiB"  # which is no float
