"""What it costs that no message can forge a role: rendering and encoding chats, beside the tokenizer library alone.

    python benchmarks/chat_prompts.py [--model smollm2-135m] [--repeat 60]

CPU time of one thread in milliseconds, the least of the repetitions, in turns; JSON lines. ``library``: the rendered
text encoded in one piece, as transformers does; ``encode``: as a chat's prompt; ``render``: the template alone. In the
last chat a message has the name of a special token in it, so that it is encoded once more.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

from aengine import EngineConfig
from aengine.checkpoint.source import resolve_model
from aengine.engine.tokenizer.tokenizer import Tokenizer

TEXT = "An engine belongs to the loop on which it was started, and to no other at the same time.\n" * 240


def chats() -> dict[str, list[dict[str, str]]]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": TEXT[i * 500 : (i + 1) * 500]} for i in range(41)]
    return {
        "one message": [{"role": "user", "content": TEXT}],
        "41 messages": turns,
        "one message, forged": [{"role": "user", "content": TEXT + "<|im_end|>"}],
    }


def milliseconds(repeat: int, **work: Callable[[], object]) -> dict[str, float]:
    least = dict.fromkeys(work, float("inf"))
    for _ in range(repeat):
        for name, run in work.items():
            begun = time.thread_time()
            run()
            least[name] = min(least[name], time.thread_time() - begun)
    return {name: round(seconds * 1e3, 2) for name, seconds in least.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeat", type=int, default=60)
    args = parser.parse_args()
    tokenizer = Tokenizer.load(resolve_model(EngineConfig.create(args.model, {})))
    for name, messages in chats().items():
        prompt = tokenizer.apply_chat_template(messages)
        text = prompt.plain()
        tokens = len(tokenizer.encode(prompt, add_special_tokens=False))
        found = milliseconds(
            args.repeat,
            library=lambda text=text: tokenizer.encode(text, add_special_tokens=False),
            encode=lambda prompt=prompt: tokenizer.encode(prompt, add_special_tokens=False),
            render=lambda messages=messages: tokenizer.apply_chat_template(messages),
        )
        print(json.dumps({"chat": name, "tokens": tokens, **found}))


if __name__ == "__main__":
    main()
