"""The client of V2 servers."""

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.mesh.serving import ListingCore, serving

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import InternalError, NotFoundError, RemoteError, UnavailableError
from weft.base.signature import ModelSignature
from weft.base.tensors import encode
from weft.v2.client.v2_client import V2Client

MODEL = ModelSignature("m", "1", "p", 0, (), ())
TIMEOUT_S = 10.0


class Echo(ListingCore):
    """One model: answers a call with its inputs; streams them as often as asked for, the last one marked if wished."""

    def __init__(self, *, num_responses: int = 0, marks_last: bool = True, leaves_out: bool = False) -> None:
        super().__init__({("m", "1"): MODEL})
        self._num_responses = num_responses
        self._marks_last = marks_last
        self._leaves_out = leaves_out

    def is_ready(self) -> bool:
        return True

    def is_model_ready(self, name: str, version: str) -> bool:
        return name == "m"

    def signature(self, name: str, version: str) -> ModelSignature:
        if name != "m":
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        return MODEL

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        if call.model_name == "broken":
            raise InternalError("it broke")
        return InferResult("m", "1", call.request_id, {}, call.inputs)

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        self.signature(call.model_name, "")
        for number in range(self._num_responses):
            is_final = self._marks_last and number == self._num_responses - 1
            outputs = {} if self._leaves_out else call.inputs
            yield InferResult("m", "1", call.request_id, {}, outputs, is_final=is_final)


def request(model: str = "m") -> InferCall:
    """A request with one tensor."""
    return InferCall(model, "", "r", {}, {"X": encode(np.ones(2, np.float32))})


async def test_what_a_server_says_of_itself_and_its_models() -> None:
    """Health, readiness, index and configuration; one that is not there is NOT_FOUND."""
    core = Echo()
    with serving(core) as address:
        async with V2Client(address) as client:
            assert await client.is_ready(timeout_s=TIMEOUT_S)
            (entry,) = await client.index(ready_only=True, timeout_s=TIMEOUT_S)
            assert ("m", "1", "READY") == (entry.name, entry.version, entry.state)
            assert "m" == (await client.config("m", "1", timeout_s=TIMEOUT_S)).name
            await client.load("m", {"rollback": True}, timeout_s=TIMEOUT_S)
            assert [("m", {"rollback": True})] == core.loaded
            with pytest.raises(RemoteError, match="'x' is not found") as caught:
                await client.config("x", timeout_s=TIMEOUT_S)
            assert "NOT_FOUND" == caught.value.code


async def test_the_trailing_metadata_of_an_error_is_kept() -> None:
    """The id that the server's log has, for example."""
    trailer: dict[str, str] = {}
    with serving(Echo()) as address:
        async with V2Client(address) as client:
            result = await client.infer(request(), timeout_s=TIMEOUT_S, trailer=trailer)
            assert ("m", "r", ["X"]) == (result.model_name, result.request_id, list(result.outputs))
            with pytest.raises(RemoteError, match="it broke") as caught:
                await client.infer(request("broken"), timeout_s=TIMEOUT_S, trailer=trailer)
    assert caught.value.error_id == trailer["x-error-id"]


@pytest.mark.parametrize(("num_responses", "marks_last", "num_given"), [(3, True, 3), (3, False, 4), (0, True, 1)])
async def test_the_last_response_of_a_stream_and_no_other_is_final(
    num_responses: int, marks_last: bool, num_given: int
) -> None:
    """Where the server marks none, a null response follows the end of the stream."""
    with serving(Echo(num_responses=num_responses, marks_last=marks_last)) as address:
        async with V2Client(address) as client:
            results = [result async for result in client.stream(request(), timeout_s=TIMEOUT_S)]
    assert [False] * (num_given - 1) + [True] == [result.is_final for result in results]
    assert [num_given > num_responses] == [result.is_null for result in results[-1:]]


@pytest.mark.parametrize(("num_responses", "is_asked"), [(1, False), (1, True), (2, False)])
async def test_an_answer_that_leaves_every_output_out_is_one(num_responses: int, is_asked: bool) -> None:
    """The only response; behind others, or asked for, a final one without outputs is taken for the end alone."""
    call = replace(request(), parameters={"triton_enable_empty_final_response": is_asked})
    with serving(Echo(num_responses=num_responses, leaves_out=True)) as address:
        async with V2Client(address) as client:
            results = [result async for result in client.stream(call, timeout_s=TIMEOUT_S)]
    assert num_responses == len(results)
    assert (results[-1].is_final, num_responses > 1 or is_asked) == (True, results[-1].is_null)


async def test_a_stream_fails_with_the_status_of_its_error() -> None:
    """The status says NOT_FOUND, where the text alone would say UNKNOWN."""
    with serving(Echo()) as address:
        async with (
            V2Client(address) as client,
            contextlib.aclosing(client.stream(request("x"), timeout_s=TIMEOUT_S)) as results,
        ):
            with pytest.raises(RemoteError, match="'x' is not found") as caught:
                await anext(results)
    assert "NOT_FOUND" == caught.value.code


async def test_a_server_that_is_not_there_and_a_closed_client_are_unavailable() -> None:
    """The first error names who was called, the second one says that the client is closed."""
    client = V2Client("127.0.0.1:1", where="the router")
    with pytest.raises(RemoteError, match="the router cannot be reached") as caught:
        await client.index(timeout_s=TIMEOUT_S)
    assert "UNAVAILABLE" == caught.value.code
    await client.close()
    with pytest.raises(UnavailableError, match="the router is no longer called"):
        await client.index(timeout_s=TIMEOUT_S)
    with pytest.raises(UnavailableError, match="the router is no longer called"):
        await anext(client.stream(request(), timeout_s=TIMEOUT_S))
