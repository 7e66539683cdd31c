"""vLLM (0.26 or later, its public AsyncLLM) for traffic.py. It is not run in this repository's CI, which has no GPU.

python traffic.py --engine aengine_adapter:Adapter --engine vllm_adapter:Adapter --python /where/vllm/is/bin/python ...

Starting and settings are those of engine_bench.py's own adapter.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from engine_bench import VllmAsync


class Adapter(VllmAsync):
    def __init__(self) -> None:
        self._num_prompt_tokens = self._num_cached_tokens = 0

    async def stream_ids(self, prompt: list[int], p: dict[str, Any], request_id: str) -> AsyncIterator[list[int]]:
        """The ids of new tokens. ``p["lora"]``: the name, number and folder of an adapter."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        lora = LoRARequest(*p["lora"]) if "lora" in p else None

        params = SamplingParams(
            temperature=p["temperature"],
            max_tokens=p["max_tokens"],
            ignore_eos=p["ignore_eos"],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            **(p.get("sampling") or {}),
        )
        is_first = True
        async for output in self.llm.generate(
            TokensPrompt(prompt_token_ids=prompt), params, request_id, lora_request=lora
        ):
            if is_first:
                is_first = False
                self._num_prompt_tokens += len(prompt)
                self._num_cached_tokens += output.num_cached_tokens or 0
            yield list(output.outputs[0].token_ids)

    async def stream(self, prompt: list[int], p: dict[str, Any], request_id: str) -> AsyncIterator[int]:
        """Numbers of new tokens."""
        async for token_ids in self.stream_ids(prompt, p, request_id):
            yield len(token_ids)

    def statistics(self) -> dict[str, int]:
        """Counted from what requests report: AsyncLLM has no counters of its own to ask."""
        return {"prefix_cache_queries": self._num_prompt_tokens, "prefix_cache_hits": self._num_cached_tokens}
