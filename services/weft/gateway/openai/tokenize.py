"""``/tokenize`` and ``/detokenize``, with the bodies of vLLM's server: token ids of a text or chat, and back."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import override

from weft.base.core import InferCall, RequestedOutput
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import Array, decode, split_bytes
from weft.gateway.errors import RequestError
from weft.gateway.http.responding import json_array_response
from weft.gateway.openai import chat
from weft.gateway.openai.chat import TEMPLATE_FIELDS, ChatRequest, template_values
from weft.gateway.openai.completions import MAX_PROMPT_CHARS, token_ids
from weft.gateway.openai.endpoint import Endpoint, EndpointCall
from weft.gateway.openai.fields import Field, Fields, boolean, string, unsupported
from weft.gateway.openai.generate import invalid_response
from weft.gateway.openai.text_model import TextModel
from weft.gateway.openai.text_request import MODEL, PARSES_SPECIAL_TOKENS, TIMEOUT, Prompt, TextRequest, timeout_s
from weft.gateway.openai.tools.request import parse_tool_use
from weft_protos.model_config_pb2 import ModelConfig

PROMPT_IDS, PROMPT_TEXT = "prompt_token_ids", "prompt_text"


class TokenModel(TextModel):
    """A text model whose tokenizer can be asked."""

    lacks: ClassVar[str] = (
        f"has no tokenizer that can be asked: it needs the outputs {PROMPT_IDS} and {PROMPT_TEXT}, as models of the "
        "backend 'llm' have them; name the language model itself, not a graph around it"
    )

    @override
    @classmethod
    def from_config(cls, config: ModelConfig, template_source: str | None = None) -> Self | None:
        names = {spec.name for spec in config.output}
        return super().from_config(config, template_source) if {PROMPT_IDS, PROMPT_TEXT} <= names else None


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A validated body: a prompt, or a chat that makes one."""

    model: str
    prompt: "Prompt | ChatRequest"
    parameters: Mapping[str, bool]
    timeout_s: float | None


_TEXT = (
    string("prompt", MAX_PROMPT_CHARS, "the text; or `messages` in its place"),
    boolean("add_special_tokens", "tokens such as `<s>` are added", "true for `prompt`, false for `messages`"),
    boolean(PARSES_SPECIAL_TOKENS, "special tokens in what users write are special, else text"),
    unsupported("return_token_strs", "POST /detokenize with one id has its text"),
    MODEL,
    TIMEOUT,
)


def parse_text(fields: Fields, headers: Mapping[str, str]) -> TokenizeRequest:
    """Parse a body with ``prompt`` or ``messages``. Raises RequestError."""
    own = fields.read(_TEXT)
    has_chat = fields.raw("messages") is not None
    if has_chat == ("prompt" in own):
        raise RequestError("give one of 'prompt' and 'messages'", param="prompt")
    limit_s = timeout_s(fields, headers)
    given = fields.read(TEMPLATE_FIELDS if has_chat else TEMPLATE_FIELDS[1:])
    if has_chat:
        return chat_tokens(own, template_values(given, parse_tool_use(given), given.get("reasoning_effort")), limit_s)
    for name in given:  # of a chat
        fields.ignore(name)
    parameters = {
        "add_special_tokens": own.get("add_special_tokens", True),
        PARSES_SPECIAL_TOKENS: own.get(PARSES_SPECIAL_TOKENS, False),
    }
    return TokenizeRequest(own["model"], own.get("prompt", ""), parameters, limit_s)


def chat_tokens(own: Mapping[str, Any], template: Mapping[str, Any], limit_s: float | None) -> TokenizeRequest:
    """A request for the token ids of a chat, given the values of fields of ``/tokenize``, and ``template_values``."""
    chosen = ChatRequest(
        TextRequest(own["model"], {}, False, False, {}, limit_s),
        **template,
        has_special_tokens=own.get(PARSES_SPECIAL_TOKENS, False),
    )
    parameters = {
        "add_special_tokens": own.get("add_special_tokens", False),
        PARSES_SPECIAL_TOKENS: own.get(PARSES_SPECIAL_TOKENS, True),  # those of the template are
    }
    return TokenizeRequest(own["model"], chosen, parameters, limit_s)


async def ask_ids(request: TokenizeRequest, model: TokenModel, call: EndpointCall) -> Array:
    """The token ids. Raises RequestError, RemoteError, and InternalError if the model answers what does not fit."""
    prompt = await chat.render(request.prompt, model) if isinstance(request.prompt, ChatRequest) else request.prompt
    ids: Array = await _ask(request, model, prompt, call, PROMPT_IDS)
    return ids


async def _respond_ids(request: TokenizeRequest, model: TokenModel, call: EndpointCall) -> ASGIApp:
    ids = await ask_ids(request, model, call)
    return await json_array_response({"count": len(ids), "max_model_len": None, "token_strs": None}, "tokens", ids)


def _tokens(fields: Fields, name: str) -> Prompt:
    given = fields.raw(name)
    if not isinstance(given, list):
        raise RequestError(f"'{name}' must be an array of token ids", param=name)
    return token_ids(given, name)


_IDS = (Field("tokens", "token ids", "the ids", "required", _tokens), MODEL, TIMEOUT)


def parse_ids(fields: Fields, headers: Mapping[str, str]) -> TokenizeRequest:
    """Parse a body with ``tokens``. Raises RequestError."""
    own = fields.read(_IDS)
    return TokenizeRequest(own["model"], own["tokens"], {}, timeout_s(fields, headers))


async def _respond_text(request: TokenizeRequest, model: TokenModel, call: EndpointCall) -> ASGIApp:
    prompt: Any = request.prompt
    text = (await _ask(request, model, prompt, call, PROMPT_TEXT)) if prompt else ""
    return JSONResponse({"prompt": text})


async def _ask(request: TokenizeRequest, model: TokenModel, prompt: Prompt, call: EndpointCall, output: str) -> Any:
    """One output of the model, decoded. Raises RequestError, RemoteError, and InternalError if it does not fit."""
    inputs, request_id = model.prompt_input(prompt, "tokens"), f"tokenize-{uuid.uuid4().hex}"
    asked = InferCall(model.name, "", request_id, request.parameters, inputs, (RequestedOutput(output, {}),))
    result = await call.resources.router.infer(
        asked, timeout_s=call.timeout_s(request.timeout_s), metadata=call.context.metadata()
    )
    try:
        tensor = result.outputs[output]
        if output == PROMPT_IDS:
            ids: Array = decode(tensor, name=output).ravel()
            return ids
        return split_bytes(tensor.data, name=output)[0].decode()
    except (InvalidArgumentError, LookupError, ValueError) as error:
        raise invalid_response(model.name) from error


TOKENIZE = Endpoint("/tokenize", TokenModel, parse_text, _respond_ids, (*_TEXT, *TEMPLATE_FIELDS[1:]))
DETOKENIZE = Endpoint("/detokenize", TokenModel, parse_ids, _respond_text, _IDS)
