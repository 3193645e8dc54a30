"""``weft.connect`` and ``weft.connect_async`` against a real server."""

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import numpy as np
import pytest
from tests.unit.mesh.serving import ListingCore, serving

from weft.base import errors
from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import NUMPY_BY_DATATYPE, decode, encode
from weft.v2.client.aio import AsyncClient
from weft.v2.client.connect import Client, connect, connect_async

WAIT_S = 10.0


def one(name: str, datatype: str, *dims: int, is_optional: bool = False) -> tuple[TensorSpec, ...]:
    """The specification of one tensor."""
    return (TensorSpec(name, datatype, dims, is_optional),)


MODELS = {
    "double": ModelSignature("double", "", "p", 8, one("X", "FP32", 1), one("Y", "FP32", 1)),
    "wide": ModelSignature("wide", "", "p", 8, one("X", "FP32", 2), one("X", "FP32", 2)),
    "half": ModelSignature("half", "", "p", 0, one("X", "FP16", -1), one("X", "FP16", -1)),
    "brain": ModelSignature("brain", "", "p", 0, one("X", "BF16", -1), one("X", "BF16", -1)),
    "text": ModelSignature("text", "", "p", 4, one("TEXT", "BYTES", 1), one("TEXT", "BYTES", 1)),
    "odd": ModelSignature(
        "odd", "", "p", 0, (*one("a:0", "INT32", 1), *one("headers", "BOOL", 1, is_optional=True)), ()
    ),
    "count": ModelSignature("count", "", "p", 0, one("N", "INT64", 1), one("I", "INT64", 1), is_decoupled=True),
    "hang": ModelSignature("hang", "", "p", 0, (), one("Y", "FP32", 1)),
    "fail": ModelSignature("fail", "", "p", 0, (), one("Y", "FP32", 1)),
}


class Core(ListingCore):
    """Doubles, counts, hangs, fails, or answers the inputs; keeps its calls."""

    def __init__(self) -> None:
        super().__init__({(name, ""): signature for name, signature in MODELS.items()})
        self.models["double", "2"] = MODELS["double"]
        self.calls: list[tuple[InferCall, CallContext]] = []
        self.error: WeftError = errors.NotFoundError("nothing here")
        self.num_configs = 0
        self.started, self.ended = threading.Event(), threading.Event()

    def config(self, name: str, version: str) -> Any:
        self.num_configs += 1
        return super().config(name, version)

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        self.calls.append((call, context))
        context.trailing_metadata.append(("x-graph-path", "root.a"))
        signature = self.models[call.model_name, ""]
        if list(call.inputs) != [spec.name for spec in signature.inputs] and call.model_name == "double":
            raise InvalidArgumentError("unexpected inference input")
        if call.model_name == "fail":
            raise self.error
        if call.model_name == "hang":
            self.started.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.set()
        outputs = dict(call.inputs)
        if call.model_name == "double":
            outputs = {"Y": encode(2 * decode(next(iter(call.inputs.values()))))}
        return InferResult(call.model_name, "1", call.request_id, {}, outputs)

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        if call.model_name != "count":
            yield await self.infer(call, context)
            return
        try:
            for number in range(int(decode(call.inputs["N"])[0])):
                outputs = {"I": encode(np.array([number]))}
                yield InferResult("count", "1", call.request_id, {}, outputs, is_final=False)
            yield InferResult("count", "1", call.request_id, is_null=True)
        finally:
            self.ended.set()


@pytest.fixture
def core() -> Core:
    """What the server asks."""
    return Core()


@pytest.fixture
def address(core: Core) -> Iterator[str]:
    """A server's."""
    with serving(core) as found:
        yield found


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    """A client of the server."""
    with connect(address, timeout_s=WAIT_S) as connected:
        yield connected


def test_a_model_is_called_by_its_name(client: Client, core: Core) -> None:
    """The outputs are attributes and items; the signature is asked for once."""
    answer = client.double(X=[1.5, 2])
    assert [[3.0], [4.0]] == answer.Y.tolist() == answer["Y"].tolist()
    assert np.float32 == answer.Y.dtype
    assert ("double", "1", "root.a") == (answer.model_name, answer.model_version, answer.path)
    client.double(X=1)
    assert 1 == core.num_configs


@pytest.mark.parametrize(
    ("model", "name", "value", "shape", "values"),
    [
        ("double", "X", 3, (1, 1), [[3.0]]),
        ("double", "X", [3, 4], (2, 1), [[3.0], [4.0]]),
        ("double", "X", [[3], [4]], (2, 1), [[3.0], [4.0]]),
        ("double", "X", np.ones((3, 1), np.float32), (3, 1), [[1.0]] * 3),
        ("wide", "X", [1, 2], (1, 2), [[1.0, 2.0]]),
        ("wide", "X", [[1, 2], [3, 4]], (2, 2), [[1.0, 2.0], [3.0, 4.0]]),
        ("half", "X", [0.5, 2], (2,), [0.5, 2.0]),
        ("brain", "X", [0.5, 2], (2,), [0.5, 2.0]),
        ("text", "TEXT", "häh", (1, 1), [["häh".encode()]]),
        ("text", "TEXT", ["a", b"\0\xff\0"], (2, 1), [[b"a"], [b"\0\xff\0"]]),
    ],
)
def test_values_become_tensors_of_the_input(
    client: Client, core: Core, model: str, name: str, value: object, shape: tuple[int, ...], values: list[Any]
) -> None:
    """Datatype and rank are those of the signature; one row may lack the batch dimension."""
    client[model](**{name: value})
    tensor = core.calls[-1][0].inputs[name]
    assert (MODELS[model].inputs[0].datatype, shape) == (tensor.datatype, tensor.shape)
    assert np.array(values, NUMPY_BY_DATATYPE[tensor.datatype]).tolist() == decode(tensor).tolist()


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        ("double", {"x": 1}, r"'double' has no input 'x'; did you mean 'X'\?; it takes X FP32\[-1, 1\]"),
        ("double", {"timeout": 1, "X": 1}, r"no input 'timeout'; did you mean 'timeout_s'\?"),
        ("double", {}, r"missing required input\(s\) \['X'\]"),
        ("double", {"X": None}, r"missing required input\(s\) \['X'\]"),
        ("double", {"X": "a"}, "'X' does not fit FP32"),
        ("double", {"X": [[1], [2, 3]]}, "'X' does not fit FP32"),
        ("double", {"X": [[1, 2]]}, r"Expected \[-1,1\], got \[1,2\]"),
        ("double", {"X": np.ones((1, 1))}, "data-type is 'FP64', but model 'double' expects 'FP32'"),
        ("half", {"X": [1e6]}, "'X' does not fit FP16, it is too large"),
        ("odd", {"inputs": {"a:0": [2**31]}}, "'a:0' does not fit INT32, which holds -2147483648 to 2147483647"),
        ("double", {"X": []}, r"Expected \[-1,1\], got \[0,1\]"),
        ("wide", {"X": [1, 2, 3]}, r"Expected \[-1,2\], got \[3\]"),
        ("text", {"TEXT": 5}, "'TEXT' takes text, got 5"),
        ("text", {"TEXT": "\ud800"}, "'TEXT' is not UTF-8 text"),
        ("double", {"X": 1, "outputs": ["Z"]}, "unexpected inference output 'Z' for model 'double'; it has Y"),
        ("double", {"X": 1, "timeout_s": 0}, "timeout_s must be a number of seconds above 0, or None .*, got 0"),
        ("double", {"X": 1, "timeout_s": "1"}, "timeout_s must be .*, got '1'"),
        ("double", {"X": 1, "priority": -1}, "'priority' must be a whole number of at least 0, got -1"),
        ("double", {"X": 1, "headers": {"a b": "c"}}, "header 'a b': 'c' cannot be sent as metadata"),
        ("double", {"X": 1, "headers": {"a": "c\n"}}, "cannot be sent as metadata"),
        ("double", {"X": 1, "parameters": {"p": [1]}}, "parameter 'p'"),
        ("count", {"N": 1}, r"any number of responses; .* for answer in client\['count'\].stream"),
    ],
)
def test_what_does_not_fit_fails_before_the_call(
    client: Client, core: Core, model: str, values: dict[str, Any], message: str
) -> None:
    """Nothing is sent, and the message says what is allowed."""
    with pytest.raises(InvalidArgumentError, match=message):
        client[model](**values)
    assert [] == core.calls


def test_a_model_that_changed_is_asked_for_again(client: Client, core: Core) -> None:
    """A name that is new works at once, one that is gone is refused, whichever end finds it out."""
    client.double(X=1)
    core.models["double", ""] = ModelSignature("double", "", "p", 0, one("Z", "INT32", 1), one("Y", "INT32", 1))
    assert [14] == client.double(Z=[7]).Y.tolist()
    with pytest.raises(InvalidArgumentError, match=r"no input 'X'; it takes Z INT32\[1\]"):
        client.double(X=1)
    core.models["double", ""] = ModelSignature("double", "", "p", 0, (*one("Z", "INT32", 1, is_optional=True),), ())
    with pytest.raises(errors.InvalidArgumentError, match="unexpected inference input"):
        client.double()


def test_options_reach_the_server(client: Client, core: Core) -> None:
    """Priority and sequence are parameters, headers metadata, and a version is a part of the name."""
    client["double", 2](
        X=1, outputs=["Y"], priority=3, headers={"X-User": "ann"}, parameters={"p": 1.5}, request_id="r",
        sequence_id=7, sequence_start=True, sequence_end=False, timeout_s=5,
    )  # fmt: skip
    call, context = core.calls[-1]
    expected = {"p": 1.5, "priority": 3, "sequence_id": 7, "sequence_start": True, "sequence_end": False}
    assert ("2", "r", expected) == (call.model_version, call.request_id, dict(call.parameters))
    assert ["Y"] == [output.name for output in call.outputs]
    assert "ann" == context.headers["x-user"]
    assert context.deadline_ns is not None
    assert context.deadline_ns - time.monotonic_ns() < 5e9


def test_names_that_are_no_keywords(client: Client, core: Core) -> None:
    """`inputs` takes every name, also that of an option."""
    client.odd(inputs={"a:0": [1], "headers": [True]}, headers={"a": "b"})
    assert ["a:0", "headers"] == list(core.calls[-1][0].inputs)


def test_names_of_models(client: Client) -> None:
    """They can be listed, are completed by editors, and a wrong one is answered with the nearest."""
    assert [*MODELS] == client.names()
    assert {"double", "close", "names"} < {*dir(client)}
    with pytest.raises(errors.NotFoundError, match=r"'duble' is not found; did you mean 'double'\?"):
        client.duble(X=1)
    with pytest.raises(errors.NotFoundError):
        client["double", "9"](X=1)
    with pytest.raises(AttributeError):
        _ = client._duble
    with pytest.raises(TypeError):
        next(iter(client))
    with pytest.raises(InvalidArgumentError, match="inputs of 'double' are keywords: NAME=value"):
        client.double([1])
    with pytest.raises(AttributeError, match="no output 'Z'; it has Y"):
        _ = client.double(X=1).Z


def test_a_stream_is_an_iterator(client: Client, core: Core) -> None:
    """Of a decoupled model each response, of another the one; closing it cancels the request."""
    assert [0, 1, 2] == [int(answer.I[0]) for answer in client.count.stream(N=3)]
    assert [[[2.0]]] == [answer.Y.tolist() for answer in client.double.stream(X=1)]
    core.ended.clear()
    answers = client.count.stream(N=10**9)
    assert 0 == next(answers).I[0]
    answers.close()
    assert core.ended.wait(WAIT_S)
    with pytest.raises(InvalidArgumentError, match="no input 'M'"):
        next(client.count.stream(M=3))


def test_a_stream_that_is_left_is_cancelled(client: Client, core: Core) -> None:
    """A loop that breaks cancels the request as soon as nobody holds the iterator."""
    for answer in client.count.stream(N=10**9):
        assert 0 == answer.I[0]
        break
    gc.collect()
    assert core.ended.wait(WAIT_S)


@pytest.mark.parametrize(
    "error",
    [
        errors.NotFoundError("x"),
        errors.ResourceExhaustedError("x", retry_after_ms=7),
        errors.UnavailableError("x"),
        errors.InvalidArgumentError("x"),
        errors.InternalError("x"),
        errors.FailedPreconditionError("x"),
    ],
)
def test_a_status_is_an_error_of_its_class(client: Client, core: Core, error: WeftError) -> None:
    """`except weft.errors.NotFoundError` works; what else the server said is there too."""
    core.error = error
    with pytest.raises(type(error)) as caught:
        client.fail()
    assert isinstance(caught.value, errors.RemoteError)
    assert (error.code, error.message, "root.a") == (caught.value.code, caught.value.message, caught.value.path)
    assert getattr(error, "retry_after_ms", None) == caught.value.retry_after_ms
    assert getattr(error, "error_id", None) == caught.value.error_id


def test_a_deadline_that_passes(client: Client, core: Core) -> None:
    """The message names the argument; the server's work ends."""
    with pytest.raises(errors.DeadlineExceededError, match=r"did not answer within 0\.05 s; timeout_s allows longer"):
        client.hang(timeout_s=0.05)
    assert core.ended.wait(WAIT_S)


def test_a_client_may_be_closed_twice_and_while_it_waits(address: str, core: Core) -> None:
    """Calls that wait end with UNAVAILABLE, and later ones too; closing again does nothing."""
    client = connect(address)
    caught: list[WeftError] = []

    def call() -> None:
        with pytest.raises(errors.UnavailableError, match="is closed; connect again") as error:
            client.hang(timeout_s=None)
        caught.append(error.value)

    thread = threading.Thread(target=call)
    thread.start()
    assert core.started.wait(WAIT_S)
    client.close()
    client.close()
    thread.join(WAIT_S)
    assert caught
    assert core.ended.wait(WAIT_S)
    with pytest.raises(errors.UnavailableError, match="is closed"):
        client.double(X=1)
    with pytest.raises(errors.UnavailableError, match="is closed"):
        next(client.count.stream(N=1))


def test_threads_share_a_client(client: Client) -> None:
    """Each gets the answer to its own call."""
    answers: dict[int, float] = {}

    def call(number: int) -> None:
        for _ in range(20):
            answers[number] = float(client.double(X=number).Y[0, 0])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert {number: 2.0 * number for number in range(8)} == answers


def test_a_client_that_nobody_holds_ends_its_thread(address: str) -> None:
    """No thread is left behind."""
    client = connect(address)
    client.double(X=1)
    assert any(thread.name == "weft-client" for thread in threading.enumerate())
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "weft-client")
    del client
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_client_works_after_a_fork(client: Client) -> None:
    """The child connects anew; the parent's connection is as it was."""
    assert 2.0 == client.double(X=1).Y[0, 0]
    child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(BaseException):
            status = 0 if client.double(X=2, timeout_s=WAIT_S).Y[0, 0] == 4.0 else 2
        os._exit(status)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert 6.0 == client.double(X=3).Y[0, 0]


def test_a_server_that_is_away() -> None:
    """It need not be there when the client connects; a call says where nobody answers."""
    with connect("127.0.0.1:1", timeout_s=WAIT_S) as client:
        with pytest.raises(errors.UnavailableError, match=r"'127.0.0.1:1' cannot be reached"):
            client.double(X=1)
        assert "close" in dir(client)


@pytest.mark.parametrize(
    ("address", "options", "message"),
    [
        ("127.0.0.1", {}, "'127.0.0.1' must be host:port"),
        ("http://127.0.0.1:8001", {}, "without http://"),
        ("127.0.0.1:1", {"timeout_s": -1}, "timeout_s must be"),
        ("127.0.0.1:1", {"headers": {"ä": "b"}}, "cannot be sent as metadata"),
        ("127.0.0.1:1", {"tls_cert": "/nowhere"}, "TLS needs the CA"),
        ("127.0.0.1:1", {"key_file": "/nowhere"}, "/nowhere"),
    ],
)
def test_wrong_arguments_are_refused_at_once(address: str, options: dict[str, Any], message: str) -> None:
    """By both clients, before any call."""
    for make in (connect, connect_async):
        with pytest.raises(InvalidArgumentError, match=message):
            make(address, **options)
    with pytest.raises(TypeError, match="connect has no option 'timeout'"):
        connect("127.0.0.1:1", timeout=1)  # type: ignore[call-arg]


async def test_calls_are_awaited(address: str, core: Core) -> None:
    """The answers of calls at once are each call's own, and the signature is asked for once; streams are iterated."""
    async with connect_async(address, timeout_s=WAIT_S) as client:
        answers = await asyncio.gather(*(client.double(X=number) for number in range(20)))
        assert [2.0 * number for number in range(20)] == [float(answer.Y[0, 0]) for answer in answers]
        assert 1 == core.num_configs
        assert [0, 1] == [int(answer.I[0]) async for answer in client.count.stream(N=2)]
        assert [*MODELS] == await client.names()
        with pytest.raises(InvalidArgumentError, match="no input"):
            await client.double(Y=1)
    await client.close()
    with pytest.raises(errors.UnavailableError, match="is closed"):
        await client.double(X=1)


async def test_a_cancelled_call_is_cancelled_at_the_server(address: str, core: Core) -> None:
    """Cancelling the task, or closing the stream, ends the work there."""
    async with connect_async(address) as client:
        task = asyncio.create_task(client.hang())
        await asyncio.to_thread(core.started.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(core.ended.wait, WAIT_S)
        core.ended.clear()
        async with contextlib.aclosing(client.count.stream(N=10**9)) as answers:
            assert 0 == (await anext(answers)).I[0]
        assert await asyncio.to_thread(core.ended.wait, WAIT_S)


async def test_a_first_call_that_is_cancelled_leaves_the_others(address: str) -> None:
    """Those that wait for the same signature get it."""
    async with connect_async(address, timeout_s=WAIT_S) as client:
        tasks = [asyncio.create_task(client.double(X=1)) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        assert [2.0, 2.0] == [float((await task).Y[0, 0]) for task in tasks[1:]]
        assert isinstance(client, AsyncClient)


def test_a_server_that_comes_back(core: Core) -> None:
    """The client connects again by itself; a model that is another one there is asked for again."""
    with serving(core) as address:
        client = connect(address, timeout_s=WAIT_S)
        assert 2.0 == client.double(X=1).Y[0, 0]
    with pytest.raises(errors.UnavailableError):
        client.double(X=1)
    core.models["double", ""] = ModelSignature("double", "", "p", 0, one("Z", "INT32", 1), one("Y", "INT32", 1))
    values, end_s = list[int](), time.monotonic() + WAIT_S
    with serving(core, port=int(address.rpartition(":")[2])), client:
        while not values and time.monotonic() < end_s:
            with contextlib.suppress(errors.UnavailableError):
                values = client.double(Z=2).Y.tolist()
    assert [4] == values
