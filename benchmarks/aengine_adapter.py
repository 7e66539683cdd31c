"""aengine for the clients engine_bench.py and traffic.py, which measure any engine. In this folder:

python engine_bench.py --engine aengine_adapter:Adapter --shape qwen3-0.6b --tasks single,prefill,burst,offline
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aengine import AsyncLLM

T0 = float(os.environ.get("BENCH_T0", time.time()))


class Adapter:
    OWN_THREAD = ("own_thread=true",)
    """Settings with which the engine has an event loop of its own."""

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
        self._engine = self._make(model_dir, settings)
        await self._engine.start()
        self.ready_seconds = time.time() - T0

    def _make(self, model_dir: str, settings: dict[str, Any]) -> AsyncLLM:
        import aengine

        return aengine.AsyncLLM(model_dir, **settings)

    def describe(self) -> dict[str, Any]:
        import aengine

        return {
            "engine": "aengine",
            "version": aengine.__version__,
            "t_import_s": self.import_seconds,
            "t_ready_s": self.ready_seconds,
            **self._engine.describe(),
        }

    async def settle(self) -> float:
        """Wait until all of the host's memory for tiers is in use. Returns the seconds from the start on."""
        core = self._engine._handle.core  # type: ignore[union-attr]
        assert core is not None
        begun = time.perf_counter()
        while any(replica.scheduler.rows.elsewhere.unusable for replica in core.replicas):  # type: ignore[attr-defined]
            await asyncio.sleep(0.05)
        return time.perf_counter() - begun

    def statistics(self) -> dict[str, int]:
        """Counters that only grow."""
        now = self._engine.statistics()
        names = ("prefix_cache_queries", "prefix_cache_hits", "num_steps", "num_preemptions", "num_restarts")
        tiers = {
            "pages_saved": sum(tier.num_saved for tier in now.kv_tiers),
            "pages_fetched": sum(tier.num_fetched for tier in now.kv_tiers),
        }
        return {name: getattr(now, name) for name in names} | tiers

    async def stream(self, prompt: list[int], p: dict[str, Any], request_id: str) -> AsyncIterator[int]:
        """Numbers of new tokens."""
        if p.get("final_only"):
            completion = await self._engine.generate(prompt, self._sampling(p), request_id=request_id)
            yield len(completion.token_ids)
            return
        async for _ in self._engine.stream(prompt, self._sampling(p), request_id=request_id):
            yield 1

    async def stream_ids(self, prompt: list[int], p: dict[str, Any], request_id: str) -> AsyncIterator[list[int]]:
        """The ids of new tokens."""
        options = {"request_id": request_id, **(p.get("options") or {})}
        async for token in self._engine.stream(prompt, self._sampling(p), **options):
            yield [token.token_id]

    def _sampling(self, p: dict[str, Any]) -> Any:
        schema = p.get("json_schema")
        return self._params(
            max_tokens=p["max_tokens"],
            temperature=p["temperature"],
            ignore_eos=p["ignore_eos"],
            detokenize=p.get("detokenize", False),
            structured_output=None if schema is None else self._structured(json_schema=schema),
            **(p.get("sampling") or {}),
        )

    async def stop(self) -> None:
        await self._engine.aclose()
