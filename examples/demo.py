"""A client of the sample mesh: ``python examples/demo.py 127.0.0.1:8001``.

It knows nothing of Weft: it speaks the V2 protocol through tritonclient, as it would to any other server. One request
goes to each sample graph; printed are the answer, the path taken and the milliseconds of each call. The last one is a
language model, whose text is printed as it comes.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

DIGITS = Path(__file__).resolve().parents[1] / "model_repository" / "data" / "digits"
TIMEOUT_S, LOAD_TIMEOUT_S = 30.0, 90.0
PROMPT = "Return a list of"
SAMPLING = {"max_tokens": 48, "temperature": 0.7, "top_p": 0.9, "seed": 1}
_MAX_SHOWN_CHARS = 96


class Question(NamedTuple):
    """One request and what it shows."""

    graph: str
    what: str
    inputs: Mapping[str, NDArray[Any]]
    parameters: Mapping[str, str] = {}
    headers: Mapping[str, str] = {}


def questions(digit: Path) -> list[Question]:
    """A request for each sample graph; ``digit`` is a PNG file."""
    sentence = one_element(b"Weft weaves models together.")
    complaint = one_element(b"I was charged twice for my subscription this month, please refund me.")
    image = one_element(digit.read_bytes())
    row = np.linspace(0, 1, 16, dtype=np.float32)[None]
    numbers = {"INPUT0": np.arange(16, dtype=np.int32)[None], "INPUT1": np.ones((1, 16), np.int32)}
    return [
        Question("embed", "a sentence becomes a vector", {"TEXT": sentence}),
        Question("triage", "a message goes to the team that its label names", {"TEXT": complaint}),
        Question("triage", "the parameter team=shipping beats the label", {"TEXT": complaint}, {"team": "shipping"}),
        Question("digits", f"several models vote on {digit.name}", {"IMAGE": image}),
        Question("digits_cascade", "a small model answers, a large one only in doubt", {"IMAGE": image}),
        Question("digits_ab", "an A/B test: a user keeps its arm", {"IMAGE": image}, headers={"x-user-id": "alice"}),
        Question("simple", "sum and difference, another model", numbers),
        Question("identity", "a model called through the router", {"INPUT0": row}),
        Question("identity3", "an ensemble as Triton Inference Server spells it", {"INPUT0": row}),
    ]


def one_element(value: bytes) -> NDArray[Any]:
    """A BYTES batch of one row and one element, shape [1, 1]."""
    return np.array([[value]], dtype=np.object_)


def ask(client: triton.InferenceServerClient, question: Question) -> None:
    """Send the request and print its answer, path and times.

    Raises:
        InferenceServerException: The server answered with an error.
    """
    tensors = []
    for name, array in question.inputs.items():
        tensor = triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    start_ns = time.perf_counter_ns()
    result = client.infer(
        question.graph,
        tensors,
        parameters={"graph_trace": True, **question.parameters},
        headers=dict(question.headers),
        client_timeout=TIMEOUT_S,
    )
    duration_ms = (time.perf_counter_ns() - start_ns) / 1e6
    response = result.get_response()
    for output in response.outputs:
        print(f"  {output.name} = {shown(result.as_numpy(output.name))}")
    print(f"  {duration_ms:8.2f} ms  seen by the client")
    for line in call_lines(json.loads(response.parameters["graph_trace"].string_param)):
        print(f"  {line}")


def write(client: triton.InferenceServerClient, prompt: str) -> None:
    """Have the graph `write` continue a text, and print what it writes while it writes.

    Raises:
        InferenceServerException: The server answered with an error.
        queue.Empty: It did not answer.
    """
    texts = {"text_input": prompt, "sampling_parameters": json.dumps(SAMPLING)}
    tensors = [triton.InferInput(name, [1], "BYTES") for name in texts] + [triton.InferInput("stream", [1], "BOOL")]
    for tensor, value in zip(tensors, (*(text.encode() for text in texts.values()), True), strict=True):
        tensor.set_data_from_numpy(np.array([value], dtype=np.bool_ if value is True else np.object_))
    responses: Queue[Any] = Queue()
    arrivals_ns = [time.perf_counter_ns()]
    client.start_stream(callback=lambda result, error: responses.put(error or result), stream_timeout=TIMEOUT_S)
    client.async_stream_infer("write", tensors, enable_empty_final_response=True)
    print(f"  {prompt}", end="", flush=True)
    try:
        is_over = False
        while not is_over:
            result = responses.get(timeout=TIMEOUT_S)
            if isinstance(result, InferenceServerException):
                raise result
            is_over = result.get_response().parameters["triton_final_response"].bool_param
            if result.get_response().outputs:
                arrivals_ns.append(time.perf_counter_ns())
                print(result.as_numpy("text_output")[0].decode().replace("\n", "\n  "), end="", flush=True)
    finally:
        print()
        client.stop_stream(cancel_requests=True)
    first_ms, all_ms = ((arrival_ns - arrivals_ns[0]) / 1e6 for arrival_ns in (arrivals_ns[1], arrivals_ns[-1]))
    print(f"  {first_ms:8.2f} ms  to the first of {len(arrivals_ns) - 1} responses; {all_ms:.2f} ms to the last")


def shown(array: NDArray[Any]) -> str:
    """Values on one line, without dimensions of 1, abridged."""
    array = np.squeeze(array)
    if array.dtype == np.object_:
        values = [element.decode(errors="replace") for element in array.ravel()]
        text = values[0] if len(values) == 1 else str(values)
    else:
        text = np.array2string(array, precision=3, suppress_small=True, separator=", ", threshold=8, edgeitems=3)
        text = text.replace("\n", "")
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."


def call_lines(steps: Iterable[Mapping[str, Any]]) -> list[str]:
    """Milliseconds, path and model of each call in a ``graph_trace``; steps that are nodes are left out."""
    return [
        f"{step['ms']:8.2f} ms  {step['path']}  ({step['model']} on {step['target']})"
        for step in steps
        if step["model"]
    ]


def main() -> int:
    """0 when every graph answered, else 1."""
    parser = argparse.ArgumentParser(description="Send one request to each sample graph.")
    parser.add_argument("url", nargs="?", default="127.0.0.1:8001", metavar="HOST:PORT", help="the router")
    parser.add_argument("--part", choices=("quick", "written"), help="all but the language model, or it alone")
    options = parser.parse_args()
    num_errors = 0
    with triton.InferenceServerClient(options.url) as client:
        for question in questions(min(DIGITS.glob("*.png"))) if options.part != "written" else []:
            print(f"\n{question.graph}: {question.what}", flush=True)
            num_errors += not answers(lambda question=question: ask(client, question))
        if options.part != "quick":
            wait_until_ready(client, "write")
            print("\nwrite: a small language model, token by token")
            num_errors += not answers(lambda: write(client, PROMPT))
    if num_errors:
        print(f"\n{num_errors} errors")
    elif options.part != "quick":
        print("\nEvery graph answered.")
    return 1 if num_errors else 0


def answers(request: Callable[[], None]) -> bool:
    """Whether the request is answered; an error is printed."""
    try:
        request()
    except InferenceServerException as error:
        print(f"  {error.status()}: {error.message()}")
        return False
    return True


def wait_until_ready(client: triton.InferenceServerClient, model: str) -> None:
    """Wait until the model is ready, for a while: the request says why it is not. Its kernels may yet be compiled."""
    end_s = time.monotonic() + LOAD_TIMEOUT_S
    while not client.is_model_ready(model) and time.monotonic() < end_s:
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
