"""Readers of model files, without torch: what a model is called, where it lies, and what its files say.

Both halves import this room: the host resolves a name and reads the tokenizer, the worker reads the weights.
Importing it is light; numpy, gguf and huggingface_hub are imported when they are first needed.
"""

from __future__ import annotations

from .gguf_file import GgufFile, GgufTensor
from .source import ModelSource, resolve_model

__all__ = ["GgufFile", "GgufTensor", "ModelSource", "resolve_model"]
