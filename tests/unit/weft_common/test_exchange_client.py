"""The caller's side of an exchange, over a real socket: what callers see, and when calls go unary."""

import asyncio
import contextlib

import grpc
import pytest

from weft_common.client import exchange_client
from weft_common.client.channels import open_channel
from weft_common.client.exchange_client import MAX_CALL_BYTES, OPEN_PERIOD_S, ExchangeClient
from weft_common.core import InferCall
from weft_common.errors import InvalidArgumentError, ResourceExhaustedError, UnauthenticatedError
from weft_common.protocol.exchange_wire import MAX_INFLIGHT
from weft_common.server.make_server import make_server
from weft_common.server.server import add_services
from weft_common.tensors import WireTensor
from weft_protos import grpc_service_pb2 as pb
from weft_protos import mesh_pb2
from weft_protos.grpc_service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)

WAIT_S = 10.0


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def call_of(model_name="echo", request_id="", data=b"\x01\0\0\0", **parameters):
    tensor = WireTensor("INT32", (1, len(data) // 4), data)
    return InferCall(model_name, request_id=request_id, parameters=parameters, inputs={"x": tensor})


async def until(predicate):
    """Return when ``predicate()`` holds."""
    async with asyncio.timeout(WAIT_S):
        while not predicate():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.005)


async def opened(client):
    """The client has an exchange."""
    client.begin(call_of(), (), None)
    await until(lambda: client.is_open)
    return client


def start(client, *args, timeout_s=None, headers=(), **kwargs):
    """A task that ends with the response; the call must be taken."""
    begun = client.begin(call_of(*args, **kwargs), headers, timeout_s)
    assert begun is not None
    return asyncio.create_task(begun.response())


async def failure(task):
    """The error of a call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(WAIT_S):
            await task
    return caught.value


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def client(channel, clock):
    """A client that has an exchange."""
    client = await opened(ExchangeClient(channel, clock_s=clock))
    yield client
    await client.close()


async def test_first_call_goes_unary_and_opens_the_exchange(channel):
    """A call never waits for an exchange."""
    client = ExchangeClient(channel)
    assert client.begin(call_of(), (), None) is None
    await until(lambda: client.is_open)
    assert client.begin(call_of(), (), None) is not None
    await client.close()


async def test_many_calls_get_their_own_answers(client):
    """Each of 500 calls at once gets the answer with its own data and id."""
    tasks = [start(client, request_id=str(i), data=i.to_bytes(4, "little")) for i in range(500)]
    for i, response in enumerate(await asyncio.gather(*tasks)):
        assert (str(i), [i.to_bytes(4, "little")]) == (response.id, list(response.raw_output_contents))


async def test_headers_deadline_and_parameters_arrive(client, core):
    """The core sees them as of a unary call."""
    await start(client, headers=(("x-user-id", "7"), ("traceparent", "00-1")), timeout_s=60.0, priority=2)
    call, context = core.calls[0]
    assert ("7", "00-1") == (context.headers["x-user-id"], context.headers["traceparent"])
    assert {"priority": 2} == dict(call.parameters)
    assert abs(context.deadline_ns - context.arrival_ns - 60e9) < 5e9


async def test_failure_has_status_text_and_metadata(client, core):
    """As an error of gRPC, so that nothing above can tell the transport."""
    core.error = ResourceExhaustedError("full", retry_after_ms=250)
    error = await failure(start(client, "fail"))
    assert (grpc.StatusCode.RESOURCE_EXHAUSTED, "full") == (error.code(), error.details())
    assert ("retry-after-ms", "250") in list(error.trailing_metadata())


async def test_cancel_reaches_the_other_side_and_no_other_call(client, core):
    """One of four is cancelled there; the three others are answered."""
    tasks = [start(client, "hang") for _ in range(4)]
    await core.until(lambda: len(core.calls) == 4)
    tasks[1].cancel()
    await core.until(lambda: core.num_cancelled == 1)
    core.release.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [False, True, False, False] == [isinstance(answer, asyncio.CancelledError) for answer in answers]


async def test_deadline_is_kept_here_too(client, core):
    """A call that the other side does not answer ends at its deadline, and is cancelled there."""
    error = await failure(start(client, "hang", timeout_s=0.05))
    assert grpc.StatusCode.DEADLINE_EXCEEDED is error.code()
    await core.until(lambda: core.num_cancelled == 1)


async def test_bad_parameter_is_the_callers_error(client):
    """It is raised where the call is made, and harms no other."""
    with pytest.raises(InvalidArgumentError, match="parameter 'n'"):
        client.begin(call_of(n=2**70), (), None)
    assert "echo" == (await start(client)).model_name


async def test_large_call_goes_unary(client):
    """A tensor beyond ``MAX_CALL_BYTES`` makes no other call wait."""
    assert client.begin(call_of(data=bytes(MAX_CALL_BYTES + 4)), (), None) is None
    assert client.begin(call_of(data=bytes(MAX_CALL_BYTES)), (), None) is not None


async def test_model_with_a_large_answer_goes_unary_for_a_while(client, clock, monkeypatch):
    """Its next calls do, those of other models do not; later it is tried again."""
    monkeypatch.setattr(exchange_client, "MAX_CALL_BYTES", 1000)
    begun = client.begin(call_of(data=bytes(1000)), (), None)
    await begun.response()
    assert client.begin(call_of(), (), None) is None
    assert client.begin(call_of("tokens"), (), None) is not None
    clock.now_s += exchange_client.LARGE_ANSWER_S
    assert client.begin(call_of(), (), None) is not None


async def test_full_exchange_leaves_calls_to_go_unary(client, core):
    """With ``MAX_INFLIGHT`` calls in work no more are taken, until one ends."""
    tasks = [start(client, "hang") for _ in range(MAX_INFLIGHT)]
    assert client.begin(call_of(), (), None) is None
    core.release.set()
    await asyncio.gather(*tasks)
    assert "echo" == (await start(client)).model_name


async def test_lost_exchange_fails_its_own_calls_and_is_opened_again(core, clock):
    """UNAVAILABLE for each call in work; when a server is back, so is the exchange."""
    server = make_server()
    port = server.add_insecure_port("127.0.0.1:0")
    add_services(server, core, "weft.test")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        client = await opened(ExchangeClient(channel, clock_s=clock))
        tasks = [start(client, "hang") for _ in range(3)]
        await core.until(lambda: len(core.calls) == 3)
        await server.stop(None)
        assert [grpc.StatusCode.UNAVAILABLE] * 3 == [(await failure(task)).code() for task in tasks]
        assert not client.is_open
        again = make_server()
        again.add_insecure_port(f"127.0.0.1:{port}")
        add_services(again, core, "weft.test")
        await again.start()

        def is_back():
            clock.now_s += OPEN_PERIOD_S
            return client.begin(call_of(), (), None) is not None

        await until(is_back)
        assert "echo" == (await start(client)).model_name
        await client.close()
        await again.stop(None)


async def test_draining_service_answers_what_it_got(client, services, core):
    """It says that it stops: calls in work are answered, later ones go unary, and nothing fails."""
    task, unwanted = start(client, "hang"), start(client, "hang")
    await core.until(lambda: len(core.calls) == 2)
    services.inference.drain()
    await until(lambda: not client.is_open)
    assert client.begin(call_of(), (), None) is None
    unwanted.cancel()
    await core.until(lambda: core.num_cancelled == 1)
    core.release.set()
    async with asyncio.timeout(WAIT_S):
        assert "hang" == (await task).model_name
        await until(lambda: not client._tasks)  # both sides have closed the stream


async def test_key_that_is_not_valid_any_more_ends_the_exchange(client, core):
    """The caller sees UNAUTHENTICATED; the next exchange is opened with the key of then. Calls in work are answered."""
    task = start(client, "hang")
    core.error = UnauthenticatedError("the key is not valid any more")
    assert grpc.StatusCode.UNAUTHENTICATED is (await failure(start(client, "fail"))).code()
    assert not client.is_open
    core.release.set()
    assert "hang" == (await task).model_name
    await opened(client)
    assert "echo" == (await start(client)).model_name


async def test_closed_client_fails_what_is_in_work(client, core):
    """UNAVAILABLE, and no more calls are taken or exchanges opened."""
    task = start(client, "hang")
    await core.started.wait()
    await client.close()
    assert grpc.StatusCode.UNAVAILABLE is (await failure(task)).code()
    assert client.begin(call_of(), (), None) is None
    await core.until(lambda: core.num_cancelled == 1)


class _Foreign(GRPCInferenceServiceServicer):
    """A server that is no Weft: `offers` is what its metadata say."""

    def __init__(self, offers=()):
        self.offers = offers
        self.num_asked = 0

    async def ServerMetadata(self, request, context):  # noqa: N802
        self.num_asked += 1
        return pb.ServerMetadataResponse(name="other", extensions=self.offers)


@contextlib.asynccontextmanager
async def foreign(servicer, exchange=None):
    """A channel to a foreign server, with an exchange of its own making."""
    server = make_server()
    add_GRPCInferenceServiceServicer_to_server(servicer, server)
    if exchange is not None:
        handler = grpc.stream_stream_rpc_method_handler(exchange)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("weft.mesh.v1.Exchange", {"Exchange": handler}),)
        )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


@pytest.mark.parametrize("offers", [(), ("weft_exchange",)], ids=["not offered", "offered, not there"])
async def test_server_without_exchanges_is_asked_now_and_then(clock, offers):
    """Its calls go unary; it is asked once in ``OPEN_PERIOD_S``, because another server may stand there one day."""
    servicer = _Foreign(offers)
    async with foreign(servicer) as channel:
        client = ExchangeClient(channel, clock_s=clock)
        for num_asked in (1, 2):
            assert client.begin(call_of(), (), None) is None
            await until(lambda n=num_asked: servicer.num_asked == n and not client._tasks)
            assert client.begin(call_of(), (), None) is None
            assert num_asked == servicer.num_asked
            clock.now_s += OPEN_PERIOD_S
        await client.close()


async def test_answer_that_cannot_be_read_fails_the_calls_in_work():
    """A server that lies loses its exchange; its callers hear UNAVAILABLE, not an exception of protobuf."""

    async def lie(requests, context):
        await context.write(b"\x10\x80\x80\x40")  # max_message_bytes = 1 MiB
        async for _ in requests:
            await context.write(b"\xff\xff")

    async with foreign(_Foreign(("weft_exchange",)), lie) as channel:
        client = await opened(ExchangeClient(channel))
        error = await failure(start(client))
        assert grpc.StatusCode.UNAVAILABLE is error.code()
        await client.close()


async def test_withdrawn_call_that_waits_is_not_sent():
    """The service hears of what gRPC had taken, and not of calls whose deadline has passed in the queue behind it."""
    reads, taken, cancelled = asyncio.Event(), set(), set()

    async def sleepy(requests, context):
        await context.write(b"\x10\x80\x80\x40")  # max_message_bytes = 1 MiB
        await reads.wait()
        async for data in requests:
            for call in mesh_pb2.ExchangeRequest.FromString(data).calls:
                (cancelled if call.is_cancel else taken).add(call.id)
                if call.request.id == "last":
                    answer = mesh_pb2.Answer(id=call.id, response=pb.ModelInferResponse(id="last"))
                    await context.write(mesh_pb2.ExchangeResponse(answers=[answer]).SerializeToString())

    async with foreign(_Foreign(("weft_exchange",)), sleepy) as channel:
        client = await opened(ExchangeClient(channel))
        tasks = [start(client, data=bytes(20_000), timeout_s=0.2) for _ in range(800)]
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert {grpc.StatusCode.DEADLINE_EXCEEDED} == {error.code() for error in errors}
        last = start(client, request_id="last")
        reads.set()
        async with asyncio.timeout(WAIT_S):
            assert "last" == (await last).id
        assert len(taken) < 600
        assert cancelled == taken - {max(taken)}
        await client.close()
