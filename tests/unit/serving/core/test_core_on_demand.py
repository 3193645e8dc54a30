"""Models that load on their first request."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from weft.base.core import CallContext, InferCall
from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.base.tensors import encode
from weft.serving.lifecycle import warm_pool
from weft.serving.lifecycle.warm_pool import WarmLimits
from weft.serving.runtime import idle
from weft.v2.protocol.codec import InferMessage, deserialize_call, deserialize_request
from weft.v2.server.servicer import V2Servicer
from weft_protos import grpc_service_pb2 as pb


async def test_a_load_that_takes_long_is_loading_in_the_index(
    repository: Any, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests wait for it by their own deadlines, and it is ready again with the answer."""
    monkeypatch.setattr(warm_pool, "SLOW_S", 0.01)
    repository.write("m", {1: 5})
    core = await repository.serve(gate.on_load(), on_demand=WarmLimits())
    answer = asyncio.ensure_future(repository.infer(core))
    async with asyncio.timeout(10):
        while core.index(ready_only=False)[0].state != "LOADING":  # noqa: ASYNC110  # the index tells nobody
            await asyncio.sleep(0.005)
    assert not core.is_model_ready("m", "")
    gate.is_open.set()
    assert await answer == 5
    assert core.index(ready_only=False)[0].state == "READY"


async def test_a_load_that_takes_long_holds_up_no_other(
    repository: Any, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads are one at a time, but for one that does not end."""
    monkeypatch.setattr(idle, "SLOW_S", 0.01)
    for name in ("m", "n"):
        repository.write(name, {1: 5})
    core = await repository.serve(gate.on_load(), on_demand=WarmLimits())
    answers = [asyncio.ensure_future(repository.infer(core, name)) for name in ("m", "n")]
    for _ in answers:
        await gate.has_entered()
    gate.is_open.set()
    assert [5, 5] == await asyncio.gather(*answers)


async def test_a_bad_request_is_the_clients(repository: Any) -> None:
    """A request that does not fit is INVALID_ARGUMENT, loaded or not."""
    repository.write("m", {1: 1})
    core = await repository.serve(on_demand=WarmLimits())
    with pytest.raises(InvalidArgumentError):
        await core.infer(InferCall("m"), CallContext())


async def test_a_model_with_a_sequence_is_not_evicted(repository: Any) -> None:
    """Another model waits for room while a sequence is alive, though no request is in work, and loads when it ends."""
    repository.write("s", {1: 1}, repository.CONFIG + "sequence_batching { max_sequence_idle_microseconds: 60000000 }")
    repository.write("m", {1: 2})
    core = await repository.serve(on_demand=WarmLimits(num_models=1))

    def call(**flags: bool) -> InferCall:
        inputs = {"X": encode(np.zeros((1, 2), np.float32))}
        return InferCall("s", inputs=inputs, parameters={"sequence_id": 7, **flags})

    await core.infer(call(sequence_start=True), CallContext())
    other = asyncio.ensure_future(repository.infer(core))
    await asyncio.wait([other], timeout=0.1)
    await core.infer(call(), CallContext())  # an evicted model would know nothing of the sequence
    assert not other.done()
    await core.infer(call(sequence_end=True), CallContext())
    assert 2 == await asyncio.wait_for(other, 10)


async def test_an_idle_sequence_lets_its_model_go(repository: Any) -> None:
    """A sequence whose client has vanished holds its model until it was idle for too long."""
    repository.write("s", {1: 1}, repository.CONFIG + "sequence_batching { max_sequence_idle_microseconds: 50000 }")
    repository.write("m", {1: 2})
    core = await repository.serve(on_demand=WarmLimits(num_models=1))
    inputs = {"X": encode(np.zeros((1, 2), np.float32))}
    await core.infer(
        InferCall("s", inputs=inputs, parameters={"sequence_id": 7, "sequence_start": True}), CallContext()
    )
    assert 2 == await asyncio.wait_for(repository.infer(core), 10)


class Context:
    """A call as the servicer sees it; like gRPC's, it keeps the exception that ends it."""

    def __init__(self, *metadata: tuple[str, str]) -> None:
        self.metadata = metadata
        self.code: Any = None
        self.exception: Exception | None = None

    def invocation_metadata(self) -> Any:
        return self.metadata

    def time_remaining(self) -> None:
        return None

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        pass

    def set_trailing_metadata(self, metadata: Any) -> None:
        pass

    async def abort(self, code: Any, *_: Any) -> None:
        self.code = code
        self.exception = RuntimeError("aborted")
        raise self.exception


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only reference counts free memory; a cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
async def servicer(repository: Any) -> V2Servicer:
    """Serves a model ``m``, and ``raises``, whose runs fail."""

    class Raises(repository.BACKEND):
        def run(self, inputs: dict[str, Any], num_rows: int) -> dict[str, Any]:
            if self.model.signature.name == "raises":
                raise NotFoundError("no")  # nothing that is logged: a log record keeps the traceback
            return super().run(inputs, num_rows)

    for name in ("m", "raises"):
        repository.write(name, {1: 1})
    return V2Servicer(await repository.serve(Raises), "weft.test")


def _request(model: str, columns: int = 2) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="X", datatype="FP32", shape=(1, columns))
    request.raw_input_contents.append(bytes(8))
    return request


async def _stream(request: pb.ModelInferRequest) -> AsyncIterator[InferMessage]:
    yield deserialize_request(request.SerializeToString())


def _num_calls() -> int:
    """Calls whose context is still in memory."""
    return sum(type(kept) is CallContext for kept in gc.get_objects())


@pytest.mark.parametrize(
    ("request_", "code"),
    [(_request("m"), None), (_request("raises"), "NOT_FOUND"), (_request("m", columns=3), "INVALID_ARGUMENT")],
    ids=["ok", "raises", "bad"],
)
@pytest.mark.usefixtures("no_collector")
async def test_an_answered_request_is_freed(
    repository: Any, servicer: V2Servicer, request_: pb.ModelInferRequest, code: str
) -> None:
    """A request, with its tensors, is gone when it is answered, with a result or with an error.

    Else a client that sends large tensors in vain fills the memory, long before a collection is due.
    """
    num_before, context = _num_calls(), Context()
    with contextlib.suppress(RuntimeError):
        await servicer.ModelInfer(deserialize_call(request_.SerializeToString()), context)  # type: ignore[arg-type]
    await repository.cores[0].close(grace_s=10)  # the thread of the instance has forgotten the batch, too
    assert (code, num_before) == (context.code and context.code.name, _num_calls())


@pytest.mark.parametrize("model", ["m", "raises"])
@pytest.mark.parametrize("metadata", [(), (("triton_grpc_error", "true"),)], ids=["goes on", "ends on error"])
@pytest.mark.usefixtures("no_collector")
async def test_an_answered_request_of_a_stream_is_freed(
    repository: Any, servicer: V2Servicer, model: str, metadata: Any
) -> None:
    """That also holds for a stream, whether an error ends it or not."""
    num_before, context = _num_calls(), Context(*metadata)
    with contextlib.suppress(RuntimeError):
        async for _ in servicer.ModelStreamInfer(_stream(_request(model)), context):  # type: ignore[arg-type]
            pass
    await repository.cores[0].close(grace_s=10)
    assert num_before == _num_calls()


@pytest.mark.usefixtures("no_collector")
async def test_an_unloaded_model_is_freed(repository: Any) -> None:
    """What a model holds goes with its unload, without a collection: at start objects are frozen, cycles would stay."""
    made: list[weakref.ref[Any]] = []

    class Remembered(repository.BACKEND):
        def load(self) -> None:
            super().load()
            made.append(weakref.ref(self))

    repository.write("m", {1: 1})
    core = await repository.serve(Remembered)
    assert await repository.infer(core) == 1
    await core.load("m", {})
    assert await repository.infer(core) == 1
    await core.unload("m", unload_dependents=False)
    await asyncio.sleep(0)
    assert [None, None] == [reference() for reference in made]
