"""``aengine run``: one answer, streamed to stdout."""

from __future__ import annotations

import argparse
import sys
import time

from ..async_llm import AsyncLLM
from ..errors import InvalidRequestError
from ..limits.values import is_unicode
from ..outputs import FinishReason
from .engine_options import engine_config
from .progress import sampling_params, tell


async def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not text.strip():
        raise InvalidRequestError("the prompt is empty", param="prompt")
    if not is_unicode(text):
        raise InvalidRequestError("the prompt is not valid UTF-8", param="prompt")
    async with AsyncLLM(engine_config(args)) as engine:
        chat = args.chat or (not args.plain and engine.tokenizer.has_chat_template)
        prompt = [{"role": "user", "content": text}] if chat else text
        begun = time.monotonic()
        first = 0.0
        async with engine.stream(prompt, params) as stream:
            async for token in stream:
                first = first or time.monotonic()
                sys.stdout.write(token.text)
                sys.stdout.flush()
        sys.stdout.write("\n")
        if not args.quiet:
            _summary(stream.completion.usage.completion_tokens, begun, first, stream.completion.finish_reason)
    return 0


def _summary(num_tokens: int, begun: float, first: float, reason: FinishReason) -> None:
    end = time.monotonic()
    rate = f", {(num_tokens - 1) / (end - first):.0f} tokens/s" if num_tokens > 1 and end > first else ""
    ending = " (max_tokens reached)" if reason is FinishReason.LENGTH else ""
    tell(f"[{num_tokens} tokens; first after {first - begun:.2f} s{rate}]{ending}")
