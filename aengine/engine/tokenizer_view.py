"""What a user sees of the model's tokenizer: `TokenizerView`, and `AsyncTokenizer`, which has its calls awaited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from ..errors import ContextLengthError, InvalidRequestError
from ..limits.checks import check_num_characters, check_num_messages, check_size
from ..limits.values import shown

if TYPE_CHECKING:
    from typing import Unpack

    from ..params import RenderOptions
    from .chat.prompt import ChatPrompt
    from .tokenizer.tokenizer import Tokenizer

P = ParamSpec("P")
R = TypeVar("R")

CALLS = ("encode", "decode", "count", "render", "render_ids")
"""Names of the calls that it makes."""

Ask = Callable[[str, Sequence[Any], Mapping[str, Any]], Awaitable[Any]]
"""Calls the engine's tokenizer, bounded and off every loop: the name of the call, its arguments, its options."""


class TokenizerView:
    """The model's tokenizer and chat template.

    Its methods block: about 0.2 ms for each kB of text. On an event loop await `AsyncLLM.async_tokenizer`, which has
    the same ones. Any thread may call them, also several at once, and after the engine was closed.
    """

    def __init__(self, tokenizer: Tokenizer | None, num_model_ids: int, max_model_len: int | None = None) -> None:
        """
        Args:
            num_model_ids: of the model, which may know more ids than the tokenizer.
            max_model_len: what is larger than a prompt of so many tokens may be is a ContextLengthError. None: the
                caller's thread takes what it was given.

        Raises InvalidRequestError if there is no tokenizer.
        """
        if tokenizer is None:
            raise InvalidRequestError(
                "there is no tokenizer: the engine was started with skip_tokenizer=True", param="skip_tokenizer"
            )
        self._tokenizer = tokenizer
        self._num_ids = max(num_model_ids, tokenizer.vocab_size)
        self._max_model_len = max_model_len

    def __repr__(self) -> str:
        return f"<TokenizerView of {self.vocab_size} tokens>"

    @property
    def vocab_size(self) -> int:
        """The largest token id plus one."""
        return self._tokenizer.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if the model has such a token."""
        return self._tokenizer.bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a completion."""
        return self._tokenizer.eos_token_ids

    @property
    def special_tokens(self) -> dict[str, int]:
        """The ids of the model's control tokens, by name."""
        return self._tokenizer.special_tokens

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a template for messages."""
        return self._tokenizer.has_chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Return the token ids of a text; without further arguments those that ``generate(text)`` gives the model.

        Args:
            add_special_tokens: begin it as the model was trained to, with its BOS token as a rule.
            allow_special: names of special tokens in the text ("<|im_end|>") become those tokens. False: they stay
                text; for texts of others that you put into a prompt of your own.

        Raises:
            InvalidRequestError: it is no text, or not Unicode (a lone surrogate).
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"text must be a string, not {type(text).__name__}", param="text")
        if self._max_model_len is not None:
            check_num_characters(str.__len__(text), self._max_model_len)
        if allow_special:
            return self._tokenizer.encode(str.__str__(text), add_special_tokens)
        return self._tokenizer.encode_plain(text, add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; incomplete characters become U+FFFD, and the model's ids without a text are
        left out.

        Raises:
            InvalidRequestError: one of them is no id of the model.
        """
        try:
            if self._max_model_len is not None and len(ids) > self._max_model_len:
                raise ContextLengthError(len(ids), self._max_model_len)
            for i in ids:
                if not 0 <= i < self._num_ids:
                    raise self._no_such_token(i)
            return self._tokenizer.decode(ids, skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise InvalidRequestError(f"ids must be a list of token ids: {error}", param="ids") from error

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for: its name for a control token, b"" for an id without a text.

        Raises:
            InvalidRequestError: it is no id of the model.
        """
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < self._num_ids:
            raise self._no_such_token(token_id)
        return self._tokenizer.token_bytes(token_id)

    def count(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        **options: Unpack[RenderOptions],
    ) -> int:
        """Return a prompt's number of tokens: ``usage.prompt_tokens`` of ``generate`` with this text, or of ``chat``
        with these messages and options. Errors as of `encode` and `render`."""
        if isinstance(prompt, str):
            return len(self.encode(prompt))
        return len(self.render_ids(prompt, tools, **options))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        **options: Unpack[RenderOptions],
    ) -> str:
        """Return the prompt that ``chat`` makes of messages, as a text to look at. Arguments are those of
        `AsyncLLM.stream_chat`.

        For a prompt to generate from take `render_ids`: in a text, what a message says can't be told any more from
        what the template says.

        Raises:
            InvalidRequestError: there is no chat template, it refuses the messages, or an option is wrong.
        """
        prompt = self._prompt(messages, tools, options)
        if self._max_model_len is not None:
            check_num_characters(len(prompt.text), self._max_model_len)
        return prompt.text.plain()

    def render_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        **options: Unpack[RenderOptions],
    ) -> list[int]:
        """Return the token ids of the prompt that ``chat`` makes of messages. Arguments and errors: see `render`."""
        return self._prompt(messages, tools, options).ids(self._tokenizer, self._max_model_len)

    def _no_such_token(self, token_id: object) -> InvalidRequestError:
        message = f"there is no token {shown(token_id)}: ids are 0 to {self._num_ids - 1}"
        return InvalidRequestError(message, param="ids")

    def _prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, options: RenderOptions
    ) -> ChatPrompt:
        from .chat.prompt import ChatPrompt, PromptOptions  # imported late: it imports all of the chat package
        from .tokenizer.messages import checked_messages

        if self._max_model_len is not None:
            check_num_messages(self._max_model_len, messages, tools)
            check_size((messages, tools, options), self._max_model_len)
        return ChatPrompt.of(self._tokenizer, checked_messages(messages), tools, PromptOptions.of(**options))


def _awaited(
    method: Callable[Concatenate[TokenizerView, P], R],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """Return a call of `TokenizerView` as one that is awaited."""
    takes = signature(method)

    @wraps(method)
    async def ask(self: AsyncTokenizer, /, *args: P.args, **options: P.kwargs) -> R:
        given = takes.bind(self, *args, **options)  # raises TypeError here
        given.apply_defaults()
        answer: R = await self._ask(method.__name__, given.args[1:], given.kwargs)
        return answer

    return ask


class AsyncTokenizer:
    """The model's tokenizer and chat template for code on an event loop: `TokenizerView`'s calls, awaited.

    The engine makes them in threads of its own, long ones apart from short ones. Cancelling one that waits takes it
    back. Beside the errors of `TokenizerView` each raises:
        ContextLengthError: more text, messages, tools or token ids than a prompt of this engine may have.
        EngineOverloadedError: too many of them wait.
        EngineClosedError: the engine is not running.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    encode = _awaited(TokenizerView.encode)
    decode = _awaited(TokenizerView.decode)
    count = _awaited(TokenizerView.count)
    render = _awaited(TokenizerView.render)
    render_ids = _awaited(TokenizerView.render_ids)
