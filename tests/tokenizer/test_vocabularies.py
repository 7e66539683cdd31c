"""Tokenizers out of other libraries' files give the ids that those libraries give.

sentencepiece_models.json holds small models trained by SentencePiece 0.2, with the ids that it gives to some texts.
"""

from __future__ import annotations

import base64
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
from tokenizer_helpers import TEXTS, write_gguf
from tokenizers import Tokenizer as Tokenizers
from tokenizers import models, pre_tokenizers, trainers
from transformers import BertTokenizer

from aengine.checkpoint import ModelSource
from aengine.checkpoint.value_reader import ValueReader
from aengine.engine.tokenizer.token_text import gpt2_bytes
from aengine.engine.tokenizer.tokenizer import Tokenizer
from aengine.engine.tokenizer.vocabularies import folder
from aengine.engine.tokenizer.vocabularies.sentencepiece import NORMAL, SentencePieces
from aengine.engine.tokenizer.vocabularies.sentencepiece_file import read_sentencepiece
from aengine.engine.tokenizer.vocabularies.splitting import SPLITTINGS
from aengine.errors import ModelLoadError

SENTENCEPIECE = {
    entry["name"]: entry for entry in json.loads(Path(__file__).with_name("sentencepiece_models.json").read_text())
}


def load(folder: Path, **files: Any) -> Tokenizer:
    """Of a folder with these files: name with __ for . -> JSON value, text or bytes."""
    for name, value in files.items():
        path = folder / name.replace("__", ".")
        if isinstance(value, bytes):
            path.write_bytes(value)
        else:
            path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return Tokenizer.load(ModelSource("m", str(folder), "safetensors", {}))


def model_of(name: str) -> bytes:
    return base64.b64decode(SENTENCEPIECE[name]["model"])


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece(tmp_path: Path, name: str) -> None:
    tokenizer, expected = load(tmp_path, tokenizer__model=model_of(name)), SENTENCEPIECE[name]
    for text, ids in expected["ids"].items():
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
    for text, decoded in expected["decoded"].items():
        assert tokenizer.decode(expected["ids"][text]) == decoded
        detokenizer = tokenizer.detokenizer()
        assert "".join(map(detokenizer.put, expected["ids"][text])) + detokenizer.flush() == decoded
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == {2} and tokenizer.special_ids == {0, 1, 2}


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc", "nfkc_cf"])
def test_as_sentencepiece_itself(tmp_path: Path, kind: str, rule: str, rng: random.Random) -> None:
    """With each normalization that it brings, where it is installed."""
    import io

    sentencepiece = pytest.importorskip("sentencepiece")
    options = [rng.random() < 0.5 for _ in range(3)]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in TEXTS for _ in range(10)]),
        model_writer=written, model_type=kind, normalization_rule_name=rule, vocab_size=450, hard_vocab_limit=False,
        byte_fallback=options[0], add_dummy_prefix=options[1], remove_extra_whitespaces=options[2],
        character_coverage=0.98, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    encoder = read_sentencepiece(tmp_path / "tokenizer.model").pieces.encoder()
    reference = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    alphabet = "ab  zé世\n\t'17.,ﬁ½" + "".join(TEXTS)
    if rule != "identity":  # a table is applied to characters of several code points as a whole, as in transformers
        alphabet = "".join(letter for letter in alphabet if unicodedata.category(letter) not in ("Mn", "Cf", "So"))
        alphabet = alphabet.replace("\r", "")
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=rng.randrange(40)))
        ids, expected = encoder.encode(text, add_special_tokens=False).ids, reference.encode(text)
        if kind == "unigram" and sorted(ids) == sorted(expected):  # a run of line ends has several ways, all as likely
            ids, expected = reference.decode(ids), reference.decode(expected)
        assert ids == expected, (text, options)


def test_settings_beside_a_sentencepiece_model(tmp_path: Path) -> None:
    tokenizer = load(
        tmp_path,
        tokenizer__model=model_of("llama"),
        tokenizer_config__json={"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": True},
        special_tokens_map__json={"pad_token": "<|pad|>", "additional_special_tokens": ["<|im_start|>"]},
        added_tokens__json={"<|im_start|>": 391, "<|pad|>": 390, "<tool>": 392},
        chat_template__jinja="{{ bos_token }}{{ messages[0].content }}",
    )
    plain = SENTENCEPIECE["llama"]["ids"]["  a  b "]
    assert tokenizer.encode("  a  b ") == [*plain, 2]
    assert [tokenizer.token_id(name) for name in ("<|pad|>", "<|im_start|>", "<tool>")] == [390, 391, 392]
    assert tokenizer.special_ids == {0, 1, 2, 390, 391} and tokenizer.vocab_size == 393
    assert tokenizer.encode("<tool>", add_special_tokens=False) == [392]
    assert tokenizer.has_chat_template


@pytest.mark.parametrize("legacy", [True, False])
def test_a_blank_after_a_control_token_is_legacy(tmp_path: Path, legacy: bool) -> None:
    """As transformers' Llama tokenizer: by the settings."""
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": legacy}
    tokenizer = load(tmp_path, tokenizer__model=model_of("llama"), tokenizer_config__json=config)
    names = [tokenizer.token_text(i) for i in tokenizer.encode("a</s>a", add_special_tokens=False)]
    assert "".join(names) == (" a</s> a" if legacy else " a</s>a")


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"tokenizer__model": b"\x0a"}, "can't be read as a SentencePiece model"),
        ({"tokenizer__model": b""}, "no pieces"),
        ({"tokenizer__model": model_of("llama")[:-9]}, "can't be read as a SentencePiece model: it ends in the midst"),
        ({"tokenizer__model": b"\x0b"}, "no field of type 3"),
        ({"tokenizer__model": model_of("unigram"),
          "tokenizer_config__json": {"tokenizer_class": "XLMRobertaTokenizer"}},
         "XLMRobertaTokenizer, which gives its tokens other ids.*save_pretrained"),
        ({"tokenizer__model": model_of("llama"), "tokenizer_config__json": {"auto_map": {"AutoTokenizer": "x"}}},
         "code of the model's own"),
        ({"vocab__json": "{}", "merges__txt": ""},
         r"no tokenizer.json \(vocab.json there takes a class of transf.*save_pre"),
        ({"tokenization_mine__py": ""}, "tokenization_mine.py there"),
        ({"vocab__txt": "a\nb"}, "lacks .UNK., .CLS., .SEP."),
        ({"tekken__json": {"config": {}}}, "has no .default_vocab_size."),
    ],
)  # fmt: skip
def test_what_can_not_be_loaded_names_the_cure(tmp_path: Path, files: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        load(tmp_path, **files)


def test_no_damage_of_a_sentencepiece_file_raises_anything_else(tmp_path: Path, rng: random.Random) -> None:
    data, path = model_of("unigram"), tmp_path / "tokenizer.model"
    for _ in range(200):
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(damaged[: rng.randrange(len(data)) if rng.random() < 0.3 else None])
        try:
            read_sentencepiece(path)
        except ModelLoadError:
            pass


@pytest.mark.parametrize(
    ("more", "says"),
    [(b"\x12\x02\x18\x03", "algorithm 3"), (b"\x12\x05\x18\x01\xc0\x01\x01", "blanks at the ends of words")],
)
def test_kinds_of_sentencepiece_that_can_not_be_built_are_named(tmp_path: Path, more: bytes, says: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model_of("unigram") + more)  # another description of its training
    with pytest.raises(ModelLoadError, match=says):
        read_sentencepiece(path)
    path.write_bytes(more)
    with pytest.raises(ModelLoadError, match="no pieces"):
        read_sentencepiece(path)


def test_fields_of_a_sentencepiece_file_that_nobody_knows_are_passed_over(tmp_path: Path) -> None:
    """Of each kind: a number, of 64 bits, a text, of 32 bits."""
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model_of("unigram"))
    known = read_sentencepiece(path)
    others = b"\x78\x96\x01" + b"\x79" + b"8 bytes." + b"\x7a\x03abc" + b"\x7d" + b"four"
    path.write_bytes(others + model_of("unigram") + others)
    assert read_sentencepiece(path) == known


def tekken(*, special: bool) -> tuple[dict[str, Any], tiktoken.Encoding]:
    pattern = SPLITTINGS["tekken"].patterns[0]
    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    letters = gpt2_bytes()
    words = [bytes(letters[c] for c in w) for w, _ in sorted(encoder.get_vocab().items(), key=lambda i: i[1])]
    ranked = {bytes([i]): i for i in range(256)}
    ranked |= {word: 256 + i for i, word in enumerate(word for word in words if len(word) > 1)}
    data: dict[str, Any] = {
        "config": {"pattern": pattern, "default_vocab_size": 20 + len(ranked), "default_num_special_tokens": 20,
                   "version": "v11" if special else "v3"},
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
                  for word, rank in [*ranked.items(), (b"beyond the end", len(ranked))]],
    }  # fmt: skip
    if special:
        names = ["<unk>", "<s>", "</s>", "[TOOL_CALLS]", "[ARGS]", "[THINK]"]
        data["special_tokens"] = [
            {"rank": i, "token_str": name, "is_control": name != "[THINK]"} for i, name in enumerate(names)
        ]
    return data, tiktoken.Encoding("reference", pat_str=pattern, mergeable_ranks=ranked, special_tokens={})


@pytest.mark.parametrize("special", [True, False])
def test_tekken(tmp_path: Path, special: bool, rng: random.Random) -> None:
    data, reference = tekken(special=special)
    tokenizer = load(tmp_path, tekken__json=data)
    alphabet = "ab  zé世\n\t'17.,ﬁ½Aa" + "".join(TEXTS)
    for text in [*TEXTS, *("".join(rng.choices(alphabet, k=rng.randrange(60))) for _ in range(300))]:
        ids = [i + 20 for i in reference.encode(text)]
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == text
    assert tokenizer.token_id("[TOOL_CALLS]") == (3 if special else 9) and tokenizer.token_id("<SPECIAL_19>") == (
        19 if special else None
    )
    assert tokenizer.vocab_size == data["config"]["default_vocab_size"] and tokenizer.eos_token_ids == {2}
    assert (5 in tokenizer.special_ids) is not special


@pytest.mark.parametrize("name", ["tekken_240718.json", "mistral_instruct_tokenizer_240323.model.v3"])
def test_real_ones_of_mistral(tmp_path: Path, name: str) -> None:
    """They come with mistral-common, where that is installed."""
    data = Path(pytest.importorskip("mistral_common").__file__).parent / "data" / name
    sentencepiece = pytest.importorskip("sentencepiece")
    if "tekken" in name:
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        known = Tekkenizer.from_file(data)
        tokenizer = load(tmp_path, tekken__json=data.read_bytes())
        for text in TEXTS:
            assert tokenizer.encode(text, add_special_tokens=False) == known.encode(text, bos=False, eos=False)
    else:
        reference = sentencepiece.SentencePieceProcessor(model_file=str(data))
        tokenizer = load(
            tmp_path, **{name.replace("mistral_instruct_tokenizer_240323", "tokenizer"): data.read_bytes()}
        )
        for text in TEXTS:
            assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "##s", "##ly", "fox", "don", "'", "t", "世",
         "cafe", "jump", ".", "a", "##b", "b", "##a"]  # fmt: skip
BERT_TEXTS = ["The quicks fox don't jump.", "café 世世", "abba", "", "[MASK] a", "\x00a\u3000b", "xyz the"]


def test_wordpiece_of_a_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    tokenizer = load(tmp_path, tokenizer_config__json={"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    reference = BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=True)
    for text in BERT_TEXTS:
        assert tokenizer.encode(text) == reference.encode(text), text


def test_wordpiece_of_a_gguf(tmp_path: Path) -> None:
    kinds = [3] * 5 + [1] * (len(WORDS) - 5)
    pieces = [w if w[0] == "[" else w.removeprefix("##") if w[:2] == "##" else "▁" + w for w in WORDS]
    ids = {"padding": 0, "unknown": 1, "cls": 2, "seperator": 3, "mask": 4}
    metadata = {f"ggml.{name}_token_id": i for name, i in ids.items()}
    metadata |= {"ggml.model": "bert", "ggml.pre": "jina-v2-en", "ggml.tokens": pieces, "ggml.token_type": kinds}
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "bert.gguf", metadata))
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    reference = BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=True)
    for text in BERT_TEXTS:
        assert tokenizer.encode(text) == reference.encode(text), text


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_of_a_gguf(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_of(name))
    pieces = read_sentencepiece(tmp_path / "tokenizer.model").pieces
    metadata: dict[str, Any] = {
        "ggml.model": "t5" if pieces.is_unigram else "llama", "ggml.tokens": list(pieces.tokens),
        "ggml.scores": list(pieces.scores), "ggml.token_type": list(pieces.kinds), "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2, "ggml.unknown_token_id": 0, "ggml.add_space_prefix": pieces.add_prefix,
        "ggml.remove_extra_whitespaces": pieces.merges_blanks, "ggml.add_bos_token": False, "ggml.add_eos_token": False,
    }  # fmt: skip
    if pieces.charsmap:
        metadata["ggml.precompiled_charsmap"] = list(pieces.charsmap)
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "model.gguf", metadata))
    for text, ids in SENTENCEPIECE[name]["ids"].items():
        assert tokenizer.encode(text) == ids, text


def test_gemma4_of_a_gguf(tmp_path: Path) -> None:
    """BPE by merges over characters, "▁" for blanks, bytes for the rest."""
    tokens = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        "a",
        "b",
        "ab",
        "▁ab",
        "\n",
    ]
    metadata: dict[str, Any] = {
        "ggml.model": "gemma4", "ggml.tokens": tokens, "ggml.merges": ["a b", "▁ ab"],
        "ggml.token_type": [3, 3, 3, 2, *[6] * 256, *[1] * 6], "ggml.bos_token_id": 2, "ggml.eos_token_id": 1,
        "ggml.unknown_token_id": 3,
    }  # fmt: skip
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "gemma4.gguf", metadata))
    names = [tokens[i] for i in tokenizer.encode("ab ab\né")]
    assert names == ["<bos>", "ab", "▁ab", "\n", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab ab\né")) == "ab ab\né"


def test_harmony_ends_where_its_answers_do(tmp_path: Path) -> None:
    """<|end|> ends only a part of an answer there; it ends the answers of Phi."""
    encoder = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    encoder.add_special_tokens(["<|end|>", "<|call|>", "<|return|>"])
    encoder.save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).eos_token_ids == {2, 3}
    encoder = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    encoder.add_special_tokens(["<|end|>"])
    encoder.save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).eos_token_ids == {1}


@pytest.mark.parametrize("name", sorted(SPLITTINGS))
def test_each_splitting_is_one(name: str) -> None:
    """Nothing of a text is lost."""
    encoder = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(gpt2_bytes())}, []))
    SPLITTINGS[name].apply(encoder)
    letters = gpt2_bytes()
    for text in [*TEXTS, "漢字かな HTTPServer's 12345\r\n\n x"]:
        normalized = text if encoder.normalizer is None else encoder.normalizer.normalize_str(text)
        parts = [part for part, _ in encoder.pre_tokenizer.pre_tokenize_str(normalized)]
        assert bytes(letters[letter] for letter in "".join(parts)).decode() == normalized


def test_words_are_split_as_their_families_do() -> None:
    def split(name: str, text: str) -> list[str]:
        encoder = tokenizers.Tokenizer(models.BPE())
        SPLITTINGS[name].apply(encoder)
        return [text[start:end] for _, (start, end) in encoder.pre_tokenizer.pre_tokenize_str(text)]

    assert split("gpt-4o", "HelloWorld's 12345") == ["Hello", "World's", " ", "123", "45"]
    assert split("tekken", "HelloWorld's 12") == ["Hello", "World", "'s", " ", "1", "2"]
    assert split("glm4", "HelloWorld's 12345") == ["HelloWorld", "'s", " ", "123", "45"]
    assert split("deepseek-v3", "漢字abc 1234 f(x)") == ["漢字", "abc", " ", "123", "4", " f", "(x", ")"]
    assert split("kimi-k2", "漢字abc") == ["漢字", "abc"]
    assert split("qwen35", "a\u0301b 12") == ["a\u0301b", " ", "1", "2"]


@pytest.mark.timeout(60)
def test_work_is_bounded_by_what_is_there(tmp_path: Path) -> None:
    """Counts and lengths in a file make no work that grows beyond the file."""
    tekken = {
        "config": {"pattern": ".", "default_vocab_size": 10**9, "default_num_special_tokens": 10**9},
        "vocab": [{"rank": 0, "token_bytes": "YQ==", "token_str": "a"}],
    }
    with pytest.raises(ModelLoadError, match="default_num_special_tokens=1000000000 is more than any model has"):
        load(tmp_path, tekken__json=tekken)
    (tmp_path / "tekken.json").unlink()
    with pytest.raises(ValueError, match="a token has a length of 400000: 1024 at most"):
        SentencePieces(tokens=["a" * 400_000], scores=[0.0], kinds=[NORMAL]).encoder()
    long_token = base64.b64encode(b"a" * 400_000).decode()
    tekken["config"] = {"pattern": ".", "default_vocab_size": 10, "default_num_special_tokens": 0}
    tekken["vocab"] = [{"rank": 0, "token_bytes": long_token, "token_str": None}]
    with pytest.raises(ModelLoadError, match="a token has a length of 400000: 1024 at most"):
        load(tmp_path, tekken__json=tekken)


def test_missing_tokens_are_added_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes as long for one as for all."""
    listed = {str(3 + i): {"content": f"<more {i}>", "special": i % 2 == 0} for i in range(20_000)}
    listed |= {"9" * 5000: {"content": "<far>"}, "0": {"content": "a"}, "30000": {"content": "<apart>"}, "3x": 5}
    encoder = Tokenizers(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    calls = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(encoder, name)

    folder._add_missing_tokens(Counting(), ValueReader(listed))  # type: ignore[arg-type]
    assert calls.count("add_tokens") == 1 and encoder.get_vocab_size() == 20_003
    assert encoder.token_to_id("<more 19999>") == 20_002 and encoder.token_to_id("<far>") is None


@pytest.mark.parametrize(
    "model",
    [
        {"type": "WordPiece", "vocab": {"b": 0}, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
         "max_input_chars_per_word": 100},
        {"type": "Unigram", "vocab": [["b", 0.0]], "unk_id": None, "byte_fallback": False},
    ],
)  # fmt: skip
def test_a_tokenizer_that_can_not_encode_is_refused(tmp_path: Path, model: dict[str, Any]) -> None:
    """It would fail at each request."""
    data = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model}  # fmt: skip
    with pytest.raises(ModelLoadError, match="can't encode the text"):
        load(tmp_path, tokenizer__json=data)


def test_a_token_id_that_no_vocabulary_has(tmp_path: Path) -> None:
    added = {"id": 2**32 - 5, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}  # fmt: skip
    model = {"type": "WordLevel", "vocab": {"a": 0, "<x>": 2**32 - 5}, "unk_token": "a"}
    data = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [added], "normalizer": None,
            "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model}  # fmt: skip
    with pytest.raises(ModelLoadError, match="16777215 at most"):
        load(tmp_path, tokenizer__json=data)


CONFIG = "tokenizer_config.json: "


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"tokenizer_config__json": {"bos_token": 5}}, CONFIG + "bos_token=5 must be a text"),
        ({"tokenizer_config__json": {"bos_token": {"content": 5}}}, CONFIG + "bos_token: content=5 must be a text"),
        ({"special_tokens_map__json": {"eos_token": ["a"]}}, r"special_tokens_map.json: eos_token=\['a'\] must be"),
        ({"tokenizer_config__json": {"do_lower_case": "x"}}, CONFIG + "do_lower_case='x' must be true or false"),
        ({"tokenizer_config__json": {"strip_accents": []}}, CONFIG + r"strip_accents=\[\] must be true or false"),
        ({"tokenizer_config__json": {"tokenizer_class": 5}}, CONFIG + "tokenizer_class=5 must be a text"),
        ({"tokenizer_config__json": {"tokenizer_class": "x" * 5000}}, "is read by transformers' x{80}, which gives"),
        (
            {"tokenizer_config__json": {"added_tokens_decoder": [5]}},
            CONFIG + "added_tokens_decoder=.* must be an object",
        ),
        (
            {"tokenizer_config__json": {"added_tokens_decoder": {"6": {"content": "<x>", "special": "no"}}}},
            CONFIG + "added_tokens_decoder: 6: special='no' must be true or false",
        ),
        (
            {"tokenizer_config__json": {"additional_special_tokens": "x"}},
            "additional_special_tokens='x' must be a list",
        ),
        ({"special_tokens_map__json": {"additional_special_tokens": [5]}}, "additional_special_tokens: 0=5 must be a"),
        ({"added_tokens__json": {"<x>": "9"}}, "added_tokens.json: <x>='9' must be an integer"),
        ({"tokenizer_config__json": {"chat_template": 5}}, CONFIG + "chat_template=5 must be a text"),
        ({"tokenizer_config__json": {"chat_template": ["x"]}}, CONFIG + "chat_template: 0='x' must be an object"),
        (
            {"tokenizer_config__json": {"chat_template": [{"name": "a", "template": None}, {"template": 5}]}},
            CONFIG + "chat_template: 1: template=5 must be a text",
        ),
        ({"chat_template__jinja": b"\xff"}, "chat_template.jinja is no text in UTF-8"),
        ({"vocab__txt": b"\xff"}, "vocab.txt is no text in UTF-8"),
    ],
)
def test_a_value_that_can_not_be_is_named(tmp_path: Path, files: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        load(tmp_path, **{"vocab__txt": b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n", **files})


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tekken.json", "tokenizer.model", "vocab.txt", "chat_template.jinja"]
)
def test_a_file_is_not_read_into_all_memory(tmp_path: Path, name: str) -> None:
    (tmp_path / "vocab.txt").write_bytes(b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    with open(tmp_path / name, "r+b" if name == "vocab.txt" else "wb") as file:
        file.truncate(1 << 40)  # takes no place on the disk
    with pytest.raises(ModelLoadError, match=f"{name} is no file of a model's settings: it has {1 << 40} bytes"):
        load(tmp_path)
