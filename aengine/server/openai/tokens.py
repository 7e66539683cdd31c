"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, with vLLM's bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import StrictBool
from starlette.requests import Request
from starlette.responses import Response

from ..http import HTTPError, JSONAnswer, while_connected
from ..service import Service
from .requests import Body, Ignored, Messages, TokenIds, Tools, Variables

if TYPE_CHECKING:
    from ...engine.tokenizer_view import AsyncTokenizer


class TokenizeBody(Body):
    """A text (``prompt``), or a chat (``messages``) as the model's chat template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool = False
    tools: Tools | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    chat_template_kwargs: Variables | None = None
    mm_processor_kwargs: Ignored = None

    def field_names(self) -> dict[str, str]:
        return {"text": "prompt"}

    def check(self) -> None:
        """Raise HTTPError 400."""
        if (self.prompt is None) == (self.messages is None):
            raise HTTPError(400, "give either prompt, a text, or messages, a chat", param="prompt")
        if self.messages is not None and self.add_special_tokens:
            message = "add_special_tokens is for a prompt: of messages the chat template writes them"
            raise HTTPError(400, message, param="add_special_tokens")

    async def encode(self, tokenizer: AsyncTokenizer) -> list[int]:
        """Return the token ids, those that a request with this prompt would have."""
        if self.prompt is not None:
            return await tokenizer.encode(self.prompt, add_special_tokens=self.add_special_tokens is not False)
        assert self.messages is not None
        return await tokenizer.render_ids(
            self.messages,
            self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds

    def field_names(self) -> dict[str, str]:
        return {"ids": "tokens", "token_ids": "tokens"}


async def tokenize(service: Service, request: Request) -> Response:
    """Answer with the tokens of a prompt."""
    body = await service.body(request, TokenizeBody)
    body.check()
    ids = await while_connected(request, body.encode(service.engine.async_tokenizer))
    head = {"count": len(ids), "max_model_len": service.engine.describe()["max_model_len"], "tokens": ids}
    tokenizer = service.engine.tokenizer

    def answer() -> dict[str, Any]:
        strs = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids] if body.return_token_strs else None
        return head | {"token_strs": strs}

    return await service.answer(answer, len(ids))


async def detokenize(service: Service, request: Request) -> Response:
    """Answer with the text of tokens, special ones included."""
    body = await service.body(request, DetokenizeBody)
    decoding = service.engine.async_tokenizer.decode(body.tokens, skip_special_tokens=False)
    return JSONAnswer({"prompt": await while_connected(request, decoding)})


async def tokenizer_info(service: Service, request: Request) -> Response:
    """Answer with the names of the tokens that begin and end texts, as a tokenizer_config.json has them."""
    tokenizer = service.engine.tokenizer
    names = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
    ends = [names[token_id] for token_id in sorted(tokenizer.eos_token_ids) if token_id in names]
    begin = tokenizer.bos_token_id
    return JSONAnswer(
        {
            "bos_token": None if begin is None else names.get(begin),
            "eos_token": ends[0] if ends else None,
            "vocab_size": tokenizer.vocab_size,
        }
    )
