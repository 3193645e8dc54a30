"""Answers as a person reads them: tensors, the responses of a stream as they come, and names that were meant."""

import base64
import contextlib
import json
import re
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np

from weft.base.core import InferResult, Parameters, ParameterValue
from weft.base.errors import NotFoundError, RemoteError
from weft.base.signature import TensorSpec
from weft.base.tensors import WireTensor, decode, encode, split_bytes
from weft.base.text.printable import printable
from weft.base.text.suggestion import suggestion
from weft.v2.client.v2_client import V2Client

_INDEX_TIMEOUT_S = 5.0
_MAX_TEXT_CHARS = 200
# What language models call these tensors, after the vLLM backend of Triton Inference Server.
_TEXT_OUTPUT = "text_output"
_STREAM_INPUT = "stream"


def render_result(result: InferResult) -> str:
    """One line for each output: name, datatype, shape, values (long tensors are abridged); one that says of none."""
    if not result.outputs:
        return "(the answer has no outputs: each may be left out)"
    width = max((len(name) for name in result.outputs), default=0)
    return printable("\n".join(f"{name:<{width}}  {render_tensor(tensor)}" for name, tensor in result.outputs.items()))


def result_as_json(result: InferResult) -> dict[str, Any]:
    """The response as the V2 protocol has it in JSON; bytes that are no text are an object with their ``b64``."""
    outputs = [
        {"name": name, "datatype": tensor.datatype, "shape": list(tensor.shape), "data": _values(tensor)}
        for name, tensor in result.outputs.items()
    ]
    head = {"model_name": result.model_name, "model_version": result.model_version, "id": result.request_id}
    return {**head, "parameters": dict(result.parameters), "outputs": outputs}


def _values(tensor: WireTensor) -> list[Any]:
    flat = decode(tensor).ravel()
    if tensor.datatype != "BYTES":
        values: list[Any] = flat.astype(np.float32).tolist() if tensor.datatype == "BF16" else flat.tolist()
        return values
    texts = []
    for element in flat:
        try:
            texts.append(element.decode())
        except UnicodeDecodeError:
            texts.append({"b64": base64.b64encode(element).decode()})
    return texts


def render_tensor(tensor: WireTensor) -> str:
    """Datatype, shape and values; text is quoted, bytes that are no text are counted."""
    array = decode(tensor)
    if tensor.datatype == "BYTES":
        texts = np.array([_element(element) for element in array.ravel()], dtype=np.object_).reshape(array.shape)
        values = np.array2string(texts, threshold=20, edgeitems=3, formatter={"all": str}, separator=", ")
    else:
        wide = array.astype(np.float32) if tensor.datatype == "BF16" else array  # numpy prints no bfloat16
        values = np.array2string(wide, threshold=20, edgeitems=3, precision=4, suppress_small=True, separator=", ")
    shape = ", ".join(map(str, tensor.shape))
    return f"{tensor.datatype}[{shape}]  " + re.sub(r"\n\s*", " ", values)


def _element(element: bytes) -> str:
    try:
        text = element.decode()
    except UnicodeDecodeError:
        return f"<{len(element)} bytes>"
    if len(text) > _MAX_TEXT_CHARS:
        text = text[: _MAX_TEXT_CHARS - 3] + "..."
    return json.dumps(text, ensure_ascii=False)


def ask_for_stream(specs: Sequence[TensorSpec], inputs: dict[str, WireTensor]) -> None:
    """Ask a language model to stream its answer: add ``stream`` to the inputs, unless the command line has it."""
    for spec in specs:
        if spec.name == _STREAM_INPUT and spec.datatype == "BOOL" and spec.name not in inputs:
            inputs[spec.name] = encode(np.ones([abs(dim) for dim in spec.dims], np.bool_))


async def print_stream(
    model: str, results: AsyncGenerator[InferResult, None], *, as_json: bool = False
) -> tuple[Parameters, float]:
    """Print responses as they come, then how many came and when.

    The text of an output ``text_output`` is printed without a break, and the other outputs of the last response after
    it. Cancelling the task closes ``results``, which cancels the request.

    With ``as_json`` each response is printed as a line of JSON, and nothing else. Returns the parameters of the last
    response, and the time to it from now in milliseconds.

    Raises:
        WeftError: As ``results`` does; what came before is printed.
    """
    printer, parameters = _Printer(), dict[str, ParameterValue]()
    try:
        async with contextlib.aclosing(results):
            async for result in results:
                parameters = dict(result.parameters) or parameters
                if as_json:
                    print(json.dumps(result_as_json(result)), flush=True)
                else:
                    printer.show(result)
    finally:
        printer.end_line()
    return parameters, printer.elapsed_ms() if as_json else printer.summarize(model)


class _Printer:
    """Shows the responses of one request."""

    def __init__(self) -> None:
        self._start_ns = time.perf_counter_ns()
        self._first_ms = 0.0
        self._num_responses = 0
        self._rest: InferResult | None = None
        self._is_inside_line = False

    def show(self, result: InferResult) -> None:
        if result.is_null:
            return
        self._num_responses += 1
        self._first_ms = self._first_ms or self.elapsed_ms()
        if _TEXT_OUTPUT not in result.outputs:
            print(render_result(result), flush=True)
            return
        text = result.outputs.pop(_TEXT_OUTPUT)
        self._rest = result
        shown = "".join(printable(piece.decode(errors="replace")) for piece in split_bytes(text.data))
        sys.stdout.write(shown)
        sys.stdout.flush()
        if shown:
            self._is_inside_line = not shown.endswith("\n")

    def end_line(self) -> None:
        if self._is_inside_line:
            print()
            self._is_inside_line = False

    def summarize(self, model: str) -> float:
        """Print what came with the last text, and the number and times of responses; returns milliseconds."""
        duration_ms = self.elapsed_ms()
        if self._rest is not None and self._rest.outputs:
            print(render_result(self._rest))
        plural = "" if self._num_responses == 1 else "s"
        first = f", the first after {self._first_ms:.1f} ms" if self._num_responses else ""
        print(f"{model}: {self._num_responses} response{plural} in {duration_ms:.1f} ms{first}")
        return duration_ms

    def elapsed_ms(self) -> float:
        return (time.perf_counter_ns() - self._start_ns) / 1e6


@contextlib.asynccontextmanager
async def names_similar_models(client: V2Client, name: str) -> AsyncGenerator[None, None]:
    """An error that the server does not know ``name`` goes on with the most similar name that it does.

    The names are those that the server lists to this client.
    """
    try:
        yield
    except RemoteError as error:
        if error.code != NotFoundError.code:
            raise
        try:
            known = [model.name for model in await client.index(timeout_s=_INDEX_TIMEOUT_S)]
        except RemoteError:
            known = []
        if not known or name in known:
            raise
        raise error.with_message(error.message + suggestion(name, known)) from None
