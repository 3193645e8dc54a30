"""Prints the responses of a decoupled model as they come: text without a break, other outputs response by response."""

import contextlib
import json
import sys
import time
from collections.abc import AsyncGenerator, Sequence

import numpy as np

from weft.base.core import InferResult, Parameters, ParameterValue
from weft.base.signature import TensorSpec
from weft.base.tensors import WireTensor, encode, split_bytes
from weft.base.text.printable import printable
from weft.cli.answers.tensor import render_result, result_as_json

# What language models call these tensors, after the vLLM backend of Triton Inference Server.
_TEXT_OUTPUT = "text_output"
_STREAM_INPUT = "stream"


def ask_for_stream(specs: Sequence[TensorSpec], inputs: dict[str, WireTensor]) -> None:
    """Ask a language model to stream its answer, unless the command line says otherwise.

    Args:
        specs: The model's inputs.
        inputs: Of the request; receives ``stream`` if the model has that input.
    """
    for spec in specs:
        if spec.name == _STREAM_INPUT and spec.datatype == "BOOL" and spec.name not in inputs:
            inputs[spec.name] = encode(np.ones([abs(dim) for dim in spec.dims], np.bool_))


async def print_stream(
    model: str, results: AsyncGenerator[InferResult, None], *, as_json: bool = False
) -> tuple[Parameters, float]:
    """Print responses as they come, then how many came and when.

    The text of an output ``text_output`` is printed without a break, and the other outputs of the last response after
    it. Cancelling the task closes ``results``, which cancels the request.

    Args:
        model: Name of the model.
        results: The responses; time is measured from now.
        as_json: Print each response as a line of JSON, and nothing else.

    Returns:
        Parameters of the last response, and the time to it in milliseconds.

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
        """Print what is new in a response."""
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
        """Begin a new line, unless the cursor is at the start of one."""
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
        """Since the request, milliseconds."""
        return (time.perf_counter_ns() - self._start_ns) / 1e6
