"""Text token by token: the same as all at once, whole characters only, stop strings never leaked."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_helpers import FAMILIES, TEXTS, clip_style, random_ids, sentencepiece, smollm2
from tokenizers import decoders, models

from aengine.engine.tokenizer.detokenizer import Detokenizer
from aengine.engine.tokenizer.stop_strings import StopSearch
from aengine.engine.tokenizer.tokenizer import Tokenizer


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.put(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_joined_pieces_are_the_decoded_text(family: str, skip_special_tokens: bool, rng: random.Random) -> None:
    tokenizer = FAMILIES[family]()
    for _ in range(400):
        ids = random_ids(tokenizer, rng)
        text = tokenizer.decode(ids, skip_special_tokens)
        got = pieces(tokenizer.detokenizer(skip_special_tokens=skip_special_tokens), ids)
        assert "".join(got) == text, ids


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_that_goes_on_is_decoded_with_the_text_before_it(family: str, rng: random.Random) -> None:
    tokenizer = FAMILIES[family]()
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for text in TEXTS:
        ids = [*bos, *tokenizer.encode(text, add_special_tokens=False)]
        whole = tokenizer.decode(ids)
        for place in range(len(ids) + 1):
            before = tokenizer.decode(ids[:place])
            if not before.endswith("\ufffd"):  # a character is not whole
                got = pieces(tokenizer.detokenizer(after=ids[:place]), ids[place:])
                assert before + "".join(got) == whole, (ids, place)


def test_a_stop_string_may_begin_with_the_first_blank() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode("the quick", add_special_tokens=False)
    bos = tokenizer.bos_token_id
    assert bos is not None
    assert "".join(pieces(tokenizer.detokenizer((" the",), after=[bos]), ids)) == "the quick"
    assert "".join(pieces(tokenizer.detokenizer((" the",), after=ids), ids)) == ""
    assert "".join(pieces(tokenizer.detokenizer((" qu",), after=ids), ids)) == " the"


def test_unknown_kind_of_decoder(rng: random.Random) -> None:
    tokenizer = clip_style()
    for text in TEXTS:
        ids = tokenizer.encode(text)
        got = "".join(pieces(tokenizer.detokenizer(), ids))
        assert got == tokenizer.decode(ids)
    for _ in range(400):
        ids = random_ids(tokenizer, rng)
        assert "".join(pieces(tokenizer.detokenizer(), ids)) == tokenizer.decode(ids), ids


def test_a_decoder_that_changes_what_it_said() -> None:
    """It takes the blank before a full stop away again: too late, but nothing after it is lost, nor a stop string."""
    encoder = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(["[UNK]", "so", " ", ".", "it"])}))
    encoder.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(" .", ".")])
    tokenizer = Tokenizer(encoder)
    ids = [1, 2, 3, 4, 2, 4]
    assert tokenizer.decode(ids) == "so.it it"
    assert "".join(pieces(tokenizer.detokenizer(), ids)) == "so .it it"
    detokenizer = tokenizer.detokenizer(("it i",))
    assert "".join(pieces(detokenizer, ids)) == "so ." and detokenizer.stopped


def byte_level_of_no_family() -> Tokenizer:
    encoder = tokenizers.Tokenizer.from_str(smollm2().to_json())
    encoder.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("xyz", "zyx")])
    return Tokenizer(encoder)


@pytest.mark.parametrize("make", [smollm2, byte_level_of_no_family])
def test_half_a_character_before_a_text_is_no_part_of_it(make: Callable[[], Tokenizer]) -> None:
    tokenizer, ids = make(), smollm2().encode("\u4e16 and")
    assert "".join(pieces(tokenizer.detokenizer(), ids)) == "\u4e16 and" and len(ids) > 2
    begun = len(ids) - 2
    assert "".join(pieces(tokenizer.detokenizer(after=ids[:begun]), ids[begun:])) == "\ufffd and"


def test_many_tokens_that_are_no_character_are_not_held(rng: random.Random) -> None:
    """By a decoder that is known to no family: each is U+FFFD when the next few have not made it more."""
    tokenizer = byte_level_of_no_family()
    lone = smollm2().encode("\u4e16")[-1]
    detokenizer = tokenizer.detokenizer(("\ufffd" * 20,))
    got = "".join(detokenizer.put(lone) for _ in range(60))
    assert detokenizer.stopped and got == ""
    for _ in range(200):
        ids = random_ids(tokenizer, rng)
        text = tokenizer.decode(ids)
        assert "".join(pieces(tokenizer.detokenizer(), ids)) == text or "\ufffd" * 16 in text


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "no-decoder"])  # it has no control token
def test_markers_end_what_is_held_back(family: str, rng: random.Random) -> None:
    """Each part between markers is there, whole, when its marker comes; as if it had been all of the text."""
    tokenizer = FAMILIES[family]()
    markers = tokenizer.special_ids
    assert markers
    for _ in range(300):
        ids = [i for i in random_ids(tokenizer, rng) if i not in markers or rng.random() < 0.5]
        ids.insert(rng.randrange(len(ids) + 1), rng.choice(sorted(markers)))
        stops = rng.choice([(), random_stops(tokenizer.decode(ids), rng)])
        marked = tokenizer.detokenizer(stops, markers=markers)
        plain = tokenizer.detokenizer()
        part: list[str] = []
        got = ""
        for token_id in ids:
            got += marked.put(token_id)
            if token_id not in markers:
                part.append(plain.put(token_id))
                if not marked.stopped:
                    continue
            expected, found = ended("".join([*part, plain.flush()]), stops, False)
            assert (got, marked.stopped) == (expected, found), (ids, stops)
            if found:
                break
            plain.put(token_id)
            part, got = [], ""


def test_a_marker_is_a_token_among_the_first() -> None:
    known = smollm2()
    (marker, *_), (a,), (b,) = sorted(known.special_ids), known.encode("a"), known.encode("b")
    for min_tokens, stops in ((2, True), (3, False)):
        detokenizer = known.detokenizer(("b",), min_tokens=min_tokens, markers=frozenset({marker}))
        for token_id in (marker, a, b):
            detokenizer.put(token_id)
        assert detokenizer.stopped is stops


@pytest.mark.parametrize("text", [*TEXTS, "🙂" * 5, "e\u0301" * 3])
def test_pieces_are_whole_characters(text: str) -> None:
    tokenizer = smollm2()
    got = pieces(tokenizer.detokenizer(), tokenizer.encode(text))
    assert "".join(got) == text
    assert not any("\ufffd" in piece for piece in got)


def test_incomplete_character_at_the_end() -> None:
    tokenizer = smollm2()
    ids = tokenizer.encode("ok 世界")
    detokenizer = tokenizer.detokenizer()
    got = [detokenizer.put(i) for i in ids[:-1]]
    assert "\ufffd" not in "".join(got)
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_a_run_of_byte_tokens_comes_when_it_ends() -> None:
    tokenizer = sentencepiece()
    byte_ids = {byte: tokenizer.token_id(f"<0x{byte:02X}>") for byte in range(256)}
    letter = tokenizer.token_id("a")
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.put(byte_ids[b]) for b in "🙂".encode()] == [""] * 4
    assert detokenizer.put(letter) == "🙂a"


def test_skipped_special_token_does_not_break_a_character() -> None:
    tokenizer = smollm2()
    first, second = tokenizer.encode("é")[0], tokenizer.token_id("<|im_end|>")
    ids = tokenizer.encode("世")
    assert len(ids) > 1
    ids.insert(1, second)
    assert "".join(pieces(tokenizer.detokenizer(), ids)) == "世" == tokenizer.decode(ids)
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(pieces(tokenizer.detokenizer(skip_special_tokens=False), ids)) == shown
    assert "\ufffd" in shown and first


def test_token_bytes_join_to_the_text(rng: random.Random) -> None:
    tokenizer = smollm2()
    for text in TEXTS:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b"" == tokenizer.token_bytes(-1)
    assert tokenizer.token_text(tokenizer.encode("世")[0]) == "\ufffd"
    assert sentencepiece().token_bytes(sentencepiece().token_id("<0xE4>")) == b"\xe4"


def ended(text: str, stops: tuple[str, ...], include_stop: bool) -> tuple[str, bool]:
    """By the definition: the first character at which any stop string is complete; the longest one there."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end if include_stop else end - max(map(len, matching))], True
    return text, False


def longest_begun(text: str, stops: tuple[str, ...]) -> int:
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


small_text = st.text("ab\nc", max_size=24)
small_stops = st.lists(st.text("ab\nc", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


@given(st.lists(small_text, max_size=8), small_stops, st.booleans())
def test_stop_search_follows_the_definition(parts: list[str], stops: tuple[str, ...], include_stop: bool) -> None:
    search = StopSearch(stops, include_stop=include_stop)
    expected, found = ended("".join(parts), stops, include_stop)
    seen, given_out = "", ""
    for part in parts:
        seen += part
        given_out += search.put(part)
        if not search.found:
            # nothing that may become a stop string is out, and nothing else is held
            assert given_out == seen[: len(seen) - longest_begun(seen, stops)]
    assert (search.found is not None) == found and (search.found is None or search.found in stops)
    assert given_out + search.flush() == expected


def random_stops(text: str, rng: random.Random) -> tuple[str, ...]:
    stops = []
    for _ in range(rng.randrange(1, 4)):
        if text and rng.random() < 0.6:
            start = rng.randrange(len(text))
            stops.append(text[start : start + rng.randrange(1, 8)])
        else:
            stops.append(rng.choice(["\n\n", "\n", "###", "zz", "�", " the", "d. I", "🙂🙂"]))
    return tuple(stops)


@pytest.mark.parametrize("family", FAMILIES)
def test_stop_strings_across_tokens(family: str, rng: random.Random) -> None:
    tokenizer: Tokenizer = FAMILIES[family]()
    num_found = 0
    for _ in range(300):
        ids = random_ids(tokenizer, rng)
        text = tokenizer.decode(ids)
        stops = random_stops(text, rng)
        include_stop = rng.random() < 0.5
        detokenizer = tokenizer.detokenizer(stops, include_stop=include_stop)
        got = ""
        for num_read, token_id in enumerate(ids, start=1):
            got += detokenizer.put(token_id)
            assert text.startswith(got) or detokenizer.stopped
            if detokenizer.stopped:
                break
        got += detokenizer.flush()
        # the completion ends with the token that completes a stop string, so that is all the text there is
        expected, found = ended(tokenizer.decode(ids[:num_read]) if ids else "", stops, include_stop)
        assert (got, detokenizer.stopped) == (expected, found), (ids, stops)
        assert not found or detokenizer.put(0) == "" == detokenizer.flush()
        num_found += found
    assert num_found > 20


@pytest.mark.parametrize("family", ["smollm2", "sentencepiece", "wordpiece"])
def test_stop_strings_of_the_first_tokens_are_text(family: str, rng: random.Random) -> None:
    tokenizer: Tokenizer = FAMILIES[family]()
    num_found = num_passed = 0
    for _ in range(300):
        ids = tokenizer.encode(rng.choice(TEXTS[:4]), add_special_tokens=False)
        stops = random_stops(tokenizer.decode(ids), rng)
        whole = [n for n in range(len(ids)) if not tokenizer.decode(ids[:n]).endswith("\ufffd")]
        min_tokens = rng.choice(whole)  # within no character
        detokenizer = tokenizer.detokenizer(stops, min_tokens=min_tokens)
        got, read = "", 0
        while read < len(ids) and not detokenizer.stopped:
            got += detokenizer.put(ids[read])
            read += 1
        got += detokenizer.flush()
        texts = [tokenizer.decode(ids[:n]).rstrip("\ufffd") for n in range(len(ids) + 1)]  # whole characters
        begin = len(texts[min_tokens])
        ends = [end for stop in stops for end in range(begin + 1, len(texts[-1]) + 1) if texts[-1][:end].endswith(stop)]
        assert detokenizer.stopped == bool(ends), (ids, stops, min_tokens)
        if ends:
            assert len(texts[read - 1]) < min(ends) <= len(texts[read]) and texts[-1].startswith(got)
        else:
            assert got == texts[-1]
        num_found += bool(ends)
        num_passed += any(stop in texts[min_tokens] for stop in stops)
    assert num_found > 20 and num_passed > 20


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, ""), (1, ""), (2, "\n\na"), (4, "\n\na"), (5, "\n\na\n\na"), (9, "\n\na\n\na")]
)
def test_stop_strings_of_the_first_tokens_in_a_run_of_bytes(min_tokens: int, text: str) -> None:
    tokenizer = sentencepiece(strip=False)
    newline, letter = tokenizer.token_id("<0x0A>"), tokenizer.token_id("a")
    detokenizer = tokenizer.detokenizer(("\n\n",), min_tokens=min_tokens)
    assert "".join(pieces(detokenizer, [newline, newline, letter, newline, newline, letter])) == text


def test_a_stop_string_within_a_run_of_bytes_stops_at_once() -> None:
    """Such a run is held back, as what comes may still change it; but nothing comes after a stop string."""
    for tokenizer in (sentencepiece(), sentencepiece(strip=False)):
        newline, blank = tokenizer.token_id("<0x0A>"), tokenizer.token_id("<0x20>")
        letter, half = tokenizer.token_id("a"), tokenizer.token_id("<0xE4>")
        for before in ([], [letter], [blank, blank], [letter, blank]):
            detokenizer = tokenizer.detokenizer(("\n\n",))
            got = [detokenizer.put(i) for i in [*before, newline, newline]]
            assert detokenizer.stopped and "".join(got) == tokenizer.decode(before), before
        detokenizer = tokenizer.detokenizer(("\n\n", "\ufffd\ufffd\ufffda"))
        assert not any(detokenizer.put(i) for i in (half, newline, newline))  # three U+FFFD: it is no UTF-8
        assert not detokenizer.stopped and detokenizer.put(letter) == "" and detokenizer.stopped
        stripped = tokenizer.detokenizer((" b",))
        assert not any(stripped.put(i) for i in (blank, tokenizer.token_id("<0x62>")))
        assert stripped.stopped is (tokenizer.decode([blank]) == " ")


def test_newline_that_is_held_comes_with_the_next_text() -> None:
    tokenizer = smollm2()
    newline, word = tokenizer.token_id("Ċ"), tokenizer.encode("word")[0]
    detokenizer = tokenizer.detokenizer(("\n\n",))
    assert [detokenizer.put(i) for i in (word, newline, word, newline)] == ["word", "", "\nword", ""]
    assert not detokenizer.stopped
    assert detokenizer.put(newline) == ""
    assert detokenizer.stopped
    assert detokenizer.put(word) == "" == detokenizer.flush()


def test_stop_string_is_kept_when_asked() -> None:
    tokenizer = smollm2()
    detokenizer = tokenizer.detokenizer((" fox", "brown f"), include_stop=True)
    got = "".join(pieces(detokenizer, tokenizer.encode("The quick brown fox jumps")))
    assert got == "The quick brown f"  # both are in it; the one that is complete first wins


def test_completions_do_not_share_state() -> None:
    tokenizer = smollm2()
    texts = [text for text in TEXTS if text]
    detokenizers = [tokenizer.detokenizer(("never to be seen",)) for _ in texts]
    columns = [tokenizer.encode(text) for text in texts]
    got = [""] * len(texts)
    for step in range(max(map(len, columns))):
        for i, ids in enumerate(columns):
            if step < len(ids):
                got[i] += detokenizers[i].put(ids[step])
    assert [g + d.flush() for g, d in zip(got, detokenizers, strict=True)] == texts
