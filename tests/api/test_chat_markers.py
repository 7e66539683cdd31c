"""Chats of models whose calls and reasoning begin with a control token, while text is held back before it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from conftest_api import settled
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Encoder

from aengine import AsyncLLM, Completion, SamplingParams
from aengine.engine import core
from aengine.engine.tokenizer.tokenizer import Tokenizer

Make = Callable[..., AsyncLLM]
pytestmark = pytest.mark.usefixtures("no_blocking")
HELLO = [{"role": "user", "content": "Hi"}]
CONTROLS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>")
TURNS = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
MISTRAL = TURNS + "{# [TOOL_CALLS] [{ #}"
MISTRAL_ARGS = TURNS + "{# [TOOL_CALLS] [ARGS] #}"
THINKING = TURNS + "{# <think> </think> #}{% if add_generation_prompt %}{% endif %}"
HERMES = TURNS + "{# <tool_call> #}"
TIME = {"name": "get_time", "parameters": {}}


@functools.cache
def sentencepiece(template: str) -> Tokenizer:
    """Each letter, each byte, and the markers as control tokens."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyzSHi.:,_{}[]\"'0123456789"]
    vocab = {name: i for i, name in enumerate(["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters])}
    encoder = Encoder(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    encoder.normalizer = normalizers.Replace(" ", "▁")
    encoder.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    encoder.add_special_tokens([AddedToken(name, normalized=False) for name in ("</s>", *CONTROLS)])
    encoder.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("<tool_call>", "</tool_call>")])
    return Tokenizer(encoder, special_tokens={"eos_token": "</s>"}, chat_templates={"default": template})


async def answered(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, template: str, text: str, params: SamplingParams, **chat: object
) -> Completion:
    """What becomes of a chat whose answer is ``text``, by a model that nothing constrains."""
    known = sentencepiece(template)
    monkeypatch.setattr(core.Tokenizer, "load", classmethod(lambda cls, *args: known))
    monkeypatch.setattr("aengine.engine.chat.plan.compose", lambda **parts: None)
    ids = known.encode(text, add_special_tokens=False) + [known.token_id("</s>")] * 200
    begin = len(known.encode(known.apply_chat_template(HELLO), add_special_tokens=False))
    fake = {"vocab_size": known.vocab_size, "token": lambda row, position: ids[position - begin]}
    async with make_engine(fake=fake) as engine:
        completion = await engine.chat(HELLO, params, **chat)
        await settled(engine)
        return completion


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize(
    ("template", "text", "stop"),
    [
        (MISTRAL, 'Sure.\n[TOOL_CALLS] [{"name": "get_time", "arguments": {}}]', ()),
        (MISTRAL_ARGS, "Sure.\n[TOOL_CALLS]get_time[ARGS]{}", "\n\n"),
        (MISTRAL_ARGS, "Sure.\n[TOOL_CALLS]get_time[ARGS]{}", ("\n\n", "]x", "ARGS[")),
        (MISTRAL_ARGS, "Sure.[TOOL_CALLS]get_time[ARGS]{}", (".g", "e{")),
    ],
)
async def test_a_call_after_text_that_is_held_back(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, template: str, text: str, stop: object, shown: bool
) -> None:
    params = SamplingParams(stop=stop, skip_special_tokens=not shown)
    completion = await answered(make_engine, monkeypatch, template, text, params, tools=[TIME])
    message = completion.message
    assert [call.name for call in message.tool_calls if call.is_complete] == ["get_time"]
    assert message.content.strip() == "Sure."


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("how", [{"stop": "</tool_call>"}, {"stop": ("}\n\n", "call>x")}, {"stop_token_ids": True}])
async def test_a_marker_that_is_a_stop_string_ends_the_call(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, how: dict[str, object], include: bool
) -> None:
    """As many ask for one call only."""
    if "stop_token_ids" in how:
        how = {"stop_token_ids": [sentencepiece(HERMES).token_id("</tool_call>")]}
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    params = SamplingParams(include_stop_str_in_output=include, **how)
    completion = await answered(make_engine, monkeypatch, HERMES, f"Sure.{call}\n{call}", params, tools=[TIME])
    calls = completion.message.tool_calls
    assert all(call.is_complete for call in calls) and len(calls) == (2 if "call>x" in how.get("stop", ()) else 1)
    assert completion.finish_reason == "tool_calls" and completion.message.content == "Sure."


@pytest.mark.parametrize("stop", [(), "\n\n", "t\ns"])
async def test_reasoning_that_ends_with_text_that_is_held_back(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, stop: object
) -> None:
    text = "<think>what\n</think>\nso it is"
    completion = await answered(make_engine, monkeypatch, THINKING, text, SamplingParams(stop=stop))
    assert (completion.message.reasoning, completion.message.content) == ("what", "so it is")


async def test_a_character_does_not_go_on_after_a_marker(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "<think>é</think>so"
    known = sentencepiece(THINKING)
    whole = known.encode(text, add_special_tokens=False)
    half = [i for i in whole if i != known.token_id("<0xA9>")]
    monkeypatch.setattr(Tokenizer, "encode", lambda self, t, **_: half if t == text else [5])
    completion = await answered(make_engine, monkeypatch, THINKING, text, SamplingParams())
    assert (completion.message.reasoning, completion.message.content) == ("\ufffd", "so")


async def test_a_stop_string_ends_the_answer_before_the_marker(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Sure.\n[TOOL_CALLS]get_time[ARGS]{}"
    completion = await answered(make_engine, monkeypatch, MISTRAL_ARGS, text, SamplingParams(stop="\n"), tools=[TIME])
    assert completion.finish_reason == "stop"
    assert (completion.message.content, completion.message.tool_calls) == ("Sure.", ())


async def test_a_stop_string_among_byte_tokens_ends_the_completion(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of them is held back until another token comes, which would be never."""
    for params in (SamplingParams(stop="\n", max_tokens=200), SamplingParams(stop="\n\n", max_tokens=200)):
        completion = await answered(make_engine, monkeypatch, THINKING, "so" + "\n" * 300, params)
        assert (completion.text, completion.finish_reason) == ("so", "stop")
        assert completion.usage.completion_tokens == 2 + len(params.stop[0])


async def test_a_stop_string_that_the_end_completes(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What becomes of an incomplete character is known at the end only."""
    params = SamplingParams(stop="\ufffd", max_tokens=3)
    text = "so🙂"
    completion = await answered(make_engine, monkeypatch, THINKING, text, params)
    assert (completion.text, completion.finish_reason) == ("so", "stop")
