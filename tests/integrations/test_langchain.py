"""LangChain's chat model over an engine of the same process; its own tests are in test_langchain_kit.py."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler
from langchain_core.exceptions import (
    ContextOverflowError,
    ModelAPIError,
    ModelError,
    ModelInvalidRequestError,
    ModelRateLimitError,
    ModelTimeoutError,
)
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.tools import tool
from pydantic import BaseModel, ValidationError

from aengine import AsyncLLM, ContextLengthError, DeadlineExceededError, EngineOverloadedError, WorkerDiedError
from aengine.integrations.langchain import ChatAEngine
from aengine.remote import connect, serve_engine
from aengine.testing import FakeAsyncLLM, FakeLLM, Reply


class Report(BaseModel):
    """A report of the weather."""

    city: str
    sunny: bool


@tool
def weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


CALL = Reply(tool_calls=[("weather", {"city": "Paris"})])
REPORT = Report(city="Paris", sunny=True)


async def collected(stream: Any) -> tuple[AIMessageChunk, int]:
    """Return the sum of the chunks, and their number."""
    chunks = [chunk async for chunk in stream]
    return chunks[0] if len(chunks) == 1 else chunks[0] + chunks[1:], len(chunks)


async def test_a_tool_is_called_and_its_result_goes_back() -> None:
    async with FakeAsyncLLM([CALL, "It is sunny."]) as engine:
        model = ChatAEngine(engine=engine).bind_tools([weather])
        messages: list[Any] = [SystemMessage("A"), SystemMessage("B"), HumanMessage("Weather?", name="ann")]
        called = await model.ainvoke(messages)
        (call,) = called.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Paris"}) and call["id"]
        assert called.response_metadata["finish_reason"] == "tool_calls"
        result = await weather.ainvoke(call)
        answer = await model.ainvoke([*messages, called, result])
        assert answer.content == "It is sunny."
        assert answer.response_metadata["model_name"] == "fake"
        assert answer.response_metadata["model_provider"] == "aengine"
        usage = answer.usage_metadata
        assert usage is not None and usage["output_tokens"] == len("It is sunny.") + 1
        assert usage["input_token_details"]["cache_read"] > 0
        first, second = engine.requests
        assert [message["role"] for message in second.messages] == ["system", "user", "assistant", "tool"]
        assert second.messages[0]["content"] == "A\n\nB" and second.messages[1]["name"] == "ann"
        assert second.messages[2]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
        assert second.messages[3]["content"] == "sunny in Paris"


@pytest.mark.parametrize("delay", [0.0, 0.0005], ids=["at once", "by and by"])
async def test_chunks_are_what_the_whole_answer_is(delay: float) -> None:
    reply = Reply(
        "I look.", reasoning="Hm.", tool_calls=[("weather", {"city": "Paris"}), ("weather", {"city": "Rome"})]
    )
    async with FakeAsyncLLM(reply, reasoning=True, token_delay=delay) as engine:
        model = ChatAEngine(engine=engine).bind_tools([weather])
        whole = await model.ainvoke("?")
        streamed, number = await collected(model.astream("?"))
        assert number > (20 if delay else 0)
        assert streamed.content == whole.content and "I look." in whole.text
        assert (
            streamed.additional_kwargs == whole.additional_kwargs
            and "Hm." in whole.additional_kwargs["reasoning_content"]
        )
        assert [call["args"] for call in streamed.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}]
        assert [call["args"] for call in whole.tool_calls] == [call["args"] for call in streamed.tool_calls]
        assert len({call["id"] for call in streamed.tool_calls}) == 2
        assert [block["type"] for block in whole.content_blocks] == ["reasoning", "text", "tool_call", "tool_call"]
        assert streamed.usage_metadata is not None and whole.usage_metadata is not None
        assert streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
        await model.ainvoke(
            [HumanMessage("?"), whole, *[ToolMessage("fine", tool_call_id=c["id"]) for c in whole.tool_calls]]
        )
        assert "Hm." in engine.requests[-1].messages[1]["reasoning_content"]


async def test_logprobs_are_in_the_metadata() -> None:
    """As langchain-openai has them, whole and added up from chunks; also tokens that are no text."""
    async with FakeAsyncLLM(CALL, token_delay=0.0005, own_thread=True) as engine:
        model = ChatAEngine(engine=engine, logprobs=True, top_logprobs=2).bind_tools([weather])
        whole = await model.ainvoke("?")
        entries = whole.response_metadata["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries).startswith("<tool_call>")
        assert entries[0]["bytes"] == list(b"<") and entries[0]["logprob"] <= 0
        assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries)
        streamed, number = await collected(model.astream("?"))
        blocking = sum(await asyncio.to_thread(lambda: list(model.stream("?"))), start=AIMessageChunk(""))
        for message in (streamed, blocking):
            assert message.response_metadata["logprobs"]["content"] == entries and number > 5
            assert message.response_metadata["finish_reason"] == "tool_calls"
        generation = (await model.agenerate([[HumanMessage("?")]])).generations[0][0]  # type: ignore[attr-defined]
        assert generation.generation_info["logprobs"]["content"] == entries
        assert not (await model.ainvoke("?", logprobs=False)).response_metadata.get("logprobs")


METHODS: list[tuple[str, Any]] = [
    ("json_schema", REPORT),
    ("json_mode", REPORT),
    ("function_calling", Reply(tool_calls=[("Report", REPORT.model_dump())])),
]


@pytest.mark.parametrize(("method", "reply"), METHODS, ids=[method for method, _ in METHODS])
@pytest.mark.parametrize("schema", [Report, Report.model_json_schema()], ids=["pydantic", "dict"])
async def test_structured_output(method: Any, reply: Any, schema: Any) -> None:
    expected = REPORT if schema is Report else REPORT.model_dump()
    async with FakeAsyncLLM(reply, token_delay=0.0002) as engine:
        model = ChatAEngine(engine=engine)
        typed = model.with_structured_output(schema, method=method)
        assert await typed.ainvoke("?") == expected
        values = [value async for value in typed.astream("?")]
        assert values[-1] == expected
        raw = await model.with_structured_output(schema, method=method, include_raw=True).ainvoke("?")
        assert isinstance(raw["raw"], AIMessage) and raw["parsed"] == expected and raw["parsing_error"] is None


async def test_a_value_that_is_none_of_the_class_is_a_parsing_error() -> None:
    async with FakeAsyncLLM({"city": "Paris"}) as engine:
        model = ChatAEngine(engine=engine).with_structured_output(Report, method="json_mode", include_raw=True)
        raw = await model.ainvoke("?")
        assert raw["parsed"] is None and "sunny" in str(raw["parsing_error"])


async def test_types_and_tools_are_in_one_request() -> None:
    """As LangChain's agents ask for both: ``response_format`` beside ``tools``."""
    async with FakeAsyncLLM([CALL, REPORT]) as engine:
        model = ChatAEngine(engine=engine)
        wanted = {"type": "json_schema", "json_schema": {"name": "Report", "schema": Report.model_json_schema()}}
        bound = model.bind_tools([weather], response_format=wanted)
        assert (await bound.ainvoke("?")).tool_calls
        assert Report.model_validate_json((await bound.ainvoke("?")).text) == REPORT
        with pytest.raises(ModelInvalidRequestError, match="response_format"):
            await model.ainvoke("?", response_format={"type": "xml"})
        assert (
            model.profile is not None and model.profile["structured_output"] and model.profile["max_input_tokens"] > 0
        )


CHOICES: list[tuple[Any, Any]] = [
    (None, None),
    ("auto", "auto"),
    ("none", "none"),
    ("any", "required"),
    (True, "required"),
    (False, None),
    ("weather", {"type": "function", "function": {"name": "weather"}}),
    ({"type": "function", "function": {"name": "weather"}}, {"type": "function", "function": {"name": "weather"}}),
]


@pytest.mark.parametrize(("choice", "expected"), CHOICES, ids=str)
async def test_tool_choices(choice: Any, expected: Any) -> None:
    async with FakeAsyncLLM() as engine:
        answer = await ChatAEngine(engine=engine).bind_tools([weather], tool_choice=choice).ainvoke("?")
        assert engine.requests[0].tool_choice == expected
        assert bool(answer.tool_calls) == (expected not in (None, "auto", "none"))


async def test_parameters_are_the_engines_and_those_of_a_call_go_first() -> None:
    async with FakeAsyncLLM("yes, END and more") as engine:
        model = ChatAEngine(
            engine=engine,
            max_tokens=50,
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            stop=["NEVER"],
            frequency_penalty=0.25,
            presence_penalty=0.5,
            logit_bias={65: 3.0},
            timeout=60.0,
            reasoning_effort="low",
            model_kwargs={"min_p": 0.1, "priority": 1},
        )
        answer = await model.ainvoke("?", stop=["END"], temperature=0.75, min_tokens=2)
        assert answer.content == "yes, "
        params = engine.requests[0].params
        assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (50, 0.75, 0.9, 7)
        assert (params.frequency_penalty, params.presence_penalty, params.min_p) == (0.25, 0.5, 0.1)
        assert (params.stop, params.logit_bias, params.min_tokens) == (("END",), {65: 3.0}, 2)
        both = await ChatAEngine(engine=engine).agenerate([[HumanMessage("?")]], n=2)
        assert len(both.generations[0]) == 2
        wrong_ones: list[tuple[dict[str, Any], str]] = [
            ({"colour": 1}, "colour"),
            ({"model": "other"}, "'other' is not served"),
            ({"temperature": -1}, "temperature"),
            ({"tools": [{"type": "web_search"}]}, "web_search"),
        ]
        for wrong, message in wrong_ones:
            with pytest.raises(ModelInvalidRequestError, match=message):
                await ChatAEngine(engine=engine).ainvoke("?", **wrong)
        with pytest.raises(ValidationError, match="engine"):
            ChatAEngine()  # type: ignore[call-arg]
        with pytest.raises(ValidationError, match="colour"):
            ChatAEngine(engine=engine, colour=1)  # type: ignore[call-arg]


async def test_strict_means_that_all_of_a_schema_is_held() -> None:
    schema = {
        "title": "T",
        "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": True}},
        "required": ["a"],
    }
    async with FakeAsyncLLM() as engine:
        model = ChatAEngine(engine=engine)
        answer = await model.with_structured_output(schema, include_raw=True).ainvoke("?")
        assert "uniqueItems" in answer["raw"].response_metadata["warnings"][0]
        with pytest.raises(ModelInvalidRequestError, match="uniqueItems"):
            await model.with_structured_output(schema, strict=True).ainvoke("?")


async def test_callbacks_see_each_piece_of_a_stream() -> None:
    class Tokens(AsyncCallbackHandler):
        texts: list[str] = []

        async def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            self.texts.append(token)

    async with FakeAsyncLLM("Hello there", token_delay=0.0005) as engine:
        await collected(ChatAEngine(engine=engine).astream("?", config={"callbacks": [Tokens()]}))
        assert "".join(Tokens.texts) == "Hello there" and len(Tokens.texts) > 4
        Tokens.texts.clear()
        answer = await ChatAEngine(engine=engine, streaming=True).ainvoke("?", config={"callbacks": [Tokens()]})
        assert answer.content == "".join(Tokens.texts) == "Hello there" and answer.usage_metadata is not None


async def ended(engine: AsyncLLM) -> None:
    while engine.statistics().num_running or engine.statistics().num_waiting:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("how", ["close", "task", "invoke"])
async def test_who_leaves_ends_the_request(how: str) -> None:
    async with FakeAsyncLLM("word " * 5000, token_delay=0.001) as engine:
        model = ChatAEngine(engine=engine)
        if how == "close":
            stream: Any = model.astream("?")
            await anext(stream)
            await stream.aclose()
        else:
            task = asyncio.ensure_future(model.ainvoke("?") if how == "invoke" else collected(model.astream("?")))
            while not engine.statistics().num_running:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait([task])
        await ended(engine)
        assert engine.statistics().num_aborted == 1


ERRORS = [
    (ContextLengthError(9, 5), ContextOverflowError),
    (EngineOverloadedError("full", retry_after=2.0), ModelRateLimitError),
    (DeadlineExceededError("late", deadline=1.0), ModelTimeoutError),
    (WorkerDiedError("gone"), ModelAPIError),
]


@pytest.mark.parametrize(("error", "expected"), ERRORS, ids=lambda value: getattr(value, "__name__", ""))
async def test_errors_are_langchains(error: Exception, expected: type[Exception]) -> None:
    async with FakeAsyncLLM([error, Reply("so f", error=error), error, "yes"]) as engine:  # type: ignore[arg-type]
        model = ChatAEngine(engine=engine)
        with pytest.raises(expected) as caught:
            await model.ainvoke("?")
        assert caught.value.__cause__ is error
        with pytest.raises(expected):
            await collected(model.astream("?"))
        retrying = model.with_retry(retry_if_exception_type=(expected,), wait_exponential_jitter=False)
        assert (await retrying.ainvoke("?")).content == "yes"


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_what_is_cut_off_is_no_answer(streams: bool) -> None:
    async def run(model: Any, **kwargs: Any) -> Any:
        return await (collected(model.astream("?", **kwargs)) if streams else model.ainvoke("?", **kwargs))

    async with FakeAsyncLLM([CALL, REPORT, "word " * 5000], token_delay=1e-4) as engine:
        model = ChatAEngine(engine=engine)
        with pytest.raises(ModelError, match="inside the call of a tool"):
            await run(model.bind_tools([weather]), max_tokens=60)
        with pytest.raises(ModelError, match="before it was of its schema"):
            await run(model.with_structured_output(dict(Report.model_json_schema())).first, max_tokens=20)  # type: ignore[attr-defined]
        task = asyncio.ensure_future(run(model))
        while not engine.statistics().num_running:
            await asyncio.sleep(0.001)
        engine.abort_all()
        with pytest.raises(ModelError, match="aborted"):
            await task


async def test_prompts_are_texts() -> None:
    async with FakeAsyncLLM("yes") as engine:
        model = ChatAEngine(engine=engine)
        image: Any = [{"type": "text", "text": "look"}, {"type": "image", "url": "https://example.com/a.png"}]
        with pytest.raises(ModelInvalidRequestError, match="reads text only"):
            await model.ainvoke([HumanMessage(image)])
        await model.ainvoke([HumanMessage([{"type": "text", "text": "one "}, "two"])])
        assert engine.requests[-1].text == "one two"


async def test_tokens_are_counted_by_the_models_own_template() -> None:
    async with FakeAsyncLLM("yes") as engine:
        model = ChatAEngine(engine=engine)
        messages: list[Any] = [SystemMessage("Be brief."), HumanMessage("?")]
        answer = await model.bind_tools([weather]).ainvoke(messages)
        assert answer.usage_metadata is not None
        assert model.get_num_tokens_from_messages(messages, [weather]) == answer.usage_metadata["input_tokens"]
        assert model.get_num_tokens("four") == 4
        long: list[Any] = [HumanMessage("x" * 100), HumanMessage("last")]
        assert trim_messages(long, max_tokens=60, token_counter=model) == long[1:]


async def test_an_engine_in_another_process_is_an_engine(tmp_path: Path) -> None:
    async with (
        FakeAsyncLLM([CALL, REPORT]) as engine,
        serve_engine(engine, tmp_path / "e"),
        connect(tmp_path / "e") as remote,
    ):
        model = ChatAEngine(engine=remote)  # type: ignore[arg-type]
        assert (await model.bind_tools([weather]).ainvoke("?")).tool_calls
        assert await model.with_structured_output(Report).ainvoke("?") == REPORT


def test_blocking_calls_need_an_engine_on_its_own_thread() -> None:
    with FakeLLM([CALL, "one", "two", "abc" * 5000], token_delay=0.0005) as llm:
        model = ChatAEngine(engine=llm)
        assert model.bind_tools([weather]).invoke("?").tool_calls
        assert [answer.content for answer in model.batch(["?", "?"], {"max_concurrency": 1})] == ["one", "two"]
        stream = model.stream("?")
        assert ("abc" * 9).startswith(next(stream).text)
        stream.close()  # type: ignore[attr-defined]
        while llm.statistics().num_running:
            pass
        assert llm.statistics().num_aborted == 1

    async def on_the_callers_loop() -> None:
        async with FakeAsyncLLM("yes") as engine:
            with pytest.raises(ModelInvalidRequestError, match="own_thread=True"):
                ChatAEngine(engine=engine).invoke("?")

    asyncio.run(on_the_callers_loop())
