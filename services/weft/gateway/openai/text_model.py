"""Text models: models with the tensors of Triton Inference Server's vLLM backend.

Only ``text_output`` and a tensor for the prompt are required; graphs may lack the others.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar, Self

from weft import __version__
from weft.base.core import InferCall, RequestedOutput
from weft.base.errors import InternalError, InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor, encode_bytes
from weft.gateway.errors import RequestError
from weft.gateway.openai import answer, tools
from weft.gateway.openai.chat_template import ChatTemplate, special_texts
from weft.gateway.openai.text_request import Prompt, TextRequest
from weft_protos.model_config_pb2 import ModelConfig

TEXT_OUTPUT = "text_output"
OUTPUT_IDS = "output_ids"
FINISH_REASON = "finish_reason"
STOP_REASON = "stop_reason"
NUM_INPUT_TOKENS = "num_input_tokens"
NUM_CACHED_TOKENS = "num_cached_tokens"
NUM_OUTPUT_TOKENS = "num_output_tokens"
LOGPROBS, PROMPT_LOGPROBS = "logprobs", "prompt_logprobs"
TEXT_INPUT = "text_input"
INPUT_IDS = "input_ids"
STREAM = "stream"
SAMPLING = "sampling_parameters"
MESSAGES = "messages"
EXCLUDE_INPUT = "exclude_input_in_output"

#: Requested outputs, if the model has them.
_OUTPUTS = (TEXT_OUTPUT, FINISH_REASON, NUM_INPUT_TOKENS, NUM_CACHED_TOKENS, NUM_OUTPUT_TOKENS)
#: Further output if there are stop strings.
_STOP_OUTPUTS = (STOP_REASON,)
#: Further outputs if log probabilities are requested; the ids identify the sampled tokens.
_LOGPROBS_OUTPUTS = (LOGPROBS, OUTPUT_IDS)
#: Model parameters with the texts of special tokens, for the chat template.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_CHAT_TEMPLATE = "chat_template"
#: Model parameter with the texts of all of them, a JSON list.
_ALL_SPECIAL_TOKENS = "special_tokens"
#: Model parameters of one with adapters.
_ADAPTERS = ("lora_adapters", "max_loras")


@dataclass(frozen=True, slots=True)
class TextModel:
    """The interface of a text model.

    Attributes:
        template_source: Its chat template; "": it has none.
        special_tokens: Special tokens of its tokenizer, by their names in templates.
        special_texts: Texts of all special tokens.
        fingerprint: Of its configuration and Weft's version: answers to one seed may differ where it differs.
        has_adapters: Whether it may have some.
        adapter: The one of the request; "": none.
        tool_parser, reasoning_parser: Parameters that say how it writes tool calls and reasoning; "": as its chat
            template shows.
    """

    lacks: ClassVar[str] = "does not take and give text: it needs the tensors text_input and text_output"

    signature: ModelSignature
    template_source: str
    special_tokens: Mapping[str, str]
    special_texts: Sequence[str] = ()
    fingerprint: str = ""
    tool_parser: str = ""
    reasoning_parser: str = ""
    has_adapters: bool = False
    adapter: str = ""

    @classmethod
    def from_config(cls, config: ModelConfig, template_source: str | None = None) -> Self | None:
        """The model with this configuration, whose template ``template_source`` replaces; None: not a text model."""
        signature = ModelSignature.from_config(config, "")
        inputs, outputs = {spec.name for spec in signature.inputs}, {spec.name for spec in signature.outputs}
        if TEXT_INPUT not in inputs or TEXT_OUTPUT not in outputs:
            return None
        parameters = {key: value.string_value for key, value in config.parameters.items()}
        if template_source is None:
            template_source = parameters.get(_CHAT_TEMPLATE, "")
        special_tokens = {name: parameters[name] for name in _SPECIAL_TOKENS if name in parameters}
        texts = special_texts(parameters.get(_ALL_SPECIAL_TOKENS, "[]"), special_tokens.values())
        text = config.SerializeToString(deterministic=True) + template_source.encode() + __version__.encode()
        fingerprint = f"fp_{blake2b(text, digest_size=5).hexdigest()}"
        tool_parser, reasoning_parser = (parameters.get(name, "") for name in (tools.PARAMETER, answer.PARAMETER))
        has_adapters = any(parameters.get(name, "0") not in ("", "0") for name in _ADAPTERS)
        known = (signature, template_source, special_tokens, texts, fingerprint)
        return cls(*known, tool_parser, reasoning_parser, has_adapters)

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.signature.name

    @property
    def has_one_choice(self) -> bool:
        """Whether a response has the text of one choice, as that of a graph that detokenizes."""
        return any(spec.name == TEXT_OUTPUT and spec.dims == (1,) for spec in self.signature.outputs)

    @property
    def takes_messages(self) -> bool:
        """Whether it takes a chat as messages, as a model of another server."""
        return any(spec.name == MESSAGES and spec.datatype == "BYTES" for spec in self.signature.inputs)

    def template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            RequestError: The model has none.
            InternalError: It does not compile; the cause is not sent to clients.
        """
        if not self.template_source:
            raise RequestError(
                f"the model '{self.name}' has no chat template; use /v1/completions, or give the model one: "
                f"'chat_template' in its tokenizer_config.json, the parameter '{_CHAT_TEMPLATE}' in its config.pbtxt, "
                f"or the gateway's --chat-template {self.name}=FILE",
                param="model",
                code="no_chat_template",
            )
        try:
            return ChatTemplate(self.template_source, self.special_tokens, self.special_texts)
        except InvalidArgumentError as error:
            raise InternalError(f"the chat template of the model '{self.name}' cannot be used") from error

    def make_request(self, text_request: TextRequest, prompt: Prompt, request_id: str) -> InferCall:
        """The inference request for one prompt. Raises RequestError if the model does not support it."""
        inputs: dict[str, WireTensor] = {}
        sampling = {**text_request.sampling, **({"lora_name": self.adapter} if self.adapter else {})}
        specs = {spec.name: spec for spec in self.signature.inputs}
        if text_request.messages and self.takes_messages:
            inputs[MESSAGES] = self.tensor(specs[MESSAGES], text_data(text_request.messages))
        if isinstance(prompt, str) and not prompt and MESSAGES in inputs and specs[TEXT_INPUT].is_optional:
            pass  # there is no template, and no need of one
        else:
            inputs |= self.prompt_input(prompt)
        if SAMPLING in specs:
            inputs[SAMPLING] = self.tensor(specs[SAMPLING], text_data(json.dumps(sampling)))
        elif sampling.keys() - {"max_tokens"}:
            names = ", ".join(sorted(sampling))
            raise RequestError(f"the model '{self.name}' takes no sampling parameters, got {names}; leave them out")
        for name in {LOGPROBS, PROMPT_LOGPROBS} & sampling.keys() - {spec.name for spec in self.signature.outputs}:
            raise RequestError(
                f"the model '{self.name}' has no output '{name}', so it cannot report them; leave 'logprobs' and "
                f"'prompt_logprobs' out, or let the graph pass on '{name}' and '{OUTPUT_IDS}' of its language model",
                param=name,
            )
        if text_request.has_echo and EXCLUDE_INPUT not in specs:
            raise RequestError(
                f"the model '{self.name}' has no input '{EXCLUDE_INPUT}', which 'echo' sets; put the prompt before the "
                "answer yourself",
                param="echo",
            )
        given = text_request.sampling
        outputs = (
            *_OUTPUTS,
            *(_LOGPROBS_OUTPUTS if "logprobs" in given else ()),
            *((PROMPT_LOGPROBS,) if PROMPT_LOGPROBS in given else ()),
            *(_STOP_OUTPUTS if "stop" in given else ()),
        )
        # vLLM's own backend returns what these inputs select, others what the request names.
        flags = {STREAM: text_request.is_stream, EXCLUDE_INPUT: not text_request.has_echo}
        flags |= {f"return_{name}": True for name in outputs}
        for name, value in flags.items():
            if name in specs:
                inputs[name] = self.tensor(specs[name], b"\1" if value else b"\0")
        requested = tuple(RequestedOutput(spec.name, {}) for spec in self.signature.outputs if spec.name in outputs)
        return InferCall(self.name, "", request_id, text_request.parameters, inputs, requested)

    def prompt_input(self, prompt: Prompt, param: str = "prompt") -> dict[str, WireTensor]:
        """The input for a text or token ids. Raises RequestError: it takes no ids."""
        specs = {spec.name: spec for spec in self.signature.inputs}
        if isinstance(prompt, str):
            return {TEXT_INPUT: self.tensor(specs[TEXT_INPUT], text_data(prompt))}
        if INPUT_IDS not in specs:
            raise RequestError(f"the model '{self.name}' takes no token ids; send text", param=param)
        ids = ids_data(specs[INPUT_IDS], prompt, self.name)
        return {INPUT_IDS: self.tensor(specs[INPUT_IDS], ids, len(prompt))}

    def tensor(self, spec: TensorSpec, data: bytes, length: int = 1) -> WireTensor:
        """The data as a tensor for an input; an open dimension is ``length``."""
        dims = [length if dim < 0 else dim for dim in spec.dims]
        shape = (1, *dims) if self.signature.max_batch_size > 0 else tuple(dims)
        return WireTensor(spec.datatype, shape, data)


def text_data(text: str) -> bytes:
    """One text as the data of an input."""
    return encode_bytes((text,))


def ids_data(spec: TensorSpec, ids: Sequence[int], model: str) -> bytes:
    """Token ids as the data of an input. Raises InternalError: it is not of integers."""
    form = {"INT32": "i", "INT64": "q", "UINT32": "I", "UINT64": "Q"}.get(spec.datatype)
    if form is None:
        raise InternalError(f"input '{spec.name}' of model '{model}' has datatype {spec.datatype}, token ids have not")
    return array(form, ids).tobytes()
