"""Keys and values in FP8: where their scales are from, what is refused, and what the predictions lose by them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import CPU, Driver, load, source_of
from safetensors.torch import load_file, save_file
from test_scenarios import DEEPSEEK_V3
from torch import Tensor

from aengine.checkpoint.source import ModelSource
from aengine.config import EngineConfig
from aengine.engine.tokenizer.tokenizer import Tokenizer
from aengine.errors import InvalidRequestError, ModelLoadError
from aengine.runner.attention.kv_format import KVFormat
from aengine.runner.models import read_config
from aengine.runner.models.causal_lm import CausalLM
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.startup.kv_scales import choose_kv_format, measured
from aengine.runner.startup.setup import RunnerSetup

TinyModel = Callable[..., Path]
SETTINGS = {"kv_cache_dtype": "fp8", "dtype": "float32", "max_num_batched_tokens": 512}
ROOT = Path(__file__).parents[2]


def setup_of(source: ModelSource, model: CausalLM, **settings: Any) -> RunnerSetup:
    config = EngineConfig.create(source.path, {**SETTINGS, **settings})
    platform = CpuPlatform()
    attention = platform.choose_attention(config, model.config, torch.float32)
    kept = choose_kv_format(config, model.config, torch.float32, source, 0)
    return RunnerSetup(config, model.config, model, platform, attention, kept, 16, 512, 0, 1)


def scales_of(kept: KVFormat, model: CausalLM) -> dict[int, Tensor]:
    found = {i: kept.scales(i, model.config.num_kv_heads, CPU) for i in range(model.config.num_layers)}
    return {i: scales for i, scales in found.items() if scales is not None}


def logits_of(model: CausalLM, kept: KVFormat, ids: list[int], rng: random.Random) -> Tensor:
    """Of a text that is computed in chunks, and its last tokens one by one: all that is behind the first chunk reads
    keys and values out of the cache."""
    driver = Driver(model, rng, num_blocks=4 * (len(ids) // 16 + 1), block_size=16, kv_format=kept)
    cuts = [*range(0, len(ids) - 8, 64), *range(len(ids) - 8, len(ids) + 1)]
    return torch.cat([driver.step({"a": ids[a:b]})["a"] for a, b in zip(cuts, cuts[1:], strict=False)])


def perplexity(model: CausalLM, kept: KVFormat, texts: list[list[int]], rng: random.Random) -> float:
    losses = []
    for ids in texts:
        logits = logits_of(model, kept, ids, rng)
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none"))
    return float(torch.cat(losses).mean().exp())


def distance(logits: Tensor, wanted: Tensor) -> float:
    return float((logits - wanted).norm() / wanted.norm())


def real_texts(source: ModelSource, length: int) -> list[list[int]]:
    """Tokens of the README, the licence and two pages."""
    tokenizer = Tokenizer.load(source)
    files = ["README.md", "LICENSE", "docs/memory.md", "docs/internals/scheduling.md"]
    return [list(tokenizer.encode((ROOT / name).read_text()[: 8 * length]))[:length] for name in files]


def test_scales_are_measured_the_same_again(tiny_model: TinyModel) -> None:
    """A power of two for each head, from the largest that it keeps of the fixed tokens; the same in another process
    of the model, whatever the settings of its steps are."""
    for arch in ("qwen3", "mistral"):
        source = source_of(tiny_model(arch))
        model, _ = load(source)
        found = scales_of(measured(setup_of(source, model)).kv_format, model)
        assert len(found) == model.config.num_layers
        for scales in found.values():
            assert scales.shape == (2, model.config.num_kv_heads) and torch.equal(scales, scales.log2().round().exp2())
        again, _ = load(source)
        other = scales_of(measured(setup_of(source, again, max_num_seqs=7, swap_space_bytes=2**20)).kv_format, again)
        assert all(torch.equal(found[i], other[i]) for i in found)
        with torch.no_grad():
            kept = measured(setup_of(source, again)).kv_format
            driver = Driver(again, random.Random(0), num_blocks=40, block_size=16, kv_format=KVFormat(torch.float32))
            driver.step({"a": [i * 7919 % again.config.vocab_size for i in range(256)]})
            for i, layer in driver._cache.layers.items():
                if layer.window is None:
                    largest = layer.cache.abs().amax((0, 1, 4))
                    shares = largest / kept.scales(i, layer.cache.shape[3], CPU)  # type: ignore[operator]
                    assert bool(((shares > 111) & (shares <= 224.1)).all()), "twice as much has room"


def test_scales_of_what_has_none() -> None:
    """Zeros, infinite numbers and NaNs, as random weights may give, have the scale 1."""
    from aengine.runner.startup.kv_scales import _scale_of

    scales = _scale_of(torch.tensor([0.0, torch.inf, torch.nan, 224.0, 225.0, 112.5, 1e-30, 1e30]))
    assert scales[:6].tolist() == [1, 1, 1, 2, 2, 1]
    assert (scales[6:] > 0).all() and scales.isfinite().all()


def with_scales(folder: Path, scales: dict[str, Tensor], to: Path) -> ModelSource:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    name = next(to.glob("*.safetensors"))
    save_file({**load_file(name), **scales}, name, {"format": "pt"})
    return source_of(to)


def stored(num_layers: int, value: Callable[[int], Tensor], names: str = "self_attn.{}_scale") -> dict[str, Tensor]:
    return {
        f"model.layers.{i}.{names.format(which)}": value(2 * i + (which == "v")).clone()
        for i in range(num_layers)
        for which in "kv"
    }


@pytest.mark.parametrize("names", ["self_attn.{}_scale", "self_attn.{0}_proj.{0}_scale", "self_attn.attn.{}_scale"])
def test_scales_of_the_checkpoint(tiny_model: TinyModel, tmp_path: Path, names: str) -> None:
    """One a tensor, or one a head; each rank has those of its heads."""
    folder = tiny_model("llama")
    model, _ = load(source_of(folder))
    config, layers, heads = model.config, model.config.num_layers, model.config.num_kv_heads
    given = stored(layers, lambda i: torch.tensor([0.5 + i]), names)
    for other in ("mtp", "vision_tower.encoder", "model.visual"):  # modules that have layers of their own
        given[f"{other}.layers.0.self_attn.k_scale"] = torch.tensor(9.0)
    one = with_scales(folder, given, tmp_path / "one")
    loaded, _ = load(one)  # a model has no place for them, and does not mind
    setup = measured(setup_of(one, loaded))
    assert setup.kv_format.origin == "checkpoint"
    for i, scales in scales_of(setup.kv_format, loaded).items():
        assert torch.equal(scales, torch.tensor([[0.5 + 2 * i], [1.5 + 2 * i]]).expand(2, heads))
    many = with_scales(folder, stored(layers, lambda i: torch.arange(1.0, heads + 1) + i, names), tmp_path / "many")
    engine = EngineConfig.create(many.path, SETTINGS)
    for rank in range(heads):
        own = replace(config, num_kv_heads=1, num_ranks=heads)
        kept = choose_kv_format(engine, own, torch.float32, many, rank)
        assert torch.equal(kept.scales(1, 1, CPU), torch.tensor([[3.0 + rank], [4.0 + rank]]))  # type: ignore[arg-type]
    assert choose_kv_format(engine.replace(kv_cache_scales="one"), config, torch.float32, many, 0).origin == "one"
    assert not choose_kv_format(engine.replace(kv_cache_dtype="auto"), config, torch.float32, many, 0).origin


@pytest.mark.parametrize(
    "asked", [{"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, {"kv_cache_quant_algo": "FP8"}], ids=str
)
def test_a_checkpoint_that_is_made_for_fp8(
    tiny_model: TinyModel, caplog: pytest.LogCaptureFixture, asked: dict[str, Any]
) -> None:
    """It is kept in the dtype of the computation, unless the setting says otherwise; one line says so."""
    source = source_of(tiny_model("llama"))
    model, _ = load(source)
    with caplog.at_level("INFO", "aengine"):
        for config, dtype in (({}, "auto"), (asked, "fp8"), (asked, "bfloat16"), (asked, "auto")):
            assert not caplog.records
            made = replace(source, hf_config={**source.hf_config, "quantization_config": config})
            kept = setup_of(made, model, kv_cache_dtype=dtype).kv_format
    (record,) = caplog.records
    assert kept == KVFormat(torch.float32) and "kv_cache_dtype='fp8' keeps them so" in record.getMessage()


WRONG: dict[str, tuple[dict[str, Tensor], str]] = {
    "zero": ({"model.layers.1.self_attn.k_scale": torch.zeros(1)}, "layers.1.self_attn.k_scale has a scale that is no"),
    "negative": ({"model.layers.0.self_attn.v_scale": torch.tensor([-1.0])}, "v_scale has a scale that is no finite"),
    "nan": ({"model.layers.0.self_attn.v_scale": torch.tensor([torch.nan])}, "v_scale has a scale that is no finite"),
    "large": (
        {"model.layers.0.self_attn.v_scale": torch.tensor([1e30])},
        r"v_scale has a scale of 1e\+30 .* would be left: those from 6e-08 to 4096 are read",
    ),
    "small": ({"model.layers.0.self_attn.k_scale": torch.tensor([1e-12])}, "k_scale has a scale of 1e-12 to 1e-12"),
    "heads": ({"model.layers.0.self_attn.k_scale": torch.ones(7)}, "has 7 scales, and the layer 2 key-value heads"),
    "layer": ({"model.layers.9.self_attn.k_scale": torch.ones(1)}, "layer 9 keeps no keys and values of its own"),
    "twice": (
        {"model.layers.1.self_attn.k_proj.k_scale": torch.full((1,), 2.0)},
        r"k_scale is another scale than the one",
    ),
    "missing": ({"model.layers.0.self_attn.v_scale": torch.empty(0)}, "but no v_scale of layer 0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_scales_that_are_wrong(tiny_model: TinyModel, tmp_path: Path, what: str) -> None:
    folder = tiny_model("llama")
    model, _ = load(source_of(folder))
    changed, message = WRONG[what]
    given = {**stored(model.config.num_layers, lambda i: torch.ones(1)), **changed}
    source = with_scales(folder, {k: v for k, v in given.items() if len(v)}, tmp_path / "wrong")
    with pytest.raises(ModelLoadError, match=rf"{tmp_path}\S*: .*{message}") as error:
        setup_of(source, model)
    assert "kv_cache_scales='calibrated'" in str(error.value) and "kv_cache_dtype at 'auto'" in str(error.value)
    assert setup_of(source, model, kv_cache_scales="calibrated").kv_format.origin == "calibrated"


def test_latents_have_no_scales(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model("deepseek_v3", **DEEPSEEK_V3))
    config = EngineConfig.create(source.path, {"kv_cache_dtype": "fp8"})
    with pytest.raises(ModelLoadError, match="kv_cache_dtype='fp8': .*'deepseek_v3' are made of latents"):
        choose_kv_format(config, read_config(source.hf_config), torch.float32, source, 0)


def test_misspelt_settings() -> None:
    for name, value in (("kv_cache_dtype", "fp8_e5m2"), ("kv_cache_dtype", 8), ("kv_cache_scales", "1.0")):
        with pytest.raises(InvalidRequestError, match=f"{name}={value!r} is not valid: it must be one of 'auto'"):
            EngineConfig.create("m", {name: value})


@pytest.mark.parametrize("arch", ["llama", "mistral", "gpt_oss"])
def test_predictions_of_a_tiny_model(tiny_model: TinyModel, rng: random.Random, arch: str) -> None:
    """Logits are near those of 32 bits, and not the same; a chunk reads of the cache what a whole prompt has of itself.
    Each token has all experts: which of some it had would depend on the last bit of keys and values."""
    source = source_of(tiny_model(arch, **({"num_experts_per_tok": 5} if arch == "gpt_oss" else {})))
    model, _ = load(source)
    kept = measured(setup_of(source, model)).kv_format
    with torch.no_grad():
        ids = [rng.randrange(model.config.vocab_size) for _ in range(150)]
        whole, fp8 = (logits_of(model, how, ids, rng) for how in (KVFormat(torch.float32), kept))
        # Random weights: far more than a trained model's; some 0.12, and gpt_oss' 0.24.
        assert 0 < (off := distance(fp8, whole)) < (0.4 if arch == "gpt_oss" else 0.25)
        once = Driver(model, rng, num_blocks=64, block_size=16, kv_format=kept).step({"a": ids})["a"]
        driver = Driver(model, rng, num_blocks=64, block_size=16, kv_format=kept)
        parts = torch.cat([driver.step({"a": ids[:70]})["a"], driver.step({"a": ids[70:]})["a"]])
        # A number in the middle between two codes, but for rounding, is kept as either: in one text of some fifty.
        assert distance(parts, once) < off / 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.extended  # of the real model: test_predictions_of_a_tiny_model is what make test has of it
def test_perplexity_of_smollm2(rng: random.Random) -> None:
    """On real text, within 1% of what keys and values in 32 bits give."""
    source = source_of("smollm2-135m")
    model, _ = load(source)
    with torch.no_grad():
        texts = real_texts(source, 300)
        plain = perplexity(model, KVFormat(torch.float32), texts, rng)
        for scales in ("auto", "one"):
            kept = measured(setup_of(source, model, kv_cache_scales=scales)).kv_format
            fp8 = perplexity(model, kept, texts, rng)
            print(f"perplexity {plain:.4f}, of FP8 with scales {kept.origin} {fp8:.4f}")
            assert abs(fp8 / plain - 1) < 0.01
