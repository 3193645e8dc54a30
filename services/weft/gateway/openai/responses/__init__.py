"""``/v1/responses``: OpenAI's newer interface to a chat, of items; nothing is kept between requests."""

from functools import partial

from starlette.types import ASGIApp

from weft.gateway.openai.chat import ChatRequest
from weft.gateway.openai.endpoint import Endpoint, EndpointCall
from weft.gateway.openai.parts import part_response
from weft.gateway.openai.responses.request import FIELDS, NOTHING_KEPT, parse
from weft.gateway.openai.responses.writer import ResponseWriter
from weft.gateway.openai.text_model import TextModel


async def _respond(request: ChatRequest, model: TextModel, call: EndpointCall) -> ASGIApp:
    return await part_response(request, model, call, partial(ResponseWriter, request, request.model))


ENDPOINT = Endpoint("/v1/responses", TextModel, parse, _respond, FIELDS, nothing_below=NOTHING_KEPT)
