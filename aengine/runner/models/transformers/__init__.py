"""Any decoder of transformers: its own modelling code, over our paged KV, rows and sampler.

config.json ── library.py ──> transformers' config and class
                   │
                   ├─ survey.py: run once over meta tensors ──> heads, sizes and window of each attention layer
                   │              config.py: `TransformersConfig`, what the runner needs to know of any model
                   ├─ weights.py: names in the checkpoint ──> parameters, by transformers' conversion mapping
                   ├─ model.py: `TransformersModel`; its attention layers call ours (attention.py)
                   └─ fused.py: decoder layers whose code is known (forms.py), replaced by ours once they are loaded
"""

from __future__ import annotations

from .config import TransformersConfig, read_transformers_config
from .model import TransformersModel

__all__ = ["TransformersConfig", "TransformersModel", "read_transformers_config"]
