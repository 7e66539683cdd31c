"""Tokenizers out of folders, chat templates, encoding."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from conftest_api import encoder_of
from tokenizer_helpers import TEXTS, smollm2, wordpiece
from tokenizers import models, pre_tokenizers, processors

from aengine.checkpoint import ModelSource
from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig
from aengine.engine.executor import new_executor
from aengine.engine.handles.start import EngineStart
from aengine.engine.tokenizer import pooled_texts, template_environment
from aengine.engine.tokenizer.messages import checked_messages
from aengine.engine.tokenizer.pooled_texts import EncodedText, encode_texts
from aengine.engine.tokenizer.tokenizer import Tokenizer
from aengine.engine.tokenizer_view import TokenizerView
from aengine.errors import ContextLengthError, InvalidRequestError, ModelLoadError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Größe <b>&</b>\n\n"},
    {"role": "assistant", "content": "17"},
    {"role": "user", "content": "Why?"},
]


def make_folder(path: Path, **files: Any) -> ModelSource:
    """tokenizer.json is SmolLM2's, saved; ``files``: name with __ for . -> JSON value or text."""
    encoder_of(smollm2()).save(str(path / "tokenizer.json"))
    for name, value in files.items():
        (path / name.replace("__", ".")).write_text(value if isinstance(value, str) else json.dumps(value))
    return ModelSource(str(path), str(path), "safetensors", {"vocab_size": 49152})


def test_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_folder(tmp_path))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == smollm2().encode(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.special_ids == smollm2().special_ids
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        tokenizer.apply_chat_template(MESSAGES)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("skip", [False, True])
async def test_ends_are_tokens_of_the_model(tmp_path: Path, skip: bool) -> None:
    """Others could not be packed into the columns of a step, or would never come."""
    source = make_folder(tmp_path, tokenizer_config__json={"eos_token": "<|endoftext|>"})
    source = replace(source, generation_config={"eos_token_id": [5, 2**40, -5, True, 49152]})
    config = EngineConfig(model=str(tmp_path), skip_tokenizer=skip)
    tokenizer, ends = await EngineStart(config, print, new_executor)._load_tokenizer(source)
    assert (tokenizer is None) == skip and ends - {0, 2} == {5}


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{% if %}"])
async def test_templates_are_compiled_by_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """The first chat does not wait for it; a faulty one is its chats' error, as before, and not the start's."""
    source = make_folder(tmp_path, tokenizer_config__json={"chat_template": template})
    start = EngineStart(EngineConfig(model=str(tmp_path)), print, new_executor)
    tokenizer, _ = await start._load_tokenizer(source)
    assert tokenizer is not None
    if template == "{% if %}":
        with pytest.raises(InvalidRequestError, match="chat template"):
            tokenizer.apply_chat_template(MESSAGES)
        return
    monkeypatch.setattr(template_environment, "TemplateEnvironment", None)
    assert tokenizer.apply_chat_template(MESSAGES) == "Be brief."


class PanicException(BaseException):
    """As pyo3's of that name, which is no `Exception`."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("x"), "config.json or a file beside it is damaged: KeyError: 'x'"),
        (PanicException("index out of bounds"), "makes the tokenizers library fail: index out of bounds"),
    ],
)
def test_what_is_left_is_an_error_that_names_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, said: str
) -> None:
    def fail(path: Path) -> None:
        raise error

    source = make_folder(tmp_path)
    monkeypatch.setattr("aengine.engine.tokenizer.tokenizer._loaded", fail)
    with pytest.raises(ModelLoadError, match=f"{tmp_path}.*{said}"):
        Tokenizer.load(source)


def test_settings(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<|im_start|>", "special": True},
        "eos_token": "<|endoftext|>",
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "added_tokens_decoder": {
            "2": {"content": "<|im_end|>", "special": True},
            "49152": {"content": "<|new|>", "special": True},
            "99999": {"content": "<|gap|>", "special": True},
        },
    }
    source = make_folder(tmp_path, tokenizer_config__json=config)
    source = ModelSource(source.name, source.path, "safetensors", {}, {"eos_token_id": [5, 6]})
    tokenizer = Tokenizer.load(source)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == {0, 2, 5, 6}
    assert tokenizer.vocab_size == 49153
    assert tokenizer.encode("<|new|>") == [49152]
    assert tokenizer.apply_chat_template(MESSAGES) == "<|im_start|>Be brief."
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(source).apply_chat_template(MESSAGES) == "from the file"


def test_named_templates(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools|length }}"}]
    tokenizer = Tokenizer.load(make_folder(tmp_path, tokenizer_config__json={"chat_template": templates}))
    assert tokenizer.apply_chat_template(MESSAGES) == "plain"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{"type": "function"}]) == "tools 1"


def test_override(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    encoder_of(wordpiece()).save(str(tmp_path / "words" / "tokenizer.json"))
    source = ModelSource("m", "/nowhere", "dummy", {})
    assert Tokenizer.load(source, str(tmp_path / "words")).vocab_size == wordpiece().vocab_size
    assert Tokenizer.load(source, "smollm2-135m").vocab_size == 49152


@pytest.mark.parametrize(
    ("tokenizer", "revision"),
    [("maker/model", "v1"), ("maker/model:Q4_0", "v1"), ("maker/other", None), ("maker/model2", None)],
)
def test_a_tokenizer_of_the_models_repository_is_of_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str, revision: str | None
) -> None:
    encoder_of(wordpiece()).save(str(tmp_path / "tokenizer.json"))
    asked: list[Any] = []

    def locate(name: str, of: str | None = None, **options: Any) -> Path:
        asked.append((name, of))
        return tmp_path

    monkeypatch.setattr("aengine.engine.tokenizer.tokenizer.locate", locate)
    Tokenizer.load(ModelSource("maker/model:Q8_0", "/nowhere", "gguf", {}), tokenizer, "v1")
    assert asked == [(tokenizer, revision)]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "has no tokenizer.json"),
        ({"tokenizer.model": "x"}, "can.t be read as a SentencePiece model"),
        ({"tokenizer.json": "{"}, "can't be read as a tokenizer"),
        ({"tokenizer.json": "{}"}, "can't be read as a tokenizer"),
    ],
)
def test_unusable_folder(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelLoadError, match=problem):
        Tokenizer.load(ModelSource("m", str(tmp_path), "safetensors", {}))


TEMPLATES = {
    "loops": (
        "{% for m in messages %}\n  {% if m.role == 'system' %}\n{% continue %}\n{% endif %}\n"
        "{{ m.content }}\n{% endfor %}"
    ),
    "tojson": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}x",
    "tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ missing }}|{{ add_generation_prompt }}",
    "date": "{{ strftime_now('%Y') }}",
    "extra": "{% if enable_thinking is defined and enable_thinking is false %}no{% endif %}{{ documents }}",
}


@pytest.mark.parametrize(
    ("part", "step"),
    [
        ("normalizer", {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1_000_000}),
        ("normalizer", {"type": "Prepend", "prepend": "a" * 1_000_000}),
        (
            "normalizer",
            {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"Regex": "[a-z]"}, "content": "aa"}] * 40,
            },
        ),
        ("decoder", {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1_000_000}),
        (
            "post_processor",
            {
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000,
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {},
            },
        ),
    ],
    ids=["replace", "prepend", "sequence", "decoder", "template"],
)
def test_a_tokenizer_that_makes_texts_grow_is_refused(tmp_path: Path, part: str, step: Any) -> None:
    source = make_folder(tmp_path)
    settings = json.loads(encoder_of(wordpiece()).to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings | {part: step}))
    with pytest.raises(ModelLoadError, match=rf"tokenizer\.json: {part} may make a text .* times as long"):
        Tokenizer.load(source)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TEMPLATES, "smollm2"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_templates_render_as_in_transformers(tmp_path: Path, name: str, add_generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    special_tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    if name == "smollm2":
        tokenizer = smollm2()
        template = tokenizer.chat_template_source
    else:
        template = TEMPLATES[name]
        config = {"chat_template": template, **special_tokens}
        tokenizer = Tokenizer.load(make_folder(tmp_path, tokenizer_config__json=config))
    tools = [{"type": "function", "function": {"name": "größe", "parameters": {"type": "object"}}}]
    for extra in ({}, {"enable_thinking": False}):
        for conversation in (MESSAGES, MESSAGES[1:]):
            (expected,), _ = render_jinja_template(
                conversations=[conversation],
                tools=tools,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                **special_tokens,
                **extra,
            )
            got = tokenizer.apply_chat_template(
                conversation, add_generation_prompt=add_generation_prompt, tools=tools, **extra
            )
            assert got == expected


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        {"role": "user", "content": "x"},
        ["hello"],
        [{"content": "no role"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user"}, {"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
    ],
)
def test_bad_messages(messages: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        checked_messages(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "chat template"),
        ("{{ ''.__class__.__mro__ }}", "chat template"),
        ("{{ messages.append(1) }}", "chat template"),
        ("{{ messages[0].nothing.nothing }}", "chat template"),
        ("{% for i in range(10**9) %}{% endfor %}", "chat template"),
    ],
)
def test_template_errors_are_request_errors(tmp_path: Path, template: str, problem: str) -> None:
    tokenizer = Tokenizer.load(make_folder(tmp_path, chat_template__jinja=template))
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        tokenizer.apply_chat_template(MESSAGES)
    assert caught.value.param == "messages"


def test_text_that_is_not_unicode() -> None:
    for text in ("a\ud800", None, 5):
        with pytest.raises(InvalidRequestError, match="Unicode") as caught:
            smollm2().encode(text)  # type: ignore[arg-type]
        assert caught.value.param == "prompt"


def test_encoding_lets_other_threads_run() -> None:
    """While a long text is encoded, this thread goes on: with the GIL held it would stand still until the end."""
    tokenizer = smollm2()
    text = TEXTS[0] * 5_000
    done = threading.Event()

    def encode() -> None:
        tokenizer.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    turns = 0
    while not done.is_set():
        time.sleep(0.001)
        turns += 1
    thread.join()
    assert turns > 5


async def test_many_threads_at_once() -> None:
    tokenizer = smollm2()
    loop = asyncio.get_running_loop()
    expected = [tokenizer.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(8) as pool:
        jobs = [loop.run_in_executor(pool, tokenizer.encode, text) for text in TEXTS * 20]
        assert await asyncio.gather(*jobs) == expected * 20


def test_a_tokenizer_is_freed_by_reference_counting() -> None:
    """It is of tens of MB, which would wait for a garbage collection of the oldest generation."""
    tokenizer = Tokenizer(encoder_of(smollm2()), chat_templates={"default": "{{ messages[0].content }}"})
    ids = tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": "<|im_end|> x"}]))
    decoder = tokenizer.detokenizer((), include_stop=False, skip_special_tokens=True, markers=frozenset())
    assert "".join(map(decoder.put, ids)) and tokenizer.token_bytes(300)
    parts = [weakref.ref(part) for part in (tokenizer, *vars(tokenizer).values()) if hasattr(part, "__weakref__")]
    assert len(parts) >= 3  # the table of the tokens' bytes, the encoder of messages
    gc.collect()
    gc.disable()
    try:
        del tokenizer, decoder
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()


def test_a_tokenizer_that_is_nowhere_names_the_setting() -> None:
    source = resolve_model(EngineConfig.create("smollm2-135m", {}))
    with pytest.raises(ModelLoadError, match=r"tokenizer='\./nothing': there is no model '\./nothing'"):
        Tokenizer.load(source, "./nothing")


def _with_ends(single: str, pair: str = "$A $B:1") -> Tokenizer:
    """A tokenizer that puts special tokens round its texts."""
    encoder = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[U]": 2, "<s>": 3, "</s>": 4}, unk_token="[U]"))
    encoder.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder.add_special_tokens(["<s>", "</s>"])
    encoder.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("<s>", 3), ("</s>", 4)]
    )
    return Tokenizer(encoder, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def test_a_text_that_begins_as_every_text_does_gets_no_second_token_for_it() -> None:
    known = _with_ends("<s> $A </s>")
    for encode in (known.encode, TokenizerView(known, known.vocab_size).encode):
        assert encode("a b") == encode("<s>a b") == encode("<s> a b") == [3, 0, 1, 4]
        assert encode("<s><s>a") == [3, 3, 0, 4]  # the second is the text's own
        assert encode("a<s>") == [3, 0, 3, 4] and encode("</s>a") == [3, 4, 0, 4]
        assert encode("<s>a", add_special_tokens=False) == [3, 0]
    assert known.encode("") == [3, 4] and known.encode("<s>") == [3, 4]
    only_ends = _with_ends("$A </s>")
    assert only_ends.encode("</s>a") == [4, 0, 4] and only_ends.encode("<s>a") == [3, 0, 4]
    nothing = _with_ends("$A")
    assert nothing.encode("<s><s>a") == [3, 3, 0]


def test_nor_does_one_that_gets_a_vector() -> None:
    known = _with_ends("<s> $A </s>", "<s> $A </s> $B:1 </s>:1")
    ids = [text.token_ids for text in encode_texts(known, ["a b", "<s>a b"], 4, truncate=False)]
    assert ids == [[3, 0, 1, 4]] * 2
    (cut,) = encode_texts(known, ["<s>a b a b"], 4, truncate=True)
    assert cut.token_ids == [3, 0, 4]  # its own was one of the four
    plain, begun = encode_texts(known, [("a", "b"), ("<s>a", "b")], 9, truncate=False)
    assert plain == begun == EncodedText([3, 0, 4, 1, 4], 3)


@pytest.mark.parametrize("is_pair", [False, True])
def test_texts_that_can_not_fit_are_not_encoded(is_pair: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    known, seen = smollm2(), []

    def cut(encoder: Any, given: Any, most: int) -> Any:
        seen.append(given)
        return encoder.encode("a")

    monkeypatch.setattr(pooled_texts, "_cut", cut)
    long: Any = ("a" * 200_000, "b" * 150_000) if is_pair else "a" * 200_000
    with pytest.raises(ContextLengthError, match="at least"):
        encode_texts(known, [long], 4, truncate=False)
    encode_texts(known, [long], 4, truncate=True)
    assert [len(text) for text in (seen[0] if is_pair else seen)] == [100_000] * (1 + is_pair)
