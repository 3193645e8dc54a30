"""A graph that runs in this process answers as the sample mesh does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc as triton

from weft import Graph, read
from weft.base.core import InferCall
from weft.base.errors import WeftError
from weft.base.processes.process import Endpoint
from weft.base.tensors import Array, encode
from weft.v2.client.answer import Answer
from weft.v2.client.v2_client import V2Client


def graph_of(repository: Path, name: str) -> Graph:
    """A graph of the repository."""
    return read(repository / f"graphs/{name}/1/graph.pbtxt")


def digits(repository: Path) -> Array:
    """Every picture of a digit, as a batch."""
    paths = sorted((repository / "data/digits").glob("*.png"))
    return np.array([[path.read_bytes()] for path in paths], dtype=np.object_)


TEXTS = np.array([["A refund is due for the invoice of March."], ["?"], ["Grüße aus Köln"]], dtype=np.object_)


@pytest.mark.parametrize(
    ("name", "parameters", "headers"),
    [
        ("digits_cascade", {}, {}),
        ("digits_cascade", {"quality": "best"}, {}),
        ("digits_ab", {}, {"x-user-id": "7"}),
        ("digits_ab", {}, {"x-user-id": "me"}),
        ("embed", {}, {}),
        ("triage", {}, {}),
        ("triage", {"team": "billing"}, {}),
    ],
)
async def test_a_sample_answers_in_this_process_as_from_the_mesh(
    repository: Path, mesh: Mapping[str, Endpoint], name: str, parameters: dict[str, Any], headers: dict[str, str]
) -> None:
    """Outputs to the last bit, path, and the models and statuses of the trace."""
    inputs = {"IMAGE": digits(repository)} if name.startswith("digits") else {"TEXT": TEXTS}
    call = InferCall(name, parameters={"graph_trace": True, **parameters})
    call.inputs = {key: encode(value) for key, value in inputs.items()}
    trailer: dict[str, str] = {}
    async with V2Client(mesh["router"].grpc) as client:
        result = await client.infer(call, timeout_s=60, metadata=[*headers.items()], trailer=trailer)
    served = Answer(result, trailer)
    run = await graph_of(repository, name).run_async(inputs, parameters=parameters, headers=headers)
    assert run.path == served.path != ""
    assert {name: array.tolist() for name, array in run.items()} == {k: v.tolist() for k, v in served.items()}
    steps = [
        sorted((step["path"], step["model"], step["version"], step["status"]) for step in one.trace)
        for one in (run, served)
    ]
    assert steps[0] == steps[1] != []


def test_a_stream_in_this_process_is_that_of_the_mesh(repository: Path, client: triton.InferenceServerClient) -> None:
    """The writer's answer in several pieces; how many tokens are in each depends on how fast it is read."""
    asked = {"text_input": "The", "sampling_parameters": '{"max_tokens": 100, "temperature": 0}', "stream": True}
    pieces = [one.text_output.item() for one in graph_of(repository, "write").stream(asked)]
    assert len(pieces) > 1
    served = []
    inputs = []
    for name, datatype, value in (
        ("text_input", "BYTES", np.array([b"The"], np.object_)),
        ("sampling_parameters", "BYTES", np.array([asked["sampling_parameters"].encode()], np.object_)),
        ("stream", "BOOL", np.array([True])),
    ):
        inputs.append(triton.InferInput(name, [1], datatype))
        inputs[-1].set_data_from_numpy(value)
    client.start_stream(lambda result, error: served.append(error or result.as_numpy("text_output")))
    client.async_stream_infer("write", inputs)
    client.stop_stream()  # which waits for the answers
    assert b"".join(one.item() for one in served if one is not None) == b"".join(pieces) != b""


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("digits", {}),
        ("digits", {"IMAGE": np.array([[b"no picture"]], dtype=np.object_)}),
        ("digits", {"IMAGE": np.zeros((1, 1))}),
        ("digits", {"IMAGE": np.array([[b""]] * 33, dtype=np.object_)}),
        ("embed", {"TEXT": np.array([[b"\xff"]], dtype=np.object_)}),
        ("embed", {"TEXT": np.array([["a", "b"]], dtype=np.object_)}),
    ],
)
async def test_an_error_in_this_process_is_that_of_the_mesh(
    repository: Path, mesh: Mapping[str, Endpoint], name: str, inputs: dict[str, Array]
) -> None:
    """Status, message and path."""
    errors = []
    async with V2Client(mesh["router"].grpc) as client:
        call = InferCall(name, inputs={key: encode(value) for key, value in inputs.items()})
        for asking in (client.infer(call, timeout_s=60), graph_of(repository, name).run_async(inputs)):
            with pytest.raises(WeftError) as failed:
                await asking
            errors.append((failed.value.code, failed.value.message, failed.value.path))
    assert errors[0] == errors[1]
