"""``/v1/embeddings``: vectors of texts, by models and graphs from a text to a vector."""

import asyncio
import base64
import uuid
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

import numpy as np
from starlette.types import ASGIApp

from weft.base.cancellation import cancel_and_wait
from weft.base.core import InferCall, InferResult, RequestedOutput
from weft.base.errors import DeadlineExceededError, InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import Array, WireTensor, decode, encode_bytes
from weft.gateway.errors import RequestError
from weft.gateway.http.responding import json_array_response
from weft.gateway.openai.completions import prompts
from weft.gateway.openai.endpoint import Endpoint, EndpointCall
from weft.gateway.openai.fields import Field, Fields, integer, shown, unsupported
from weft.gateway.openai.generate import invalid_response
from weft.gateway.openai.text_model import ids_data
from weft.gateway.openai.text_request import IGNORED, MODEL, PRIORITY, TIMEOUT, Prompt, timeout_s
from weft_protos.model_config_pb2 import ModelConfig

MAX_INPUTS = 2048
#: Calls of one request at once.
_MAX_CALLS = 16
_MAX_DIMENSIONS = 1 << 20


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """The interface of an embedding model: one text in, BYTES [1], one vector out, FP32 [d].

    Attributes:
        signature: Its tensors.
        text, ids: The inputs for a text, and for token ids, INT32 or INT64 [-1], of which a request has one; None: it
            has none.
        vector: The output.
        count: Name of an output with the number of a text's tokens, an integer [1]; "": it has none.
    """

    lacks: ClassVar[str] = "makes no embeddings: it needs one text input, BYTES [1], and one output FP32 [d]"

    signature: ModelSignature
    text: TensorSpec
    ids: TensorSpec | None
    vector: TensorSpec
    count: str

    @classmethod
    def from_config(cls, config: ModelConfig, template_source: str | None = None) -> Self | None:
        """The model with this configuration; None: it is no embedding model."""
        signature = ModelSignature.from_config(config, "")
        texts = [spec for spec in signature.inputs if (spec.datatype, spec.dims) == ("BYTES", (1,))]
        ids = [spec for spec in signature.inputs if spec.datatype in ("INT32", "INT64") and spec.dims == (-1,)]
        counts = [spec for spec in signature.outputs if "INT" in spec.datatype and spec.dims == (1,)]
        vectors = [spec for spec in signature.outputs if spec not in counts]
        is_one = len(texts) == len(vectors) == 1 and (vectors[0].datatype, len(vectors[0].dims)) == ("FP32", 1)
        others = [spec for spec in signature.inputs if not spec.is_optional and spec not in texts]
        if not is_one or others or len(counts) > 1 or signature.is_decoupled:
            return None
        takes_ids = len(ids) == 1 and texts[0].is_optional
        return cls(signature, texts[0], ids[0] if takes_ids else None, vectors[0], counts[0].name if counts else "")

    def calls(self, inputs: Sequence[Prompt], request_id: str, parameters: Mapping[str, int]) -> list[InferCall]:
        """A call for each batch of texts, and for each list of token ids. Raises RequestError."""
        has_rows = self.signature.max_batch_size > 0
        num_rows = max(1, self.signature.max_batch_size)
        tensors: list[tuple[int, str, WireTensor]] = []
        texts = [one for one in inputs if isinstance(one, str)]
        if 0 < len(texts) < len(inputs):
            raise RequestError("'input' has both texts and token ids; send two requests", param="input")
        for start in range(0, len(texts), num_rows):
            rows = texts[start : start + num_rows]
            shape = (len(rows), 1) if has_rows else (1,)
            tensors.append((len(rows), self.text.name, WireTensor("BYTES", shape, encode_bytes(rows))))
        for one in inputs:
            if isinstance(one, array):
                if self.ids is None:
                    name = self.signature.name
                    raise RequestError(f"the model '{name}' takes no token ids; send text", param="input")
                shape = (1, len(one)) if has_rows else (len(one),)
                data = ids_data(self.ids, one, self.signature.name)
                tensors.append((1, self.ids.name, WireTensor(self.ids.datatype, shape, data)))
        outputs = tuple(RequestedOutput(spec.name, {}) for spec in self.signature.outputs)
        return [
            InferCall(self.signature.name, "", f"{request_id}-{index}", parameters, {name: tensor}, outputs, rows)
            for index, (rows, name, tensor) in enumerate(tensors)
        ]


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A validated body; ``dimensions`` of 0: all."""

    model: str
    inputs: Sequence[Prompt]
    is_base64: bool
    dimensions: int
    parameters: Mapping[str, int]
    timeout_s: float | None


def _format(fields: Fields, name: str) -> str | None:
    value: str | None = fields.raw(name)
    if value not in (None, "float", "base64"):
        raise RequestError(f"'{name}' must be float or base64, got {shown(value)}", param=name)
    return value


_FIELDS = (
    Field(
        *(
            "input",
            f"string, token ids, or an array of up to {MAX_INPUTS} of either",
            "each gives a vector",
            "required",
        ),
        partial(prompts, max_items=MAX_INPUTS),
    ),
    Field("encoding_format", "`float` or `base64`", "base64: of float32, little-endian", "float", _format),
    integer("dimensions", 1, _MAX_DIMENSIONS, "the first so many numbers, scaled to length 1", "all"),
    MODEL,
    PRIORITY,
    TIMEOUT,
    unsupported("truncate_prompt_tokens", "set 'max_length' of the model's tokenizer"),
    *IGNORED,
)


def parse(fields: Fields, headers: Mapping[str, str]) -> EmbeddingRequest:
    """Parse a body. Raises RequestError, or DeadlineExceededError for a timeout of 0."""
    own = fields.read(_FIELDS)
    return EmbeddingRequest(
        own["model"],
        own["input"],
        own.get("encoding_format") == "base64",
        own.get("dimensions", 0),
        {name: own[name] for name in ("priority",) if name in own},
        timeout_s(fields, headers),
    )


async def _respond(request: EmbeddingRequest, model: EmbeddingModel, call: EndpointCall) -> ASGIApp:
    calls = model.calls(request.inputs, f"embd-{uuid.uuid4().hex}", request.parameters)
    vectors, num_tokens = [], 0
    for made, result in zip(calls, await _results(request, calls, call), strict=True):
        try:
            rows = decode(result.outputs[model.vector.name], name=model.vector.name).reshape(made.num_rows, -1)
            if model.count:
                num_tokens += int(decode(result.outputs[model.count], name=model.count).sum())
        except (InvalidArgumentError, LookupError, ValueError) as error:
            raise invalid_response(request.model) from error
        vectors += list(_shortened(rows, request))
    num_tokens = num_tokens or sum(len(one) for one in request.inputs if isinstance(one, array))
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    data = ({"object": "embedding", "index": i, "embedding": _written(one, request)} for i, one in enumerate(vectors))
    return await json_array_response({"object": "list", "model": request.model, "usage": usage}, "data", data)


async def _results(request: EmbeddingRequest, calls: Sequence[InferCall], call: EndpointCall) -> list[InferResult]:
    """The results of all calls; the first error cancels the others."""
    (resources, context), free = call, asyncio.Semaphore(_MAX_CALLS)
    limit_s = resources.limits.timeout_s
    end_s = asyncio.get_running_loop().time() + min(request.timeout_s or limit_s, limit_s)

    async def result_of(one: InferCall) -> InferResult:
        async with free:
            left_s = end_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise DeadlineExceededError("the time for the answer has passed; send fewer inputs, or allow more time")
            return await resources.router.infer(one, timeout_s=left_s, metadata=context.metadata())

    tasks = [asyncio.create_task(result_of(one)) for one in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(tasks)


def _shortened(rows: Array, request: EmbeddingRequest) -> Array:
    if not request.dimensions:
        return rows
    if request.dimensions > rows.shape[1]:
        raise RequestError(
            f"'dimensions' is {request.dimensions}; vectors of '{request.model}' have {rows.shape[1]}",
            param="dimensions",
        )
    rows = rows[:, : request.dimensions]
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(lengths == 0, 1, lengths)).astype(np.float32)


def _written(vector: Array, request: EmbeddingRequest) -> str | list[float]:
    if request.is_base64:
        return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


ENDPOINT = Endpoint("/v1/embeddings", EmbeddingModel, parse, _respond, _FIELDS)
