"""``/v1/embeddings``: vectors of texts, by models and graphs from a text to a vector."""

import asyncio
import base64
import uuid
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from starlette.types import ASGIApp
from typing_extensions import override

from weft.base.cancellation import cancel_and_wait
from weft.base.core import InferCall, InferResult, RequestedOutput
from weft.base.errors import DeadlineExceededError, InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import Array, WireTensor, decode, encode_bytes
from weft.gateway.errors import RequestError
from weft.gateway.http.responding import json_array_response
from weft.gateway.openai.completions import prompts
from weft.gateway.openai.endpoint import Endpoint, EndpointCall
from weft.gateway.openai.fields import Field, Fields, integer, one_of, string
from weft.gateway.openai.generate import invalid_response
from weft.gateway.openai.text_model import ids_data
from weft.gateway.openai.text_request import (
    IGNORED,
    MAX_INT32,
    MAX_NAME_CHARS,
    MODEL,
    PRIORITY,
    TIMEOUT,
    Prompt,
    timeout_s,
)
from weft_protos.model_config_pb2 import ModelConfig

MAX_INPUTS = 2048
#: Calls of one request at once.
_MAX_CALLS = 16
_MAX_DIMENSIONS = 1 << 20
#: Inputs of a model that fields of a request set, one value for all rows.
_TRUNCATE, _PROMPT_NAME = "truncate_prompt_tokens", "prompt_name"
_SETTINGS = (_TRUNCATE, _PROMPT_NAME)


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A validated body for a ``RowModel``.

    Attributes:
        fields: The values of those that are given.
        columns: Texts or token ids for each input of the model.
        timeout_s: None: the gateway's.
    """

    fields: Mapping[str, Any]
    columns: Sequence[Sequence[Prompt]]
    timeout_s: float | None

    @property
    def model(self) -> str:
        """The model's name."""
        return str(self.fields["model"])


@dataclass(frozen=True, slots=True)
class RowModel:
    """The interface of a model from rows of texts to rows of numbers.

    Attributes:
        texts: The inputs for texts, BYTES [1].
        ids: The input for token ids, INT32 or INT64 [-1], in place of one text; None: it has none.
        values: The output with the numbers, FP32 [d].
        count: Name of an output with the number of a row's tokens, an integer [1]; "": it has none.
    """

    signature: ModelSignature
    texts: tuple[TensorSpec, ...]
    ids: TensorSpec | None
    values: TensorSpec
    count: str

    @classmethod
    def from_config(cls, config: ModelConfig, template_source: str | None = None) -> Self | None:
        """The model with this configuration; None: it is of another kind."""
        signature = ModelSignature.from_config(config, "")
        inputs = [spec for spec in signature.inputs if spec.name not in _SETTINGS]
        texts = tuple(spec for spec in inputs if (spec.datatype, spec.dims) == ("BYTES", (1,)))
        ids = [spec for spec in inputs if spec.datatype in ("INT32", "INT64") and spec.dims == (-1,)]
        counts = [spec for spec in signature.outputs if "INT" in spec.datatype and spec.dims == (1,)]
        values = [spec for spec in signature.outputs if spec not in counts]
        is_one = len(values) == 1 and (values[0].datatype, len(values[0].dims)) == ("FP32", 1)
        others = [spec for spec in signature.inputs if not spec.is_optional and spec not in texts]
        if not is_one or others or len(counts) > 1 or signature.is_decoupled or not cls.fits(texts, values[0]):
            return None
        takes_ids = len(ids) == len(texts) == 1 and texts[0].is_optional
        return cls(signature, texts, ids[0] if takes_ids else None, values[0], counts[0].name if counts else "")

    @classmethod
    def fits(cls, texts: Sequence[TensorSpec], values: TensorSpec) -> bool:
        """Whether these are the tensors of this kind of model."""
        raise NotImplementedError

    def calls(self, request: RowRequest, request_id: str) -> list[InferCall]:
        """A call for each batch of texts, with a column for each input, and for each token ids. Raises RequestError."""
        name, max_rows = self.signature.name, max(1, self.signature.max_batch_size)
        tensors: list[tuple[int, dict[str, WireTensor]]] = []
        columns, given = request.columns, request.fields
        texts = [[one for one in column if isinstance(one, str)] for column in columns]
        if 0 < len(texts[0]) < len(columns[0]):
            raise RequestError("'input' has both texts and token ids; send two requests", param="input")
        for start in range(0, len(texts[0]), max_rows):
            rows = [column[start : start + max_rows] for column in texts]
            made = [self._tensor(spec, encode_bytes(row), len(row)) for spec, row in zip(self.texts, rows, strict=True)]
            tensors.append((len(rows[0]), dict(made)))
        for one in columns[0]:
            if isinstance(one, array):
                if self.ids is None:
                    raise RequestError(f"the model '{name}' takes no token ids; send text", param="input")
                tensors.append((1, dict([self._tensor(self.ids, ids_data(self.ids, one, name), 1, len(one))])))
        specs = {spec.name: spec for spec in self.signature.inputs}
        for field in given.keys() & _SETTINGS:
            if field not in specs:
                raise RequestError(f"the model '{name}' has no input '{field}'; leave the field out", param=field)
            value = given[field]
            data = encode_bytes([value]) if isinstance(value, str) else array("i", [value]).tobytes()
            for num_rows, inputs in tensors:
                inputs.update([self._tensor(specs[field], data * num_rows, num_rows)])
        outputs = tuple(RequestedOutput(spec.name, {}) for spec in self.signature.outputs)
        parameters = {name: given[name] for name in ("priority",) if name in given}
        return [
            InferCall(name, "", f"{request_id}-{index}", parameters, inputs, outputs, num_rows)
            for index, (num_rows, inputs) in enumerate(tensors)
        ]

    def _tensor(self, spec: TensorSpec, data: bytes, num_rows: int, length: int = 1) -> tuple[str, WireTensor]:
        shape = (num_rows, length) if self.signature.max_batch_size > 0 else (length,)
        return spec.name, WireTensor(spec.datatype, shape, data)


class EmbeddingModel(RowModel):
    """An embedding model: one text in, one vector out."""

    lacks: ClassVar[str] = (
        "makes no embeddings: it needs one text input, BYTES [1], and one output 'embedding', FP32 [d]"
    )

    @override
    @classmethod
    def fits(cls, texts: Sequence[TensorSpec], values: TensorSpec) -> bool:
        return len(texts) == 1 and "embed" in values.name.lower()


async def rows_of(
    request: RowRequest, model: RowModel, call: EndpointCall, prefix: str
) -> tuple[Array, dict[str, int]]:
    """The numbers of all rows, ``[n, d]``, and the usage; the first error cancels the other calls."""
    (resources, context), free = call, asyncio.Semaphore(_MAX_CALLS)
    end_s = asyncio.get_running_loop().time() + call.timeout_s(request.timeout_s)
    calls = model.calls(request, f"{prefix}-{uuid.uuid4().hex}")

    async def result_of(one: InferCall) -> InferResult:
        async with free:
            left_s = end_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise DeadlineExceededError("the time for the answer has passed; send fewer inputs, or allow more time")
            return await resources.router.infer(one, timeout_s=left_s, metadata=context.metadata())

    tasks = [asyncio.create_task(result_of(one)) for one in calls]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(tasks)
    rows, num_tokens = [], 0
    for made, result in zip(calls, results, strict=True):
        try:
            rows.append(decode(result.outputs[model.values.name], name=model.values.name).reshape(made.num_rows, -1))
            if model.count:
                num_tokens += int(decode(result.outputs[model.count], name=model.count).sum())
        except (InvalidArgumentError, LookupError, ValueError) as error:
            raise invalid_response(request.model) from error
    numbers = np.concatenate(rows)
    if not np.isfinite(numbers).all():
        raise invalid_response(request.model)
    num_tokens = num_tokens or sum(len(one) for one in request.columns[0] if isinstance(one, array))
    return numbers, {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


#: Fields of every endpoint of a ``RowModel``.
SHARED = (
    integer(_TRUNCATE, -1, MAX_INT32, "longer texts are cut to so many tokens, -1: to as many as fit", "refused"),
    MODEL,
    PRIORITY,
    TIMEOUT,
    *IGNORED,
)
_INPUT = f"string, token ids, or an array of up to {MAX_INPUTS} of either"
_FIELDS = (
    Field("input", _INPUT, "each gives a vector", "required", partial(prompts, max_items=MAX_INPUTS)),
    one_of("encoding_format", ("float", "base64"), "base64: of float32, little-endian", "float"),
    integer("dimensions", 1, _MAX_DIMENSIONS, "the first so many numbers, scaled to length 1", "all"),
    string(_PROMPT_NAME, MAX_NAME_CHARS, "a prompt of the model's folder, which goes before each text", "the model's"),
    *SHARED,
)


def parse(fields: Fields, headers: Mapping[str, str]) -> RowRequest:
    """Parse a body. Raises RequestError, or DeadlineExceededError for a timeout of 0."""
    own = fields.read(_FIELDS)
    return RowRequest(own, [own["input"]], timeout_s(fields, headers))


async def _respond(request: RowRequest, model: EmbeddingModel, call: EndpointCall) -> ASGIApp:
    rows, usage = await rows_of(request, model, call, "embd")
    vectors = _shortened(rows, request)
    data = ({"object": "embedding", "index": i, "embedding": _written(one, request)} for i, one in enumerate(vectors))
    return await json_array_response({"object": "list", "model": request.model, "usage": usage}, "data", data)


def _shortened(rows: Array, request: RowRequest) -> Array:
    if (width := request.fields.get("dimensions")) is None:
        return rows
    if width > rows.shape[1]:
        raise RequestError(
            f"'dimensions' is {width}; vectors of '{request.model}' have {rows.shape[1]}", param="dimensions"
        )
    rows = rows[:, :width]
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(lengths == 0, 1, lengths)).astype(np.float32)


def _written(vector: Array, request: RowRequest) -> str | list[float]:
    if request.fields.get("encoding_format") == "base64":
        return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


ENDPOINT = Endpoint("/v1/embeddings", EmbeddingModel, parse, _respond, _FIELDS, operation="embeddings")
