"""aengine for the client engine_bench.py, which measures any engine with the same prompts. In this folder:

python engine_bench.py --engine aengine_adapter:Adapter --shape qwen3-0.6b --tasks single,prefill,burst,offline
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator
from typing import Any

T0 = float(os.environ.get("BENCH_T0", time.time()))


class Adapter:
    async def start(self, model_dir: str, args: Any) -> None:
        import aengine

        self.import_seconds = time.time() - T0
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": "bfloat16",
            "skip_tokenizer": not args.tokenizer,
            "max_num_seqs": 1024,  # vLLM's default with this much memory
        }
        if args.tokenizer:
            settings["tokenizer"] = args.tokenizer
        for item in args.set:
            key, value = item.split("=", 1)
            try:
                settings[key] = json.loads(value)
            except ValueError:
                settings[key] = value
        self._params, self._structured = aengine.SamplingParams, aengine.StructuredOutput
        self._engine = aengine.AsyncLLM(model_dir, **settings)
        await self._engine.start()
        self.ready_seconds = time.time() - T0

    def describe(self) -> dict[str, Any]:
        import aengine

        return {
            "engine": "aengine",
            "version": aengine.__version__,
            "t_import_s": self.import_seconds,
            "t_ready_s": self.ready_seconds,
            **self._engine.describe(),
        }

    async def stream(self, prompt: list[int], p: dict[str, Any], request_id: str) -> AsyncIterator[int]:
        schema = p.get("json_schema")
        params = self._params(
            max_tokens=p["max_tokens"],
            temperature=p["temperature"],
            ignore_eos=p["ignore_eos"],
            detokenize=p.get("detokenize", False),
            structured_output=None if schema is None else self._structured(json_schema=schema),
        )
        if p.get("final_only"):
            yield len((await self._engine.generate(prompt, params, request_id=request_id)).token_ids)
            return
        async for _ in self._engine.stream(prompt, params, request_id=request_id):
            yield 1

    async def stop(self) -> None:
        await self._engine.aclose()
