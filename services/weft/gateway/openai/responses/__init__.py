"""``/v1/responses``: OpenAI's newer interface to a chat, of items; nothing is kept between requests."""

from functools import partial

from weft.gateway.openai.endpoint import Endpoint
from weft.gateway.openai.parts import part_response
from weft.gateway.openai.responses.request import FIELDS, NOTHING_KEPT, parse
from weft.gateway.openai.responses.writer import ResponseWriter
from weft.gateway.openai.text_model import TextModel

_respond = partial(part_response, writer=ResponseWriter)
ENDPOINT = Endpoint("/v1/responses", TextModel, parse, _respond, FIELDS, nothing_below=NOTHING_KEPT, operation="chat")
