"""The mistakes of a first hour: each error names its cause and what to do instead."""

import asyncio
import copy
import pickle
import threading
from pathlib import Path

import pytest

from aengine import AsyncLLM, EngineConfig, InvalidRequestError, SamplingParams
from aengine.engine.chat.functions import describe
from aengine.testing import FakeAsyncLLM, FakeLLM


@pytest.mark.parametrize("method", ["generate", "stream", "chat"])
async def test_a_sampling_parameter_among_the_options_is_led_to_its_place(method):
    async with FakeAsyncLLM("x") as engine:
        with pytest.raises(InvalidRequestError, match=r"SamplingParams\(max_tokens=\.\.\.\)") as caught:
            result = getattr(engine, method)([{"role": "user", "content": "hi"}], max_tokens=4)
            await result
        assert caught.value.param == "max_tokens"


async def test_an_option_of_chats_is_led_to_chat():
    async with FakeAsyncLLM("x") as engine:
        with pytest.raises(InvalidRequestError, match=r"tools is an option of chat\(\) and stream_chat\(\)"):
            await engine.generate("hi", tools=[])


async def test_several_prompts_in_one_call_are_led_to_gather():
    async with FakeAsyncLLM("x") as engine:
        with pytest.raises(InvalidRequestError, match=r"not a list of str; a call takes one prompt: .*asyncio\.gather"):
            await engine.generate(["a", "b"])


async def test_reading_a_stream_on_another_loop():
    async with FakeAsyncLLM("x", token_delay=60.0) as engine:
        stream = engine.stream("hi")
        caught = []

        def read() -> None:
            try:
                asyncio.run(anext(stream))
            except Exception as error:
                caught.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.01)
        assert isinstance(caught[0], InvalidRequestError) and "own_thread=True" in str(caught[0]), caught
        await stream.aclose()


@pytest.mark.parametrize("use", [pickle.dumps, copy.copy, copy.deepcopy])
def test_engines_are_not_copied(use):
    with pytest.raises(TypeError, match="belongs to this process, and can't be pickled or copied"):
        use(AsyncLLM("smollm2-135m"))
    with FakeLLM("x") as llm:
        for engine in (llm, llm.as_async(), llm.as_async().sync):
            with pytest.raises(TypeError, match="belongs to this process"):
                use(engine)
    config = EngineConfig(model="smollm2-135m")
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_model_may_be_a_path():
    assert AsyncLLM(Path("folder") / "model.gguf").config.model == "folder/model.gguf"


async def test_a_failing_progress_is_logged_once(caplog):
    async with FakeAsyncLLM("x", progress=lambda progress: 1 / 0) as engine:
        assert (await engine.generate("hi", SamplingParams(max_tokens=4))).text
    assert [record.message for record in caplog.records if record.exc_info] == [
        "the setting progress, a function of yours, failed; it is not called again"
    ]


def test_a_tool_of_a_type_without_schema_names_it_in_one_sentence():
    def tool(lock: threading.Event) -> str:
        return ""

    with pytest.raises(InvalidRequestError, match="the parameters of 'tool' have no JSON schema") as caught:
        describe(tool)
    assert "threading.Event" in str(caught.value) and "If you got this error" not in str(caught.value)
