"""The service's side of an exchange, over a real socket: what each call is answered, and how the stream ends."""

import asyncio
import logging

import grpc
import pytest
from tests.unit.weft_common.builders import make_request

from weft_common import errors
from weft_common.protocol.exchange_wire import MAX_INFLIGHT
from weft_protos import mesh_pb2
from weft_protos.mesh_pb2_grpc import ExchangeStub

WAIT_S = 10.0


class Caller:
    """One exchange, driven by hand; `answers` are those that have come, by id, in order."""

    def __init__(self, channel, metadata=None):
        self.rpc = ExchangeStub(channel).Exchange(metadata=metadata)
        self.answers = {}
        self.is_closing = False
        self.max_message_bytes = 0
        self.largest_batch = 0

    async def send(self, *calls):
        await self.rpc.write(mesh_pb2.ExchangeRequest(calls=calls))

    async def read(self):
        """Take the next message; False at the end."""
        async with asyncio.timeout(WAIT_S):
            message = await self.rpc.read()
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            return False
        self.max_message_bytes = message.max_message_bytes or self.max_message_bytes
        self.is_closing = self.is_closing or message.is_closing
        self.largest_batch = max(self.largest_batch, len(message.answers))
        self.answers |= {answer.id: answer for answer in message.answers}
        return True

    async def until(self, *ids):
        """Every one of these calls is answered."""
        while not self.answers.keys() >= set(ids):
            assert await self.read()

    async def status(self):
        """How the stream ends, once everything before is read."""
        async with asyncio.timeout(WAIT_S):
            while await self.rpc.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                pass


@pytest.fixture
async def caller(channel):
    """An exchange that is open."""
    caller = Caller(channel)
    assert await caller.read()
    yield caller
    caller.rpc.cancel()


def make_call(call_id, model_name="echo", *, timeout_us=0, headers=None, **request):
    """A call of a request; what is no field of ``Call`` is of the request."""
    return mesh_pb2.Call(
        id=call_id, timeout_us=timeout_us, headers=headers, request=make_request(model_name, **request)
    )


def cancel(call_id):
    return mesh_pb2.Call(id=call_id, is_cancel=True)


async def ends_with(caller):
    """The error that a stream ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await caller.status()
    return caught.value


async def test_first_message_says_what_may_be_sent(caller):
    """It has the largest message that the service takes, and no answers."""
    assert (2**31 - 1, {}) == (caller.max_message_bytes, caller.answers)


async def test_answer_is_that_of_model_infer(caller, stub, core):
    """The response, and the metadata after it, are those that ``ModelInfer`` sends."""
    core.trailing = [("x-path", "a>b"), ("x-name", "größer")]
    await caller.send(make_call(7, request_id="r"))
    await caller.until(7)
    unary = stub.ModelInfer(make_request(request_id="r"))
    assert await unary == caller.answers[7].response
    assert list(await unary.trailing_metadata()) == [(h.key, h.value) for h in caller.answers[7].trailing_metadata]
    assert 0 == caller.answers[7].status


@pytest.mark.parametrize(
    "error",
    [
        errors.ResourceExhaustedError("full", retry_after_ms=250),
        errors.InternalError("broken", error_id="ab12"),
        errors.RemoteError("ABORTED", "the other side gave up", retry_after_ms=9),
        errors.InvalidArgumentError("größer 語 100%\n" * 1000),
    ],
    ids=lambda error: error.code,
)
async def test_failure_is_that_of_model_infer(caller, stub, core, error):
    """Status, text and trailing metadata are those that ``ModelInfer`` ends with."""
    core.error, core.trailing = error, [("x-path", "a")]
    await caller.send(make_call(1, "fail"))
    await caller.until(1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelInfer(make_request("fail"))
    answer, unary = caller.answers[1], caught.value
    assert (unary.code().value[0], unary.details()) == (answer.status, answer.message)
    assert list(unary.trailing_metadata()) == [(h.key, h.value) for h in answer.trailing_metadata]  # type: ignore[comparison-overlap]
    assert not answer.HasField("response")


async def test_headers_of_stream_and_call_arrive(channel, core):
    """A call has its own metadata and those of the stream; a key ends here in both."""
    caller = Caller(channel, metadata=(("x-all", "s"), ("x-one", "s"), ("x-api-key", "k")))
    await caller.send(make_call(1, headers={"x-one": "c", "authorization": "Bearer k"}))
    await caller.until(1)
    headers = core.calls[0][1].headers
    assert ("s", "c") == (headers["x-all"], headers["x-one"])
    assert not {"x-api-key", "authorization"} & headers.keys()
    caller.rpc.cancel()


@pytest.mark.parametrize(
    "headers", [{"X-Upper": "1"}, {"a b": "1"}, {"": "1"}, {"x-bin": "1"}, {"x": "ü"}, {"x": "a\nb"}]
)
async def test_metadata_that_grpc_would_not_carry_is_refused(caller, core, headers):
    """INVALID_ARGUMENT for that call alone, and the core does not hear of it."""
    await caller.send(make_call(1, headers=headers), make_call(2))
    await caller.until(1, 2)
    assert (grpc.StatusCode.INVALID_ARGUMENT.value[0], 0) == (caller.answers[1].status, caller.answers[2].status)
    assert 1 == len(core.calls)


async def test_calls_begin_in_order_and_answers_come_as_they_are_made(caller, core):
    """A call that waits holds up none behind it."""
    await caller.send(make_call(1, "hang", request_id="1"), make_call(2, request_id="2"), make_call(3, request_id="3"))
    await caller.until(2, 3)
    assert ["1", "2", "3"] == [call.request_id for call, _ in core.calls]
    assert 1 not in caller.answers
    core.release.set()
    await caller.until(1)


async def test_answers_that_come_together_travel_together(caller):
    """Answers made while another is written go out in one message."""
    await caller.send(*(make_call(i) for i in range(64)))
    await caller.until(*range(64))
    assert caller.largest_batch > 1


async def test_large_answer_travels_alone(caller):
    """An answer of 3 MB beside small ones arrives whole."""
    data = bytes(3_000_000)
    await caller.send(make_call(1, data=data), *(make_call(i) for i in range(2, 9)))
    await caller.until(*range(1, 9))
    assert [data] == list(caller.answers[1].response.raw_output_contents)


async def test_cancel_one_of_four(caller, core):
    """Its task is cancelled and it gets no answer; the three others are answered."""
    await caller.send(*(make_call(i, "hang") for i in range(1, 5)))
    await core.until(lambda: len(core.calls) == 4)
    await caller.send(cancel(3))
    await core.until(lambda: core.num_cancelled == 1)
    core.release.set()
    await caller.until(1, 2, 4)
    await caller.rpc.done_writing()
    await caller.status()
    assert {1, 2, 4} == caller.answers.keys()


async def test_cancel_of_no_call_is_nothing(caller):
    """One that is answered, or never was, may be cancelled."""
    await caller.send(make_call(1))
    await caller.until(1)
    await caller.send(cancel(1), cancel(99), make_call(2))
    await caller.until(2)


async def test_deadline_ends_a_call(caller, core):
    """DEADLINE_EXCEEDED, its task is cancelled, and the core knew how long there was."""
    await caller.send(make_call(1, "hang", timeout_us=50_000), make_call(2, "hang"))
    await caller.until(1)
    assert grpc.StatusCode.DEADLINE_EXCEEDED.value[0] == caller.answers[1].status
    await core.until(lambda: core.num_cancelled == 1)
    (_, first), (_, second) = core.calls
    assert 0 < first.deadline_ns - first.arrival_ns <= 50_000_000
    assert second.deadline_ns is None


@pytest.mark.parametrize("timeout_us", [1, 2**64 - 1])
async def test_odd_deadlines_are_taken(caller, timeout_us):
    """A microsecond is not enough, half a million years are."""
    await caller.send(make_call(1, timeout_us=timeout_us, wait_for="never" if timeout_us == 1 else ""))
    await caller.until(1)
    assert (timeout_us == 1) == (caller.answers[1].status == grpc.StatusCode.DEADLINE_EXCEEDED.value[0])


async def test_id_is_free_when_answered_or_cancelled(caller, core):
    """A call with the id of an earlier one is answered, though the earlier one is still being cancelled."""
    await caller.send(make_call(5, request_id="a"))
    await caller.until(5)
    caller.answers.clear()
    await caller.send(make_call(5, "hang"), cancel(5), make_call(5, request_id="b"))
    await caller.until(5)
    assert "b" == caller.answers[5].response.id


async def test_id_in_use_ends_the_stream_alone(caller, stub, core):
    """INVALID_ARGUMENT names the id; the calls of that stream are cancelled, others are answered."""
    await caller.send(make_call(5, "hang"))
    await core.started.wait()
    await caller.send(make_call(5))
    error = await ends_with(caller)
    assert (grpc.StatusCode.INVALID_ARGUMENT, "call id 5 is in use; take another until its answer has come") == (
        error.code(),
        error.details(),
    )
    await core.until(lambda: core.num_cancelled == 1)
    assert "echo" == (await stub.ModelInfer(make_request())).model_name


@pytest.mark.parametrize("garbage", [b"\xff" * 9, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x03\x2a\x05\x00"])
async def test_garbage_ends_the_stream_alone(channel, stub, core, garbage):
    """INVALID_ARGUMENT for a message that is no ``ExchangeRequest``; the service serves on."""
    caller = Caller(channel)
    caller.rpc = channel.stream_stream("/weft.mesh.v1.Exchange/Exchange")()
    await caller.rpc.write(garbage)
    assert grpc.StatusCode.INVALID_ARGUMENT is (await ends_with(caller)).code()
    assert "echo" == (await stub.ModelInfer(make_request())).model_name


async def test_empty_messages_are_nothing(caller):
    """A message without calls, and a call without a request, which is one for no model, harm nobody."""
    await caller.send()
    await caller.send(mesh_pb2.Call(), make_call(1))
    await caller.until(0, 1)
    assert grpc.StatusCode.NOT_FOUND.value[0] == caller.answers[0].status


async def test_lost_stream_cancels_its_calls(channel, caller, core):
    """A caller that goes away leaves no call in work; another's go on."""
    other = Caller(channel)
    await other.send(make_call(1, "hang"))
    await caller.send(make_call(1, "hang"), make_call(2, "hang"))
    await core.until(lambda: len(core.calls) == 3)
    caller.rpc.cancel()
    await core.until(lambda: core.num_cancelled == 2)
    core.release.set()
    await other.until(1)
    other.rpc.cancel()


async def test_caller_that_goes_while_it_is_written_to_is_no_error(channel, server, services, core, caplog):
    """Nothing is logged above INFO: what gRPC says of a write that has lost its stream is not news."""
    caller = Caller(channel)
    for i in range(20):
        await caller.send(make_call(i, data=bytes(900_000)))
    await core.until(lambda: len(core.calls) >= 4)  # more than gRPC takes from a caller that does not read
    caller.rpc.cancel()
    async with asyncio.timeout(WAIT_S):
        while services.inference.exchange._exchanges:  # noqa: ASYNC110  # its end has no event
            await asyncio.sleep(0.005)
    await server.stop(None)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_closed_side_gets_its_answers(caller, core):
    """A caller that closes its side is answered, then the stream ends with OK."""
    await caller.send(make_call(1, "hang"))
    await caller.rpc.done_writing()
    await core.started.wait()
    core.release.set()
    await caller.until(1)
    assert not await caller.read()
    assert grpc.StatusCode.OK is await caller.rpc.code()


async def test_drain_answers_what_was_sent_and_takes_no_other_exchange(channel, caller, services, core):
    """The caller is told; until it closes its side its calls are answered, and a new exchange is UNAVAILABLE."""
    await caller.send(make_call(1, "hang"))
    await core.started.wait()
    services.inference.drain()
    services.inference.release()
    while not caller.is_closing:
        assert await caller.read()
    await caller.send(make_call(2))
    await caller.until(2)
    error = await ends_with(Caller(channel))
    assert grpc.StatusCode.UNAVAILABLE is error.code()
    await caller.rpc.done_writing()
    core.release.set()
    await caller.until(1)
    assert not await caller.read()


async def test_full_exchange_is_not_read(caller, stub, core):
    """With ``MAX_INFLIGHT`` calls in work the next is taken when one of them ends."""
    await caller.send(*(make_call(i, "hang") for i in range(MAX_INFLIGHT + 1)))
    await core.until(lambda: len(core.calls) == MAX_INFLIGHT)
    await stub.ModelInfer(make_request())  # others are served
    assert MAX_INFLIGHT + 1 == len(core.calls)
    core.release.set()
    await caller.until(*range(MAX_INFLIGHT + 1))
    assert MAX_INFLIGHT + 2 == len(core.calls)


async def test_caller_that_does_not_read_is_not_read(caller, core):
    """Answers of 1 MB that nobody takes: before long no more calls can be sent, and then all are answered in order."""
    num_calls, data = 200, bytes(1_000_000)

    async def send_all():
        for i in range(num_calls):
            await caller.send(make_call(i, data=data))

    sending = asyncio.create_task(send_all())
    seen = -1
    while seen != len(core.calls) or not seen:
        seen = len(core.calls)
        await asyncio.wait([sending], timeout=0.3)
    assert 0 < seen < num_calls / 2
    await caller.until(*range(num_calls))
    await sending


async def test_unused_stream_ends_with_ok(caller):
    """Nothing was sent and nothing is owed."""
    await caller.rpc.done_writing()
    assert not await caller.read()
    assert grpc.StatusCode.OK is await caller.rpc.code()
