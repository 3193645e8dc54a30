"""One request over a real socket: answers, statuses of every error, cancellation, deadlines, metadata."""

import asyncio
import json
import time

import grpc
import pytest
from tests.unit.v2.builders import make_request

from weft.base import errors
from weft.base.observing.logs import LineFormatter
from weft.v2.protocol.status import MAX_TEXT_BYTES
from weft_protos import grpc_service_pb2 as pb

CLASSES = [cls for cls in errors.WeftError.__subclasses__() if cls is not errors.RemoteError]


async def failure(call):
    """The error that a call ends with, and its trailing metadata as a dict."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value, dict(caught.value.trailing_metadata())  # type: ignore[arg-type]


async def test_answer_echoes_what_identifies_the_request(stub):
    """The response has the request's id, model and version, and its outputs raw, in order."""
    request = make_request(request_id="7")
    request.inputs.add(name="a", datatype="UINT8", shape=[1, 1])
    request.raw_input_contents.append(b"\x05")
    response = await stub.ModelInfer(request)
    assert ("7", "echo", "3") == (response.id, response.model_name, response.model_version)
    assert ["x", "a"] == [output.name for output in response.outputs]
    assert list(request.raw_input_contents) == list(response.raw_output_contents)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
async def test_error_class_becomes_its_status(stub, core, cls):
    """Each error class that the core raises arrives as its status with its text."""
    core.error = cls("what is wrong")
    error, _ = await failure(stub.ModelInfer(make_request("fail")))
    assert (cls.code, core.error.message) == (error.code().name, error.details())


async def test_remote_error_keeps_its_status(stub, core):
    """A status that came from another service is passed on, also one that Weft never makes."""
    core.error = errors.RemoteError("ABORTED", "the other side gave up", retry_after_ms=9)
    error, trailing = await failure(stub.ModelInfer(make_request("fail")))
    assert ("ABORTED", "the other side gave up", "9") == (
        error.code().name,
        error.details(),
        trailing["retry-after-ms"],
    )


async def test_overload_tells_when_to_try_again(stub, core):
    """``retry-after-ms`` is in the trailing metadata of an overload."""
    core.error = errors.ResourceExhaustedError("full", retry_after_ms=250)
    _, trailing = await failure(stub.ModelInfer(make_request("fail")))
    assert "250" == trailing["retry-after-ms"]


async def test_unexpected_exception_is_internal_with_an_id_and_no_secret(stub, core, caplog):
    """The client sees INTERNAL and an id; the exception's text is in the log line with that id, and only there."""
    core.error = ValueError("secret")
    error, trailing = await failure(stub.ModelInfer(make_request("fail")))
    error_id = trailing["x-error-id"]
    assert f"weft.test failed on model 'fail' (error id {error_id})" == error.details()
    assert "INTERNAL" == error.code().name
    assert "secret" not in str(error.trailing_metadata()) + (error.debug_error_string() or "")
    (record,) = caplog.records
    line = json.loads(LineFormatter().format(record))
    assert (error_id, "fail", "error") == (line["error_id"], line["model"], line["level"])
    assert "ValueError: secret" in line["exception"]


@pytest.mark.parametrize("text", ["x" * 100_000, "ü" * 100_000, "語\n" * 50_000], ids=["ascii", "2 bytes", "3 bytes"])
async def test_long_text_arrives_cut(stub, core, text):
    """A text that no header could hold arrives cut and with its own status."""
    core.error = errors.InvalidArgumentError(text)
    error, _ = await failure(stub.ModelInfer(make_request("fail")))
    assert "INVALID_ARGUMENT" == error.code().name
    assert error.details().endswith(" ...")
    assert text.startswith(error.details().removesuffix(" ..."))
    assert len(error.details()) > MAX_TEXT_BYTES / 10


async def test_text_in_any_script_arrives_whole(stub, core):
    """Non-ASCII characters, percent signs and line breaks in a text arrive as they are."""
    core.error = errors.InvalidArgumentError("größer 語 100%\n\x00 end")
    error, _ = await failure(stub.ModelInfer(make_request("fail")))
    assert "größer 語 100%\n\x00 end" == error.details()


@pytest.mark.parametrize("model_name", ["echo", "fail"])
async def test_trailing_metadata_of_the_core_arrives(stub, core, model_name):
    """Pairs of the core come after an answer and after an error; what is not ASCII is escaped, not a crash."""
    core.trailing = [("x-path", "a>b"), ("x-name", "größer\n語")]
    call = stub.ModelInfer(make_request(model_name))
    await asyncio.wait([asyncio.ensure_future(call.code())])
    trailing = dict(await call.trailing_metadata())
    assert ("a>b", "gr\\xf6\\xdfer\\n\\u8a9e") == (trailing["x-path"], trailing["x-name"])
    assert {"echo": "OK", "fail": "NOT_FOUND"}[model_name] == (await call.code()).name


async def test_malformed_request_is_refused_before_the_core(stub, core):
    """What the wire conversion refuses is INVALID_ARGUMENT and the core never sees it."""
    request = make_request()
    request.raw_input_contents.append(b"")
    error, _ = await failure(stub.ModelInfer(request))
    assert "INVALID_ARGUMENT" == error.code().name
    assert [] == core.calls


async def test_cancel_cancels_the_core(stub, core):
    """A client that cancels withdraws the request: the core's task is cancelled."""
    call = stub.ModelInfer(make_request("hang"))
    await core.started.wait()
    call.cancel()
    await asyncio.wait_for(core.cancelled.wait(), 5)
    assert 1 == core.num_cancelled


async def test_deadline_cancels_the_core(stub, core):
    """When the client's deadline passes, the client gets DEADLINE_EXCEEDED and the core's task is cancelled."""
    error, _ = await failure(stub.ModelInfer(make_request("hang"), timeout=0.2))
    assert "DEADLINE_EXCEEDED" == error.code().name
    await asyncio.wait_for(core.cancelled.wait(), 5)


async def test_lost_client_cancels_the_core(address, core):
    """A client whose connection goes away withdraws its request like one that cancels."""
    channel = grpc.aio.insecure_channel(address)
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", pb.ModelInferRequest.SerializeToString)  # type: ignore[call-arg]
    pending = asyncio.ensure_future(call(make_request("hang")))
    await core.started.wait()
    await channel.close()  # type: ignore[call-arg]
    await asyncio.wait_for(core.cancelled.wait(), 5)
    await asyncio.wait([pending])


async def test_core_sees_deadline_and_headers(stub, core):
    """The context has the deadline on the monotonic clock (gRPC rounds it up by up to 1%) and the ASCII metadata."""
    before_ns = time.monotonic_ns()
    metadata = (("x-key", "value"), ("x-data-bin", b"\x00"))
    await stub.ModelInfer(make_request(), timeout=50, metadata=metadata)
    _, context = core.calls[0]
    assert before_ns + 49e9 < context.deadline_ns < time.monotonic_ns() + 51e9
    assert before_ns <= context.arrival_ns <= time.monotonic_ns()
    assert "value" == context.headers["x-key"]
    assert "x-data-bin" not in context.headers
    await stub.ModelInfer(make_request())  # without a deadline it has none, instead of one far away
    assert core.calls[1][1].deadline_ns is None


async def test_one_slow_request_delays_nobody(stub, core):
    """While one request hangs, others on the same connection are answered."""
    hanging = stub.ModelInfer(make_request("hang"))
    await core.started.wait()
    assert ["0", "1", "2"] == [(await stub.ModelInfer(make_request(request_id=str(i)))).id for i in range(3)]
    core.release.set()
    assert "hang" == (await hanging).model_name
