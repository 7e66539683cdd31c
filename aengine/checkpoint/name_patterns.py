"""`NamePatterns`: a list of module names in a model's files, some of them as regular expressions.

`re` never runs those: it backtracks for as long as a pattern's author likes. They are run by llguidance, whose automata
take a step a byte of the name, and whose states are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import ModelLoadError

_MOST_LETTERS = 1 << 14
"""Letters of all patterns together. Real lists have a few hundred."""
_MOST_STATES = 20_000
_CURE = "write it otherwise in a copy of the file, or as the names that it means"
_PIECE = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*+\]|\(\?:|.", re.DOTALL)
"""Of a pattern: an escape, a class, the beginning of a group, or one letter."""


class NamePatterns:
    """The names that ``entries`` stand for: each is a name, or "re:" and a pattern of names' beginnings.

    A pattern means what it means to `re.match`. Raises ModelLoadError, which begins with ``where``, a file and its key,
    for one that is wrong, that looks around, refers back or sets flags, or that has ``^`` or ``$`` elsewhere than at
    the ends of an alternative.
    """

    def __init__(self, entries: Sequence[str], where: str) -> None:
        self._where = where
        self._names = frozenset(entry for entry in entries if not entry.startswith("re:"))
        patterns = [entry[3:] for entry in entries if entry.startswith("re:")]
        if sum(map(len, patterns)) > _MOST_LETTERS:
            raise ModelLoadError(f"{where} has patterns of more than {_MOST_LETTERS} letters")
        self._automaton = self._compiled(patterns) if patterns else None

    def __contains__(self, name: str) -> bool:
        if name in self._names or self._automaton is None:
            return name in self._names
        data = list(name.encode())
        self._automaton.reset()
        is_whole = self._automaton.try_consume_tokens(data) == len(data) and self._automaton.is_accepting()
        if self._automaton.is_error():
            raise ModelLoadError(f"{self._where} has patterns of too many states: {self._automaton.get_error():.80}")
        return bool(is_whole)

    def _compiled(self, patterns: Sequence[str]) -> Any:
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from  # few checkpoints have patterns

        whole = "|".join(part for pattern in patterns for part in self._of_whole_names(pattern))
        limits = LLParserLimits(max_lexer_states=_MOST_STATES)
        made = LLMatcher(LLTokenizer("byte"), grammar_from("regex", whole), limits=limits, log_level=0)
        if made.is_error():
            if len(patterns) > 1:  # the error quotes the one that is wrong
                for half in (patterns[: len(patterns) // 2], patterns[len(patterns) // 2 :]):
                    self._compiled(half)
            message = made.get_error()
            raise self._refusal(patterns[0], (message.partition("error: ")[2] or message).partition("\n")[0])
        return made

    def _of_whole_names(self, pattern: str) -> Iterator[str]:
        """Yield the pattern's alternatives, each as one of whole names."""
        part: list[str] = []
        depth = 0
        for piece in [*_PIECE.findall(pattern), ""]:
            if piece == "" and depth:
                raise self._refusal(pattern, "its brackets are not in pairs")
            if piece == "" or (piece == "|" and depth == 0):
                is_to_end = part[-1:] == ["$"]
                yield f"(?:{''.join(part[: -1 if is_to_end else None])})" + ("" if is_to_end else "(?s:.*)")
                part = []
                continue
            if piece in ("[", "\\"):
                raise self._refusal(pattern, "a class or an escape has no end")
            if piece == "?" and part[-1:] == ["("]:
                raise self._refusal(pattern, "it looks around, sets flags or names a group")
            depth += piece.startswith("(") - (piece == ")")
            if depth < 0:
                raise self._refusal(pattern, "its brackets are not in pairs")
            part.append(piece)

    def _refusal(self, pattern: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self._where}: aengine can't read the pattern {pattern!r:.80}: {problem:.200}; {_CURE}")
