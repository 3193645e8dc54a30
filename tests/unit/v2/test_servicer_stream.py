"""Many requests on one stream: order, errors, cancellation, back-pressure, end."""

import asyncio
from pathlib import Path

import grpc
import pytest
from tests.unit.v2.builders import make_request
from tests.wire.notation import Case, read_cases

from weft.base import errors
from weft.base.errors import ResourceExhaustedError
from weft.v2.server.stream_servicer import MAX_STREAM_INFLIGHT

GRPC_ERROR = (("triton_grpc_error", "true"),)


async def answers(stream, num_answers):
    """The next answers of a stream."""
    async with asyncio.timeout(10):
        return [await stream.read() for _ in range(num_answers)]


async def ended(stream):
    """Status, text and trailing metadata that a stream ends with, whose answers are all read."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(stream.read(), 10)
    return caught.value.code().name, caught.value.details(), dict(caught.value.trailing_metadata())  # type: ignore[arg-type]


@pytest.mark.parametrize("case", read_cases(Path(__file__).with_name("streams.txt")), ids=lambda case: case.name)
async def test_stream(stub, core, case: Case):
    """Each line holds, one after the other."""
    (deadline,) = case.starting_with("deadline") or ["20"]
    stream = stub.ModelStreamInfer(metadata=GRPC_ERROR if "status" in case.lines else None, timeout=float(deadline))
    for line in case.lines:
        match line.split(" "):
            case ["write", model_name, request_id, *parameters]:
                request = make_request(model_name, request_id)
                for key, value in (parameter.split("=") for parameter in parameters):
                    request.parameters[key].string_param = value
                await stream.write(request)
            case ["read", request_id, *rest]:
                (answer,) = await answers(stream, 1)
                text = line.partition(" error ")[2]
                is_last = answer.infer_response.parameters["triton_final_response"].bool_param
                assert (request_id, text, "more" not in rest) == (
                    answer.infer_response.id,
                    answer.error_message,
                    is_last,
                )
            case ["error", name, *text]:
                core.error = getattr(errors, name)(" ".join(text), retry_after_ms=250)
            case ["trailing", name, value]:
                core.trailing = [(name, value)]
            case ["working", number]:
                await core.until(lambda number=number: len(core.calls) >= int(number))
            case ["cancelled", number]:
                await core.until(lambda number=number: core.num_cancelled == int(number))
            case ["open", gate]:
                core.gates[gate].set()
            case ["release"]:
                core.release.set()
            case ["half"]:
                await stream.done_writing()
            case ["done"]:
                await stream.done_writing()
                assert grpc.aio.EOF is await stream.read()  # type: ignore[attr-defined]
                assert "OK" == (await stream.code()).name
            case ["cancel"]:
                stream.cancel()
            case ["ends", code, *rest]:
                found, text, trailing = await ended(stream)
                assert code == found
                assert text == rest[0] if rest else True
                assert dict(pair.split("=") for pair in rest[1:]).items() <= trailing.items()
                assert not rest or "250" == trailing["retry-after-ms"]
    assert all(context.deadline_ns is not None for _, context in core.calls)


async def test_answers_of_a_decoupled_model_do_not_hold_up_the_next_request(stub, core):
    """They come as they are made, in their own order, and so does what was sent after."""
    stream = stub.ModelStreamInfer()
    await stream.write(make_request("count", "a", num=2))
    await stream.write(make_request("echo", "b"))
    await stream.write(make_request("echo", "c"))
    ids = [answer.infer_response.id for answer in await answers(stream, 4)]
    assert (["a", "a"], ["b", "c"]) == ([i for i in ids if i == "a"], [i for i in ids if i != "a"])
    core.gates["last"].set()
    await stream.done_writing()
    assert grpc.aio.EOF is await stream.read()  # type: ignore[attr-defined]


async def test_the_end_of_a_decoupled_model_is_told_to_who_asks(stub, core):
    """Without ``triton_enable_empty_final_response`` zero responses are none; with it there is an empty final one."""
    core.gates["last"].set()
    stream = stub.ModelStreamInfer()
    asking = make_request("count", "asking", num=0)
    asking.parameters["triton_enable_empty_final_response"].bool_param = True
    await stream.write(make_request("count", "silent", num=0))
    await stream.write(asking)
    (answer,) = await answers(stream, 1)
    assert ("", "asking", "count", "3") == (
        answer.error_message,
        answer.infer_response.id,
        answer.infer_response.model_name,
        answer.infer_response.model_version,
    )
    assert answer.infer_response.parameters["triton_final_response"].bool_param
    assert [] == list(answer.infer_response.outputs)
    await stream.done_writing()
    assert grpc.aio.EOF is await stream.read()  # type: ignore[attr-defined]


async def test_a_decoupled_model_makes_no_more_answers_than_the_client_reads(stub, core):
    """What waits is bounded by a few answers and gRPC's windows; when the client leaves, the model is told."""
    stream = stub.ModelStreamInfer()
    await stream.write(make_request("count", num=10_000, data=bytes(4 << 20)))
    await answers(stream, 1)
    assert "echo" == (await stub.ModelInfer(make_request())).model_name  # the server had time to make more
    assert core.num_counted < 100
    stream.cancel()
    await core.until(lambda: core.is_closed or core.num_cancelled)


async def test_status_and_metadata_come_with_the_text_of_an_error(stub, core):
    """As parameters of the response beside it, so that a client need not give up the stream to know them."""
    core.error = ResourceExhaustedError("full", retry_after_ms=250)
    core.trailing = [("x-path", "a>b")]
    stream = stub.ModelStreamInfer()
    await stream.write(make_request("fail"))
    parameters = (await stream.read()).infer_response.parameters
    assert {"grpc_status": "RESOURCE_EXHAUSTED", "retry-after-ms": "250", "x-path": "a>b"} == {
        key: value.string_param for key, value in parameters.items() if key != "triton_final_response"
    }
    stream.cancel()


async def test_malformed_request_is_answered_in_its_place(stub, core):
    """A request that cannot be converted is an error of its own and the core never sees it."""
    bad = make_request(request_id="a")
    bad.raw_input_contents.append(b"")
    stream = stub.ModelStreamInfer()
    await stream.write(bad)
    await stream.write(make_request(request_id="b"))
    first, second = await answers(stream, 2)
    assert ("a", "b", "") == (first.infer_response.id, second.infer_response.id, second.error_message)
    assert "raw_input_contents has 2 entries for 1 inputs" in first.error_message
    assert 1 == len(core.calls)
    stream.cancel()


async def test_thousand_requests_on_one_stream(stub, core):
    """A thousand requests, written while answers are read, come back complete and in order."""
    stream = stub.ModelStreamInfer()

    async def write():
        for i in range(1000):
            await stream.write(make_request(request_id=str(i)))
        await stream.done_writing()

    writer = asyncio.create_task(write())
    assert [str(i) for i in range(1000)] == [answer.infer_response.id for answer in await answers(stream, 1000)]
    await writer
    assert grpc.aio.EOF is await stream.read()  # type: ignore[attr-defined]
    assert 1000 == len(core.calls)


async def test_stream_takes_a_limited_number_at_once(stub, core):
    """Beyond the limit a stream is not read until an answer is out, so a flood does not fill the memory."""
    stream = stub.ModelStreamInfer()
    for _ in range(MAX_STREAM_INFLIGHT + 50):
        await stream.write(make_request("hang"))
    await core.until(lambda: len(core.calls) >= MAX_STREAM_INFLIGHT)
    assert "echo" == (await stub.ModelInfer(make_request())).model_name  # the server had time to read more
    assert MAX_STREAM_INFLIGHT + 1 == len(core.calls)
    core.release.set()
    assert MAX_STREAM_INFLIGHT + 50 == len(await answers(stream, MAX_STREAM_INFLIGHT + 50))
    stream.cancel()


async def test_draining_answers_and_then_ends(stub, services, core):
    """A draining server answers what a stream has sent and ends it with UNAVAILABLE; a new one waits, and is served."""
    stream = stub.ModelStreamInfer()
    await stream.write(make_request("hang", "a"))
    await core.started.wait()
    services.inference.drain()
    core.release.set()
    assert "a" == (await stream.read()).infer_response.id
    shutting_down = ("UNAVAILABLE", "GRPC server is shutting down and has stopped accepting new requests", {})
    assert shutting_down == await ended(stream)
    late = stub.ModelStreamInfer()
    await late.write(make_request("echo", "b"))
    answer = asyncio.create_task(late.read())
    assert not (await asyncio.wait([answer], timeout=0.2))[0]
    services.inference.release()
    assert "b" == (await answer).infer_response.id


async def test_idle_stream_does_not_hold_up_a_stop(stub, server, services):
    """An open stream without requests ends at once when the server drains, long before the grace is over."""
    stream = stub.ModelStreamInfer()
    await stream.write(make_request())
    await stream.read()
    services.inference.drain()
    await asyncio.wait_for(server.stop(60), 5)
    assert "UNAVAILABLE" == (await stream.code()).name


async def test_unexpected_exception_shows_only_its_id(stub, core, caplog):
    """In a stream too the client sees an id, and the log has the text under that id."""
    core.error = ValueError("secret")
    stream = stub.ModelStreamInfer()
    await stream.write(make_request("fail"))
    text = (await stream.read()).error_message
    (record,) = caplog.records
    assert f"weft.test failed on model 'fail' (error id {record.error_id})" == text
    assert "secret" in str(record.exc_info[1])
    stream.cancel()
