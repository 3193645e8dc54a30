"""``weft.connect`` on the sample mesh, beside tritonclient."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from tritonclient import grpc as triton

import weft
from weft.base.processes.process import Endpoint
from weft.v2.client.connect import Client, connect

TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def own(mesh: Mapping[str, Endpoint]) -> Iterator[Client]:
    """A client of the router."""
    with connect(mesh["router"].grpc, timeout_s=TIMEOUT_S) as connected:
        yield connected


def test_a_graph_gives_both_clients_the_same(
    own: Client, client: triton.InferenceServerClient, repository: Path
) -> None:
    """Images in, labels and the path out; tritonclient builds the tensor that the signature gives here."""
    images = [path.read_bytes() for path in sorted((repository / "data" / "digits").glob("*.png"))[:3]]
    answer = own.digits_cascade(IMAGE=images)
    given = triton.InferInput("IMAGE", [len(images), 1], "BYTES")
    given.set_data_from_numpy(np.array(images, np.object_).reshape(-1, 1))
    expected = client.infer("digits_cascade", [given])
    for name in answer:
        np.testing.assert_array_equal(expected.as_numpy(name), answer[name])
    assert answer.path.startswith("root.")


def test_numbers_give_both_clients_the_same(own: Client, client: triton.InferenceServerClient) -> None:
    """A model behind the router, with lists here and an array there."""
    signature = client.get_model_metadata("simple")
    values = np.arange(16, dtype=np.int32).reshape(1, 16)
    given = [triton.InferInput(tensor.name, [1, 16], tensor.datatype) for tensor in signature.inputs]
    for one in given:
        one.set_data_from_numpy(values)
    expected = client.infer("simple", given)
    answer = own.simple(**{tensor.name: values[0].tolist() for tensor in signature.inputs})
    assert [tensor.name for tensor in signature.outputs] == list(answer)
    for name in answer:
        np.testing.assert_array_equal(expected.as_numpy(name), answer[name])


def test_text_of_a_language_model_is_streamed(own: Client) -> None:
    """Each response is an answer; what is left in the middle leaves the model free for the next."""
    greedy = {"max_tokens": 8, "temperature": 0}
    texts = [answer.text_output[0] for answer in own.writer.stream(text_input="once", stream=True, parameters=greedy)]
    assert 1 < len(texts)
    answers = own.writer.stream(text_input="once", stream=True, parameters={"max_tokens": 200})
    next(answers)
    answers.close()
    again = own.writer.stream(text_input="once", stream=True, parameters=greedy)
    assert b"".join(texts) == b"".join(answer.text_output[0] for answer in again)
    assert own.writer(text_input="once", parameters=greedy).text_output[0].endswith(b"".join(texts))


def test_errors_of_the_mesh_have_classes(own: Client) -> None:
    """What a model refuses, what nobody serves, and a bad image."""
    with pytest.raises(weft.errors.NotFoundError, match="did you mean 'digits'"):
        own.digts(IMAGE=[b"x"])
    with pytest.raises(weft.errors.InvalidArgumentError, match="image"):
        own.digits(IMAGE=[b"no image"])
