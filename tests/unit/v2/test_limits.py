"""Limits of a request: each just within is taken, just beyond is refused before a model sees it."""

import grpc
import pytest
from tests.messages import call_from_request
from tests.unit.v2.builders import make_request

from weft.base import limits
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import MAX_STRING_BYTES, check_bytes
from weft.v2.server.make_server import make_server
from weft.wire.server.methods import ServerOptions
from weft_protos import grpc_service_pb2 as pb


def request(model_name="m", **fields):
    return pb.ModelInferRequest(model_name=model_name, **fields)


def inputs(count, **fields):
    made = request(raw_input_contents=[b""] * count)
    for i in range(count):
        made.inputs.add(**({"name": str(i), "datatype": "INT32", "shape": [0]} | fields))
    return made


def parameters(count, key="k{}", text=""):
    made = request()
    for i in range(count):
        made.parameters[key.format(i)].string_param = text
    return made


def output(name):
    made = request()
    made.outputs.add(name=name)
    return made


def outputs(count):
    made = request()
    for i in range(count):
        made.outputs.add(name=str(i))
    return made


LONG = "n" * limits.MAX_NAME_CHARS
CASES = {
    "inputs": (inputs(limits.MAX_TENSORS), inputs(limits.MAX_TENSORS + 1)),
    "outputs": (outputs(limits.MAX_TENSORS), outputs(limits.MAX_TENSORS + 1)),
    "dimensions": (inputs(1, shape=[0] * limits.MAX_DIMS), inputs(1, shape=[0] * (limits.MAX_DIMS + 1))),
    "strings": (
        inputs(1, datatype="BYTES", shape=[limits.MAX_STRINGS]),
        inputs(1, datatype="BYTES", shape=[2, limits.MAX_STRINGS // 2 + 1]),
    ),
    "parameters": (parameters(limits.MAX_PARAMETERS), parameters(limits.MAX_PARAMETERS + 1)),
    "parameter bytes": (
        parameters(1, "k", "v" * (limits.MAX_PARAMETER_CHARS - 1)),
        parameters(1, "k", "v" * limits.MAX_PARAMETER_CHARS),
    ),
    "parameter name": (parameters(1, LONG), parameters(1, LONG + "n")),
    "model name": (request(LONG), request(LONG + "n")),
    "version": (request(model_version=LONG), request(model_version=LONG + "n")),
    "request id": (request(id=LONG), request(id=LONG + "n")),
    "input name": (inputs(1, name=LONG), inputs(1, name=LONG + "n")),
    "output name": (output(LONG), output(LONG + "n")),
}


def parameters_of_tensors(count):
    made = inputs(1)
    made.outputs.add(name="y")
    for i in range(count):
        made.inputs[0].parameters[f"k{i}"].bool_param = True
        made.outputs[0].parameters[f"k{i}"].bool_param = True
    return made


def typed_strings(count):
    made = request()
    made.inputs.add(name="x", datatype="BYTES", shape=[1]).contents.bytes_contents.extend([b""] * count)
    return made


CASES["parameters of tensors"] = tuple(parameters_of_tensors(limits.MAX_PARAMETERS + more) for more in (0, 1))
CASES["typed strings"] = tuple(typed_strings(limits.MAX_TYPED_STRINGS + more) for more in (0, 1))


@pytest.mark.parametrize(("within", "beyond"), CASES.values(), ids=CASES)
def test_limit_is_exact(within, beyond):
    """What reaches the limit is taken; one more is INVALID_ARGUMENT, because no second try helps, with both numbers."""
    call_from_request(within)
    with pytest.raises(InvalidArgumentError, match=r"has \d+ .*; at most \d+ are allowed") as caught:
        call_from_request(beyond)
    assert len(caught.value.message) < 2 * limits.MAX_NAME_CHARS


@pytest.mark.parametrize("name", ["a\nb", "a\x00", "\x1b[2J", "evil\u202etxt.exe", "zero\u200bwidth", "\u2028"])
@pytest.mark.parametrize("place", ["model", "input", "output", "parameter"])
def test_names_that_cannot_be_shown_are_refused(place, name):
    """Control characters, invisible ones and those that turn the writing direction are in no name and no message."""
    made = request(name) if place == "model" else inputs(1, name=name) if place == "input" else request()
    if place == "output":
        made = output(name)
    if place == "parameter":
        made.parameters[name].bool_param = True
    with pytest.raises(InvalidArgumentError, match="cannot be shown") as caught:
        call_from_request(made)
    assert caught.value.message.isascii()
    assert caught.value.message.isprintable()


def test_other_scripts_are_names():
    """A name in any script is a name."""
    assert "größe 漢字" == call_from_request(request("größe 漢字")).model_name


def test_longest_string_is_bounded():
    """A string of the limit passes; one byte more does not."""
    data = MAX_STRING_BYTES.to_bytes(4, "little") + bytes(MAX_STRING_BYTES)
    check_bytes(data, 1, name="x", model="m")
    longer = (MAX_STRING_BYTES + 1).to_bytes(4, "little") + memoryview(data)[4:] + b"\0"
    with pytest.raises(InvalidArgumentError, match=f"a string of {MAX_STRING_BYTES + 1} bytes"):
        check_bytes(longer, 1, name="x", model="m")


async def test_compression_does_not_pass_the_message_limit(core):
    """The limit of a message holds for what it becomes: 50 MB of zeros in 49 kB of gzip are refused."""
    from weft.v2.server.server import add_services
    from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

    server = make_server(ServerOptions(max_message_bytes=1_000_000))
    add_services(server, core, "weft.test")
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options=options, compression=grpc.Compression.Gzip
    ) as channel:
        bomb = request("echo", raw_input_contents=[bytes(50_000_000)])
        bomb.inputs.add(name="x", datatype="INT32", shape=[1, 12_500_000])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await GRPCInferenceServiceStub(channel).ModelInfer(bomb, timeout=20)
    assert grpc.StatusCode.RESOURCE_EXHAUSTED is caught.value.code()
    assert [] == core.calls
    await server.stop(None)


async def test_metadata_has_a_limit(stub, core):
    """A call with more metadata than the server takes is refused before any handler sees it."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelInfer(make_request(), metadata=(("x-a", "v" * 70_000),), timeout=5)
    assert grpc.StatusCode.RESOURCE_EXHAUSTED is caught.value.code()
    assert [] == core.calls
