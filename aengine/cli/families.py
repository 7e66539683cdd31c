"""The families of models that there are: plain data, for `aengine models` and, by scripts/families.py, docs/models.md.

The code of each is in runner/models/; its registry and this table are held equal by tests/models/test_families.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_SCENARIOS = "every scenario"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What may be known of a family without loading a model of it."""

    name: str
    """For readers, with the releases that it covers."""
    model_types: tuple[str, ...] = ()
    """``model_type`` in config.json, or in its ``text_config``; (): any other."""
    classes: tuple[str, ...] = ()
    """``architectures`` in config.json."""
    path: str = "native"
    """Whose code computes it: "native" or "transformers"."""
    task: str = "generate"
    """"generate" (and give embeddings), or "embed" of an encoder, which can't generate."""
    formats: tuple[str, ...] = ("safetensors", "quantised")
    """Formats of weights: "safetensors" (16 or 32 bits), "quantised" (codes of 4 and 8 bits in safetensors, by the
    ``quantization_config``), "mxfp4" (of experts), "gguf"."""
    gguf: tuple[str, ...] = ()
    """``general.architecture`` of its GGUF files."""
    tools: tuple[str, ...] = ()
    """Formats of tool calls that its releases were trained on (`chat.FORMATS`, "harmony")."""
    tested: tuple[str, ...] = (_SCENARIOS,)
    """What is compared with transformers."""

    @property
    def tool_calls(self) -> str:
        """The formats of tool calls in words."""
        if self.task == "embed":
            return "none"
        return ", ".join(self.tools) if self.tools else "json" if self.model_types else "by the template"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_GGUF = ("safetensors", "quantised", "gguf")
_PLAIN = ("safetensors",)
_PROCESSES = (_SCENARIOS, "worker processes")

FAMILIES = (
    Family(
        name="Llama 1, 2, 3; SmolLM2",
        model_types=("llama",),
        classes=("LlamaForCausalLM",),
        formats=_GGUF,
        gguf=("llama",),
        tools=("llama3", "llama_pythonic"),
        tested=(*_PROCESSES, "real weights (SmolLM2-135M)"),
    ),
    Family(
        name="Mistral, Mistral 3",
        model_types=("mistral",),
        classes=("MistralForCausalLM", "Mistral3ForConditionalGeneration"),
        formats=_GGUF,
        gguf=("llama", "mistral"),
        tools=("mistral", "mistral_tekken", "mistral_args"),
        tested=_PROCESSES,
    ),
    Family(
        name="Ministral 3",
        model_types=("ministral3",),
        classes=("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
        tools=("mistral_args",),
    ),
    Family(
        name="Mixtral",
        model_types=("mixtral",),
        classes=("MixtralForCausalLM",),
        tools=("mistral",),
    ),
    Family(
        name="Qwen 2, 2.5, QwQ, MiMo",
        model_types=("qwen2", "mimo"),
        classes=("Qwen2ForCausalLM",),
        formats=_GGUF,
        gguf=("qwen2",),
        tools=("hermes",),
        tested=_PROCESSES,
    ),
    Family(
        name="Qwen 3",
        model_types=("qwen3",),
        classes=("Qwen3ForCausalLM",),
        formats=_GGUF,
        gguf=("qwen3",),
        tools=("hermes",),
        tested=_PROCESSES,
    ),
    Family(
        name="Qwen 3 with experts, Qwen3-Coder",
        model_types=("qwen3_moe",),
        classes=("Qwen3MoeForCausalLM",),
        formats=_GGUF,
        gguf=("qwen3moe",),
        tools=("hermes", "qwen3_coder"),
        tested=_PROCESSES,
    ),
    Family(
        name="Qwen3-Next",
        model_types=("qwen3_next",),
        classes=("Qwen3NextForCausalLM",),
        tools=("hermes",),
    ),
    Family(
        name="Qwen 3.5, dense and with experts",
        model_types=("qwen3_5_text", "qwen3_5_moe_text"),
        classes=(
            "Qwen3_5ForCausalLM",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        tools=("qwen3_coder",),
    ),
    Family(
        name="gpt-oss",
        model_types=("gpt_oss",),
        classes=("GptOssForCausalLM",),
        formats=("safetensors", "mxfp4", "gguf"),
        gguf=("gpt-oss",),
        tools=("harmony",),
    ),
    Family(
        name="Gemma 1",
        model_types=("gemma",),
        classes=("GemmaForCausalLM",),
        formats=_GGUF,
        gguf=("gemma",),
    ),
    Family(
        name="Gemma 2",
        model_types=("gemma2",),
        classes=("Gemma2ForCausalLM",),
        formats=_GGUF,
        gguf=("gemma2",),
    ),
    Family(
        name="Gemma 3",
        model_types=("gemma3", "gemma3_text"),
        classes=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        formats=_GGUF,
        gguf=("gemma3",),
        tested=(_SCENARIOS, "real weights (Gemma 3 270M)"),
    ),
    Family(
        name="GLM-4-0414, GLM-Z1 (dense)",
        model_types=("glm4",),
        gguf=("glm4",),
        formats=_GGUF,
        classes=("Glm4ForCausalLM",),
    ),
    Family(
        name="DeepSeek-V2, V3, R1, V3.1; Kimi K2",
        model_types=("deepseek_v2", "deepseek_v3", "kimi_k2"),
        classes=("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"),
        tools=("deepseek_v3", "deepseek_v31", "kimi_k2"),
    ),
    Family(
        name="GLM-4.7-Flash",
        model_types=("glm4_moe_lite",),
        classes=("Glm4MoeLiteForCausalLM",),
        tools=("glm", "glm_inline"),
    ),
    Family(
        name="GLM-4.5, 4.6, 4.7",
        model_types=("glm4_moe",),
        classes=("Glm4MoeForCausalLM",),
        tools=("glm", "glm_inline"),
    ),
    Family(
        name="Phi-3, 3.5, 4",
        model_types=("phi3",),
        classes=("Phi3ForCausalLM",),
        formats=_GGUF,
        gguf=("phi3",),
        tools=("phi4",),
    ),
    Family(
        name="Granite 3, 4 (dense)",
        model_types=("granite",),
        classes=("GraniteForCausalLM",),
        formats=_GGUF,
        gguf=("granite",),
        tools=("granite", "hermes"),
    ),
    Family(
        name="SmolLM3",
        model_types=("smollm3",),
        classes=("SmolLM3ForCausalLM",),
        formats=_GGUF,
        gguf=("smollm3",),
        tools=("hermes",),
    ),
    Family(
        name="LFM2",
        model_types=("lfm2",),
        classes=("Lfm2ForCausalLM",),
        formats=_GGUF,
        gguf=("lfm2",),
        tools=("lfm2", "lfm2_json"),
    ),
    Family(
        name="OLMo 2, 3",
        model_types=("olmo2", "olmo3"),
        classes=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
        tools=("olmo3",),
    ),
    Family(
        name="EXAONE 4",
        model_types=("exaone4",),
        classes=("Exaone4ForCausalLM",),
    ),
    Family(
        name="Command R, R+, R7B, A; Aya",
        model_types=("cohere", "cohere2"),
        classes=("CohereForCausalLM", "Cohere2ForCausalLM"),
        tools=("cohere",),
    ),
    Family(
        name="Phi-1, 1.5, 2",
        model_types=("phi",),
        classes=("PhiForCausalLM",),
    ),
    Family(
        name="StarCoder2",
        model_types=("starcoder2",),
        classes=("Starcoder2ForCausalLM",),
    ),
    Family(
        name="StableLM",
        model_types=("stablelm",),
        classes=("StableLmForCausalLM",),
    ),
    Family(
        name="BERT, DistilBERT, RoBERTa, XLM-RoBERTa, MPNet, ModernBERT, nomic-embed-text",
        model_types=("bert", "distilbert", "roberta", "xlm-roberta", "mpnet", "modernbert", "nomic_bert"),
        task="embed",
        formats=("safetensors", "gguf"),
        gguf=("bert", "nomic-bert"),
        tested=("vectors and scores",),
    ),
    Family(
        name="EmbeddingGemma",
        model_types=("gemma3_text",),
        classes=("Gemma3TextModel",),
        task="embed",
        formats=_PLAIN,
        tested=("vectors",),
    ),
    Family(
        name="any other decoder of transformers",
        path="transformers",
        formats=_PLAIN,
        tested=("every scenario, for many classes", "logits of each model when it is loaded"),
    ),
)
