"""Grammars of the running requests: compiled before they are queued, in a pool, never on the loop.

admission ──prepare──> Compiled ──RequestGrammar──> Request.grammar ──BitmaskFiller──> GRAMMAR frames

step N     [ forward N ][ sample N ]
step N+1                [ forward N+1 ...........  ][ sample N+1 ]       a forward needs no grammar, sampling does
host                    answer N ─> accept ids of N, fill rows ─> GRAMMAR frame N+1
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import AEngineError, EngineClosedError
from ...params import StructuredOutput
from ..threads.pools import ThreadPool
from .bitmasks import BitmaskFiller

if TYPE_CHECKING:
    from ..tokenizer.tokenizer import Tokenizer
    from .backend import Compiled
    from .compiler import GrammarCompiler
    from .spec import GrammarSpec

T = TypeVar("T")
_SHORT = 2000  # characters


class GrammarService:
    """Compiles for one engine, and has what fills its bitmasks; lives on its loop."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer: Tokenizer | None = tokenizer
        self.vocab_size = vocab_size
        self._compiler: GrammarCompiler | None = None
        self.bitmasks = BitmaskFiller(vocab_size)
        self._planner = ThreadPool("grammar-plan", 2)
        self._warming: asyncio.Task[None] | None = None
        self._closed = False

    def begin_warm_up(self) -> None:
        """Load the grammar library and make its tables while the engine starts, in a thread."""
        self._warming = asyncio.get_running_loop().create_task(self._warm_up(), name="aengine-grammar-warm-up")

    async def _warm_up(self) -> None:
        try:
            await self._opened().warm_up()
        except AEngineError:
            pass  # the first request with a grammar tries again, and gets the error

    def _opened(self) -> GrammarCompiler:
        """Return the compiler, with the threads that its grammars' bitmasks need.

        Raises EngineClosedError, and EngineOverloadedError if no thread can be started; the next request retries.
        """
        if self._closed:
            raise EngineClosedError("the engine is closed: it compiles no more grammars")
        if self._compiler is None:
            from .compiler import GrammarCompiler
            from .vocabulary import Vocabulary

            assert self._tokenizer is not None, "it is not closed"
            self.bitmasks.begin()
            self._compiler = GrammarCompiler(partial(Vocabulary.of, self._tokenizer, self.vocab_size))
        return self._compiler

    async def prepare(self, wanted: StructuredOutput | GrammarSpec) -> Compiled:
        """Return the compiled grammar. Raises GrammarError, EngineOverloadedError, EngineClosedError, InternalError."""
        from .spec import spec_of

        if isinstance(wanted, StructuredOutput):
            # A large schema is walked for some 50 ms: not on the loop.
            wanted = spec_of(wanted) if _is_short(wanted) else await self.run(spec_of, wanted)
        return await self._opened().compile(wanted)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run ``function(*args)``, which describes a type or reads a schema, in one of two threads for all requests."""
        if self._closed:
            raise EngineClosedError("the engine is closed")
        return await self._planner.run(function, *args)

    def drop_tables(self) -> None:
        """Free the tokenizer and the library's tables, once requests have ended. `aclose` may follow."""
        self._closed = True
        self._tokenizer = None
        if self._compiler is not None:
            self._compiler.drop_tables()

    def close(self) -> None:
        """End the threads, without waiting for them; from any thread."""
        self._closed = True
        if self._compiler is not None:
            self._compiler.abandon()
        self.bitmasks.close()
        self._planner.close()

    async def aclose(self) -> None:
        """Close, and wait for the threads; at most a second for a compile in progress."""
        self._closed = True
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait([self._warming])
        if self._compiler is not None:
            await self._compiler.aclose()
        await self.bitmasks.aclose()
        await self._planner.aclose()


def _is_short(wanted: StructuredOutput) -> bool:
    """Return whether the text of the constraint is read faster than a thread would be asked to read it."""
    text = wanted.json_schema if isinstance(wanted.json_schema, str) else wanted.regex or wanted.grammar
    return wanted.json_object or (text is not None and len(text) < _SHORT)
