"""Model instances in processes of their own: what crosses over, and what happens when one dies."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.unit.serving.python.python_models import TIMEOUT_S, call, is_running, value_of, values

from weft.base.core import CallContext, InferResult
from weft.base.errors import DeadlineExceededError, InternalError, InvalidArgumentError, NotFoundError, UnavailableError
from weft.base.processes.forks import end_copies
from weft.base.tensors import decode, encode
from weft.serving.backends.base import Batch
from weft.serving.backends.python import process
from weft.serving.backends.python.process import CLOSE_WAIT_S
from weft.serving.calls import NestedCalls
from weft.serving.request.request import InferenceRequest
from weft.serving.request.stream import MAX_WAITING
from weft.serving.runtime import idle, instance

PROCESS = {"EXECUTION": "process"}

#: IN says what to do; OUT is the process id where nothing else is said. The folder of the version is the working place.
SOURCE = """
import os, pathlib, signal, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FOLDER = pathlib.Path(pb_utils.get_model_dir())
while (FOLDER / "hangs").exists():
    time.sleep(0.01)


def out(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full((1, 1), value, np.float32))])


class TritonPythonModel:
    def initialize(self, args):
        with (FOLDER / "loads").open("a") as file:
            file.write("x")
        if (FOLDER / "broken").exists():
            raise ValueError("broken on purpose")

    def execute(self, requests):
        responses = []
        for request in requests:
            what = int(request.inputs()[0].as_numpy()[0, 0])
            os.write(1, b"what a library prints")
            if what == 10:
                (FOLDER / "entered").write_text(str(os.getpid()))  # a pipe
                time.sleep(1000)
            if what == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if what == 2:
                os._exit(3)
            if what == 3:
                raise ValueError("secret")
            if what == 4:
                sys.exit(4)
            if what == 5:
                error = pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            if what == 7:
                (FOLDER / "entered").write_text("x")  # a pipe
                while not request.is_cancelled():
                    time.sleep(0.001)
                (FOLDER / "left").write_text("x")
            if what == 8:
                called = pb_utils.InferenceRequest(
                    model_name="other", inputs=request.inputs(), requested_output_names=["OUT"]
                ).exec()
                responses.append(pb_utils.InferenceResponse(called.output_tensors(), error=called.error()))
                continue
            if what == 9:
                threading.Thread(target=time.sleep, args=(1000,)).start()
            responses.append(out(os.getpid()))
        return responses

    def finalize(self):
        (FOLDER / "finalized").write_text("x")
"""

DECOUPLED = """
import os, pathlib, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FOLDER = pathlib.Path(pb_utils.get_model_dir())


def out(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full((1, 1), value, np.float32))])


class TritonPythonModel:
    kept = []

    def execute(self, requests):
        for request in requests:
            sender, what = request.get_response_sender(), int(request.inputs()[0].as_numpy()[0, 0])
            if what >= 0:
                threading.Thread(target=self.count, args=(sender, what)).start()
            elif what == -1:
                sender.send(out(os.getpid()))
                self.kept.append(sender)
            elif what == -2:
                sender.send(out(1))
            elif what == -3:
                self.forward(request, sender)

    def count(self, sender, what):
        for value in range(what):
            sender.send(out(value))
            (FOLDER / "sent").write_text(str(value))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        if sender.is_cancelled():
            (FOLDER / "left").write_text("x")

    def forward(self, request, sender):
        tensor = pb_utils.Tensor("IN", np.full((1, 1), 3, np.float32))
        called = pb_utils.InferenceRequest(model_name="other", inputs=[tensor], requested_output_names=["OUT"])
        for answer in called.exec(decoupled=True):
            if answer.output_tensors():  # the last response may be empty
                sender.send(pb_utils.InferenceResponse(answer.output_tensors()))
        sender.send(flags=1)
"""


@pytest.fixture
def folder(tmp_path):
    """The version folder of the model; ``entered`` and ``left`` are pipes."""
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    for name in ("entered", "left"):
        os.mkfifo(folder / name)
    return folder


@pytest.fixture
async def serve(serve_python, folder):
    """Starts the model in processes."""

    async def start(source=SOURCE, is_decoupled=False, **options):
        return await serve_python(None, source=source, is_decoupled=is_decoupled, parameters=PROCESS, **options)

    return start


async def _ask(model, value, context=None):
    return value_of(await asyncio.wait_for(model.infer(call(value), context or CallContext()), TIMEOUT_S))


async def _until(condition):
    """Return when it holds; what happens in another process can only be asked for."""
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.005)


def _children():
    pids = set()
    for thread in Path(f"/proc/{os.getpid()}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            pids.update((thread / "children").read_text().split())
    return pids


async def test_each_instance_is_a_process(serve, folder, capfd):
    """Two instances answer from two processes; what they print is not on standard output; they end with the model."""
    before = _children()
    model = await serve(num_instances=2, is_batching=True)
    pids = {await _ask(model, 0) for _ in range(4)}
    assert 2 == len(pids)
    assert os.getpid() not in pids
    await model.stop(grace_s=TIMEOUT_S)
    assert (folder / "finalized").exists()
    assert not any(is_running(int(pid)) for pid in pids)
    assert before == _children()  # no zombie either
    assert "" == capfd.readouterr().out


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (3, InternalError, "model 'm' failed to execute the request"),
        (4, InternalError, "model 'm' failed to execute the request"),
        (5, NotFoundError, "^no$"),
    ],
)
async def test_errors_cross_over(serve, value, error, message):
    """What the model does wrong has the same status as on a thread, and the process serves on."""
    model = await serve()
    pid = await _ask(model, 0)
    with pytest.raises(error, match=message) as raised:
        await _ask(model, value)
    assert "secret" not in raised.value.message
    assert pid == await _ask(model, 0)


FORKING = """
import os, pathlib, signal, time
import numpy as np
import triton_python_backend_utils as pb_utils

FOLDER = pathlib.Path(pb_utils.get_model_dir())


class TritonPythonModel:
    def execute(self, requests):
        if requests[0].inputs()[0].as_numpy()[0, 0]:
            os.kill(os.getpid(), signal.SIGKILL)
        request = requests[0]
        copy = os.fork()
        if not copy:
            try:
                assert not request.is_cancelled()
                self.dropped = request.get_response_sender()
                del self.dropped
                called = pb_utils.InferenceRequest(model_name="other", inputs=requests[0].inputs())
                said = called.exec().error().message()
            except pb_utils.TritonModelException as error:
                said = str(error)
            (FOLDER / "said").write_text(said)
            (FOLDER / "entered").write_text("x")  # a pipe
            time.sleep(1000)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full((1, 1), copy, np.float32))])]
"""


async def test_forked_copy_reaches_no_service_and_ends_with_its_process(serve, folder):
    """A nested call out of it is an error at once; the death of the process is seen although the copy lives on."""
    model = await serve(FORKING, caller=object())
    copy = int(await _ask(model, 0))
    await asyncio.wait_for(asyncio.to_thread((folder / "entered").read_text), TIMEOUT_S)
    assert "a copy that the model has forked" in (folder / "said").read_text()
    with pytest.raises(UnavailableError, match="was killed by SIGKILL"):
        await _ask(model, 1)
    await _until(lambda: not is_running(copy))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_nested_call_out_of_a_copy_of_the_service_fails_at_once(folder):
    """A model on a thread forks the service itself: the copy has nothing that makes the call."""
    calls = NestedCalls(_Doubles(), asyncio.get_running_loop())
    end_copies()
    reading, writing = os.pipe()
    copy = os.fork()
    if not copy:
        try:
            calls.infer(call(0), (), "").result(TIMEOUT_S)
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writing)
    assert "UnavailableError: this process is a copy" in (await asyncio.to_thread(os.read, reading, 1000)).decode()
    os.close(reading)
    await asyncio.to_thread(os.waitpid, copy, 0)


@pytest.mark.parametrize(("value", "how"), [(1, "was killed by SIGKILL"), (2, "ended with exit status 3")])
async def test_process_that_dies_fails_its_own_batch_and_is_started_again(serve, value, how):
    """UNAVAILABLE says how it ended; requests that wait, and later ones, are answered by a new process."""
    model = await serve()
    first = await _ask(model, 0)
    dying = asyncio.ensure_future(_ask(model, value))
    waiting = [asyncio.ensure_future(_ask(model, 0)) for _ in range(3)]
    with pytest.raises(UnavailableError, match=f"the process of instance m_0 of model 'm' {how} before it had"):
        await dying
    (second,) = set(await asyncio.gather(*waiting))
    assert first != second
    assert ("", 1) == (str(model.crashed), model.statistics.restart_count)


async def test_process_that_hangs_is_killed_and_started_again(serve):
    """After the model's execution_timeout_us its batch fails with UNAVAILABLE, and a new process answers."""
    model = await serve(execution_timeout_us=500_000)
    first = await _ask(model, 0)
    with pytest.raises(UnavailableError, match="was killed by SIGKILL before it had answered"):
        await _ask(model, 10)
    await _until(lambda: not str(model.crashed))
    assert first != await _ask(model, 0)
    assert 1 == model.statistics.restart_count


async def test_process_that_is_stopped_is_killed_and_started_again(serve, monkeypatch):
    """SIGSTOP, as of a debugger or a full disk quota: its batch fails with UNAVAILABLE, and a new process answers."""
    monkeypatch.setattr(process, "STOP_GRACE_S", 0.05)
    model = await serve()
    first = await _ask(model, 0)
    os.kill(int(first), signal.SIGSTOP)
    with pytest.raises(UnavailableError, match="was stopped by SIGSTOP and killed before it had answered"):
        await _ask(model, 0)
    await _until(lambda: not str(model.crashed))
    assert first != await _ask(model, 0)


async def test_process_that_is_stopped_for_a_moment_goes_on(serve, monkeypatch):
    """Ctrl-Z and fg end nothing."""
    monkeypatch.setattr(process, "STOP_GRACE_S", 0.5)
    model = await serve()
    first = await _ask(model, 0)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(int(first), number)
    assert first == await _ask(model, 0)
    await asyncio.sleep(2 * process.STOP_GRACE_S)
    assert first == await _ask(model, 0)


async def test_import_that_does_not_return_ends_at_the_limit(serve, folder):
    """The load fails with the parameter's name, and its process is gone; a limit that is longer does not matter."""
    before = _children()
    (folder / "hangs").touch()
    with pytest.raises(UnavailableError, match=r"instance m_0 of model 'm' was not loaded within 0.5 s, its load"):
        await serve(load_timeout_s=0.5)
    await _until(lambda: _children() <= before)
    (folder / "hangs").unlink()
    assert await _ask(await serve(load_timeout_s=60.0), 0)


async def test_calls_do_not_wait_for_a_lost_instance_whose_import_takes_long(serve, folder, monkeypatch, caplog):
    """They are UNAVAILABLE after the first warning, the index can say LOADING, and at the limit it is tried again."""
    monkeypatch.setattr(idle, "SLOW_S", 0.2)
    monkeypatch.setattr(idle, "PERIOD_S", 0.1)
    model = await serve(load_timeout_s=1.5)
    (folder / "hangs").touch()
    with pytest.raises(UnavailableError):
        await _ask(model, 1)
    waiting = asyncio.ensure_future(_ask(model, 0))
    await _until(lambda: model.crashed.includes_all)
    assert model.crashed.is_loading
    with pytest.raises(UnavailableError, match=r"has been loading for 0.2 s: its import or initialize does not return"):
        await waiting
    await _until(lambda: "was not loaded within 1.5 s" in caplog.text)
    assert sum("has been loading for" in record.getMessage() for record in caplog.records) > 1
    (folder / "hangs").unlink()
    await _until(lambda: not model.crashed.includes_all)
    assert await _ask(model, 0)


async def test_process_that_dies_idle_is_started_again(serve, folder):
    """A process that is killed while it has nothing to do is replaced before the next request."""
    model = await serve()
    pid = await _ask(model, 0)
    os.kill(int(pid), signal.SIGKILL)
    await _until(lambda: model.statistics.restart_count)
    assert pid != await _ask(model, 0)
    assert {} == model.statistics.failures_by_reason


async def test_model_that_cannot_be_started_again_is_unavailable(serve, folder, monkeypatch):
    """While no process can be started requests are refused at once with why; when one can, they are answered."""
    monkeypatch.setattr(instance, "PAUSES_S", (0.01,))
    model = await serve()
    (folder / "broken").touch()
    with pytest.raises(UnavailableError):
        await _ask(model, 1)
    await _until(lambda: model.crashed.includes_all)
    with pytest.raises(
        UnavailableError, match=r"no instance of model 'm' runs: .* SIGKILL; it cannot be loaded again: .*"
    ):
        await _ask(model, 0)
    (folder / "broken").unlink()
    await _until(lambda: not model.crashed.includes_all)
    assert await _ask(model, 0)


async def test_stop_ends_the_attempts(serve, folder, monkeypatch):
    """A model that cannot be started again can be stopped at once."""
    monkeypatch.setattr(instance, "PAUSES_S", (1000.0,))
    model = await serve()
    (folder / "broken").touch()
    with pytest.raises(UnavailableError):
        await _ask(model, 1)
    await _until(lambda: model.crashed.includes_all)
    await asyncio.wait_for(model.stop(grace_s=TIMEOUT_S), TIMEOUT_S)


async def test_model_that_fails_to_load_is_a_load_error(serve, folder):
    """What initialize raises fails the load with file and line, as on a thread."""
    (folder / "broken").touch()
    before = _children()
    with pytest.raises(
        InvalidArgumentError, match=r"model 'm' failed to initialize: .*model.py:20: ValueError: broken on"
    ):
        await serve()
    assert before == _children()


async def test_cancel_and_deadline_cross_over(serve, folder):
    """The model sees that the client has left, and that the deadline has passed."""
    model = await serve()
    request = asyncio.ensure_future(_ask(model, 7))
    await asyncio.to_thread((folder / "entered").read_text)
    request.cancel()
    await asyncio.wait_for(asyncio.to_thread((folder / "left").read_text), TIMEOUT_S)
    late = asyncio.ensure_future(_ask(model, 7, CallContext(time.monotonic_ns() + 10**8)))
    await asyncio.to_thread((folder / "entered").read_text)
    await asyncio.wait_for(asyncio.to_thread((folder / "left").read_text), TIMEOUT_S)
    await asyncio.wait([late])


async def test_process_that_hangs_is_killed_when_the_model_stops(serve, folder):
    """A batch that never ends is given up after the grace, and leaves no process."""
    model = await serve()
    hanging = asyncio.ensure_future(_ask(model, 10))
    pid = int(await asyncio.to_thread((folder / "entered").read_text))
    await asyncio.wait_for(model.stop(grace_s=0.1), TIMEOUT_S)
    with pytest.raises(UnavailableError):
        await hanging
    await _until(lambda: not is_running(pid))


async def test_thread_left_behind_does_not_hold_the_process(serve):
    """A model that leaves a thread running ends with its instance all the same."""
    model = await serve()
    pid = await _ask(model, 9)
    await asyncio.wait_for(model.stop(grace_s=TIMEOUT_S), CLOSE_WAIT_S / 2)  # it is not killed, it ends
    assert not is_running(int(pid))


async def test_processes_end_with_a_service_that_is_killed(serve, folder):
    """When the service dies, in whatever way, its processes end; also one that is at work."""
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(Path.cwd())!r})
from weft.base.core import CallContext
from weft.base.signature import ModelSignature, TensorSpec
from weft.serving.backends.base import InstanceContext, ModelContext
from weft.serving.backends.python import PythonBackend
from weft.serving.runtime.model import ServedModel
from weft.serving.queues.settings import SchedulerSettings
from tests.unit.serving.python.python_models import call, value_of
from pathlib import Path

async def main():
    tensors = (TensorSpec("IN", "FP32", (-1,)),), (TensorSpec("OUT", "FP32", (-1,)),)
    context = ModelContext(ModelSignature("m", "1", "python", 8, *tensors), Path({str(folder)!r}), {{}}, {PROCESS!r})
    model = ServedModel(context, PythonBackend, SchedulerSettings(max_batch_size=8), [InstanceContext("m_0")])
    await model.start()
    print(int(value_of(await model.infer(call(0), CallContext()))), flush=True)
    await model.infer(call(7), CallContext())

asyncio.run(main())
"""
    (folder / "model.py").write_text(SOURCE)
    service = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    pid = int(await service.stdout.readline())
    await asyncio.wait_for(asyncio.to_thread((folder / "entered").read_text), TIMEOUT_S)
    service.kill()
    await service.wait()
    await _until(lambda: not is_running(pid))


async def test_responses_cross_over_one_by_one(serve):
    """Responses that threads of the process send arrive in order, more of them than may wait."""
    model = await serve(DECOUPLED, is_decoupled=True)
    results = await asyncio.gather(*(values(model, call(count)) for count in (0, 2, 3 * MAX_WAITING)))
    assert [[], [0.0, 1.0], list(range(3 * MAX_WAITING))] == results


async def test_slow_reader_slows_the_process_down(serve, folder):
    """The process waits when its responses are not read, serves others meanwhile, goes on when the reader leaves."""
    model = await serve(DECOUPLED, is_decoupled=True)
    results = model.stream(call(1000), CallContext())
    assert 0.0 == value_of(await anext(results))
    await _until(lambda: (folder / "sent").exists() and (folder / "sent").read_text() == str(MAX_WAITING))
    assert [] == await values(model, call(0))
    assert str(MAX_WAITING) == (folder / "sent").read_text()
    await results.aclose()
    await asyncio.wait_for(asyncio.to_thread((folder / "left").read_text), TIMEOUT_S)


async def test_streams_of_a_process_that_dies_end_with_unavailable(serve):
    """Every open stream says how the process ended, after what it had sent; the next one is served."""
    model = await serve(DECOUPLED, is_decoupled=True)
    results = [model.stream(call(-1), CallContext()) for _ in range(2)]
    pids = {int(value_of(await anext(stream))) for stream in results}
    os.kill(pids.pop(), signal.SIGKILL)
    for stream in results:
        with pytest.raises(UnavailableError, match="was killed by SIGKILL before it had answered"):
            await anext(stream)
    assert [0.0] == await values(model, call(1))


async def test_request_that_the_process_forgets_fails(serve):
    """A request whose sender the model drops fails, as on a thread; a deadline ends one that it keeps."""
    model = await serve(DECOUPLED, is_decoupled=True)
    with pytest.raises(InternalError, match="the model dropped the request without a last response"):
        await values(model, call(-2))
    with pytest.raises(DeadlineExceededError):
        await values(model, call(-1), CallContext(time.monotonic_ns() + 10**8))


class _Doubles:
    """Doubles IN, or streams that many responses; refuses odd numbers of rows."""

    def __init__(self):
        self.contexts = []

    async def infer(self, call, context):
        self.contexts.append(context)
        return InferResult("other", "1", outputs={"OUT": encode(2 * decode(call.inputs["IN"]))})

    async def stream_infer(self, call, context):
        assert type(call.inputs["IN"].data) is bytes
        for value in range(int(decode(call.inputs["IN"])[0, 0])):
            yield InferResult("other", "1", outputs={"OUT": encode(np.float32([[value]]))}, is_final=False)  # type: ignore[arg-type]


async def test_calls_of_other_models_cross_over(serve):
    """The process calls other models by the service, with the deadline of the request, and iterates over responses."""
    callee = _Doubles()
    caller = NestedCalls(callee, asyncio.get_running_loop())
    model = await serve(caller=caller)
    deadline_ns = time.monotonic_ns() + 10**11
    assert 16.0 == await _ask(model, 8, CallContext(deadline_ns))
    assert [deadline_ns] == [context.deadline_ns for context in callee.contexts]
    decoupled = await serve(DECOUPLED, is_decoupled=True, caller=caller)
    assert [0.0, 1.0, 2.0] == await values(decoupled, call(-3))


async def test_failed_call_is_the_response_of_the_process(serve):
    """The status and the text of a call that fails come back through the process."""

    class Fails(_Doubles):
        async def infer(self, call, context):
            raise NotFoundError("no such model")

    model = await serve(caller=NestedCalls(Fails(), asyncio.get_running_loop()))
    with pytest.raises(NotFoundError, match="no such model"):
        await _ask(model, 8)


async def test_request_without_a_reader_is_forgotten(serve):
    """What nobody reads, as a warm-up of a decoupled model, leaves nothing behind on either side."""
    model = await serve(DECOUPLED, is_decoupled=True)
    backend, done = model._instances[0]._backend, asyncio.get_running_loop().create_future()
    backend.start(Batch([InferenceRequest(call(0), CallContext(), 1)]), done.set_result)
    await asyncio.wait_for(done, TIMEOUT_S)
    assert {} == backend._process._requests
