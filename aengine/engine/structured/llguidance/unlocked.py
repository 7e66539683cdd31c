"""Builds llguidance's tables without the GIL, by the C interface that its shared library exports as well.

    texts, slices ── llg_new_tokenizer_v2, without the GIL ──> LlgTokenizer { factory }
                                                                              ⇅ exchanged: one pointer each
    LLTokenizer("byte") ── a small one of Python's ──────────> LLTokenizer  { factory } ──> LLMatcher(...)

Python's constructor holds the GIL all the time: 0.16 s for 49,152 tokens, 1.7 s for 262,144, in which the host's loop
would stand still. The C interface (llguidance.h) builds the same object, a reference-counted `ParserFactory` of the
same Rust type, but matchers of Python's interface want Python's `LLTokenizer`. Both are structs of this one pointer, so
they exchange it. That is only known of the versions in `KNOWN_VERSIONS`: `can_build` refuses others, and tables are
then built with the GIL held.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence

import llguidance
from llguidance import _lib

from ..vocabulary import in_turns

KNOWN_VERSIONS = frozenset({"1.9.1"})
"""Versions in whose sources `LLTokenizer` (python_ext/src/py.rs) and `LlgTokenizer` (parser/src/ffi.rs) are structs of
one field, ``factory: Arc<ParserFactory>``. Read both before you add one."""
_SPECIAL = b"\xff"
"""What the library puts before the names of tokens that are no text."""
_HEADER_BYTES = object.__basicsize__

_Tokenize = ctypes.CFUNCTYPE(
    ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint32), ctypes.c_size_t
)


class _Init(ctypes.Structure):
    """`LlgTokenizerInitV2` of llguidance.h."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", ctypes.c_void_p),
        ("token_bytes", ctypes.c_char_p),
        ("tokenizer_json", ctypes.c_char_p),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", _Tokenize),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", ctypes.c_void_p),
        ("slices", ctypes.c_void_p),
        ("tok_eos_extra", ctypes.c_void_p),
        ("tok_eos_extra_count", ctypes.c_uint32),
    )


def can_build() -> bool:
    """Return whether `build` knows the installed version of the library."""
    has_one_field = llguidance.LLTokenizer.__basicsize__ == _HEADER_BYTES + ctypes.sizeof(ctypes.c_void_p)
    return llguidance.__version__ in KNOWN_VERSIONS and has_one_field


def build(
    tokens: Sequence[bytes],
    special_ids: Sequence[int],
    eos_ids: Sequence[int],
    slices: Sequence[str],
    encode: Callable[[bytes], list[int]],
) -> tuple[llguidance.LLTokenizer, object]:
    """Build the tables. ``encode``: the ids of a forced text, called in any thread.

    Returns the tokenizer, and what must be kept as long as it or any matcher of it. Raises ValueError as the library's
    constructor does.
    """

    def tokenize(_: int | None, address: int, size: int, ids: ctypes._Pointer[ctypes.c_uint32], most: int) -> int:
        found = encode(ctypes.string_at(address, size))
        for i, token_id in enumerate(found[:most]):
            ids[i] = token_id
        return len(found)

    interface = ctypes.CDLL(_lib.__file__)  # the module's own library, which is loaded already
    interface.llg_new_tokenizer_v2.restype = ctypes.c_void_p
    interface.llg_free_tokenizer.argtypes = (ctypes.c_void_p,)
    interface.llg_free_tokenizer.restype = None
    callback = _Tokenize(tokenize)
    text, lengths = _joined(tokens, frozenset(special_ids))
    slice_texts = (ctypes.c_char_p * (len(slices) + 1))(*(slice_.encode() for slice_ in slices), None)
    more_eos = array("I", eos_ids[1:])
    init = _Init(
        struct_size=ctypes.sizeof(_Init),
        vocab_size=len(tokens),
        tok_eos=eos_ids[0],
        token_lens=lengths.buffer_info()[0],
        token_bytes=text,
        tokenize_assumes_string=True,
        tokenize_fn=callback,
        slices=ctypes.addressof(slice_texts),
        tok_eos_extra=more_eos.buffer_info()[0] if more_eos else None,
        tok_eos_extra_count=len(more_eos),
    )
    message = ctypes.create_string_buffer(1024)
    built = interface.llg_new_tokenizer_v2(ctypes.byref(init), message, ctypes.c_size_t(len(message)))
    if not built:
        raise ValueError(message.value.decode(errors="replace"))
    tokenizer = llguidance.LLTokenizer("byte", slices=[])
    try:
        exchange(id(tokenizer) + _HEADER_BYTES, built)
    finally:
        interface.llg_free_tokenizer(built)
    assert tokenizer.vocab_size == len(tokens)
    return tokenizer, callback


def _joined(tokens: Sequence[bytes], special_ids: frozenset[int]) -> tuple[bytes, array[int]]:
    """Return the bytes of all tokens, one after the other, and the length of each."""
    text = bytearray()
    lengths = array("I")
    for i in in_turns(range(len(tokens))):
        token = _SPECIAL + tokens[i] if i in special_ids else tokens[i]
        text += token
        lengths.append(len(token))
    return bytes(text), lengths


def exchange(one: int, other: int) -> None:
    """Exchange the pointers at two addresses. Each is the only owner of what it points to: a count of 1, and one of
    weak references that is 1 as well, come first there. Raises ValueError when that is not so."""
    pointers = [ctypes.c_size_t.from_address(address) for address in (one, other)]
    for pointer in pointers:
        counts = list((ctypes.c_size_t * 2).from_address(pointer.value))
        if counts != [1, 1]:
            raise ValueError(f"llguidance's tables have other counts than expected: {counts}")
    pointers[0].value, pointers[1].value = pointers[1].value, pointers[0].value
