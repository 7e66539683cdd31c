"""A program without an event loop. Run: python examples/synchronous.py [NUMBER]"""

import sys

from aengine import LLM, SamplingParams

number = int(sys.argv[1]) if len(sys.argv) > 1 else 20
with LLM("smollm2-135m") as llm:
    prompts = [f"{i} plus {i} equals" for i in range(number)]
    completions = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0, stop="\n"), progress=True)
    for prompt, completion in list(zip(prompts, completions))[:5]:
        print(prompt + completion.text)
    print(f"{len(completions)} completions")

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    for token in llm.stream(messages, SamplingParams(max_tokens=32, temperature=0)):
        print(token.text, end="", flush=True)
    print()
