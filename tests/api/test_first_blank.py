"""The first blank of a completion, with a decoder that takes it off a text: Llama 2's, TinyLlama's, older Mistrals'."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, normalizers

from aengine import AsyncLLM, SamplingParams
from aengine.engine import core
from aengine.engine.tokenizer.tokenizer import Tokenizer

Make = Callable[..., AsyncLLM]
HELLO = [{"role": "user", "content": "hello"}]
BEGUN = [*HELLO, {"role": "assistant", "content": "it is"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
ANSWER = ["▁true", "▁a", *["</s>"] * 100]  # more than one, as steps are begun ahead


@functools.cache
def known() -> Tokenizer:
    letters = [*"▁abcdefghijklmnopqrstuvwxyz", "▁true", "▁a"]
    encoder = Encoder(models.BPE({name: i for i, name in enumerate(["<unk>", *letters])}, [], unk_token="<unk>"))
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    encoder.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    encoder.add_special_tokens(["<s>", "</s>"])
    roles = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(encoder, special_tokens=roles, chat_templates={"default": TEMPLATE})


@pytest.fixture
def new_engine(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], AsyncLLM]:
    """Make an engine that answers " true a" after a prompt of so many tokens."""
    monkeypatch.setattr(core.Tokenizer, "load", classmethod(lambda cls, *args: known()))
    ids = [known().token_id(name) for name in ANSWER]

    def new(num_prompt_tokens: int) -> AsyncLLM:
        def token(row: int, position: int) -> int:
            return ids[position - num_prompt_tokens] or 0

        return make_engine(fake={"vocab_size": known().vocab_size, "token": token})

    return new


async def test_a_completion_goes_on_with_the_users_text(new_engine: Callable[[int], AsyncLLM]) -> None:
    ids = known().encode("hello")
    async with new_engine(len(ids)) as engine:
        for prompt in ("hello", ids):
            assert (await engine.generate(prompt)).text == " true a"
            both = await engine.generate(prompt, SamplingParams(n=2))
            assert [choice.text for choice in both.choices] == [" true a"] * 2
            assert "".join([token.text async for token in engine.stream(prompt)]) == " true a"
            assert (await engine.generate(prompt, SamplingParams(stop=" a"))).text == " true"
            assert (await engine.generate(prompt, SamplingParams(stop=" true"))).text == ""


async def test_over_http_it_goes_on_behind_an_echo(new_engine: Callable[[int], AsyncLLM]) -> None:
    async with new_engine(len(known().encode("hello"))) as engine, engine.openai_client() as client:
        answer = await client.completions.create(model="smollm2-135m", prompt="hello", echo=True, max_tokens=8)
        assert answer.choices[0].text == "hello true a"


async def test_an_answer_has_no_blank_before_it(new_engine: Callable[[int], AsyncLLM]) -> None:
    async with new_engine(len(known().encode(known().apply_chat_template(HELLO), False))) as engine:
        assert (await engine.chat(HELLO)).message.content == "true a"
        assert (await engine.generate(HELLO)).text == "true a"


async def test_an_answer_that_is_continued_keeps_it(new_engine: Callable[[int], AsyncLLM]) -> None:
    async with new_engine(len(known().encode(known().apply_chat_template(BEGUN), False))) as engine:
        assert (await engine.chat(BEGUN, continue_final_message=True)).message.content == " true a"
