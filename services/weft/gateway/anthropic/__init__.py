"""Anthropic's interface to a chat: ``/v1/messages``, and the tokens of one."""

from functools import partial

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from weft.gateway.anthropic.request import COUNT_FIELDS, FIELDS, parse, parse_count
from weft.gateway.anthropic.writer import MessageWriter
from weft.gateway.errors import anthropic_body
from weft.gateway.openai.endpoint import Endpoint, EndpointCall
from weft.gateway.openai.parts import part_response
from weft.gateway.openai.text_model import TextModel
from weft.gateway.openai.tokenize import TokenizeRequest, TokenModel, ask_ids


async def _count(request: TokenizeRequest, model: TokenModel, call: EndpointCall) -> ASGIApp:
    return JSONResponse({"input_tokens": len(await ask_ids(request, model, call))})


#: What is served besides OpenAI's.
ENDPOINTS = (
    Endpoint(
        "/v1/messages",
        TextModel,
        parse,
        partial(part_response, writer=MessageWriter),
        FIELDS,
        anthropic_body,
        operation="chat",
    ),
    Endpoint("/v1/messages/count_tokens", TokenModel, parse_count, _count, COUNT_FIELDS, anthropic_body),
)
