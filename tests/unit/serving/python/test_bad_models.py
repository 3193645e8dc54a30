"""Models that do what no model should, on a thread and in a process: each fails its own request, and no other."""

import asyncio
import os
import threading
import time
from textwrap import dedent, indent

import pytest
from tests.unit.serving.python.python_models import TIMEOUT_S, call, is_running, value_of

from weft.base.core import CallContext
from weft.base.errors import InternalError, WeftError

HEAD = """
import sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils


def out(array):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])


class TritonPythonModel:
    def execute(self, requests):
        if requests[0].inputs()[0].as_numpy()[0, 0] == 0:
            return [out(np.full((1, 1), 42, np.float32)) for _ in requests]
        good = np.zeros((1, 1), np.float32)
"""


@pytest.fixture(params=["thread", "process"])
def serve(request, serve_python):
    """Starts a model of the rest of its ``execute``."""

    async def start(body, **options):
        source = HEAD + indent(dedent(body), " " * 8) + "\n"
        parameters = {"EXECUTION": request.param}
        return await serve_python(None, source=source, is_decoupled=False, parameters=parameters, **options)

    return start


async def _ask(model, value):
    return await asyncio.wait_for(model.infer(call(value), CallContext()), TIMEOUT_S)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('secret')", "failed to execute the request"),
        ("sys.exit('secret')", "failed to execute the request"),
        ("raise KeyboardInterrupt('secret')", "failed to execute the request"),
        ("raise type('Own', (BaseException,), {})('secret')", "failed to execute the request"),
        ("return None", "returned 0 responses for 1 requests"),
        ("return []", "returned 0 responses for 1 requests"),
        ("return [out(good)] * 2", "returned 2 responses for 1 requests"),
        ("return 'a'", "returned 0 responses for 1 requests"),
        ("return {0: out(good)}", "returned 0 responses for 1 requests"),
        ("return (out(good) for _ in requests)", "returned 0 responses for 1 requests"),
        ("return [good]", "returned ndarray in place of an InferenceResponse"),
        ("return [None]", "returned NoneType in place of an InferenceResponse"),
        ("return [requests[0]]", "returned InferenceRequest in place of an InferenceResponse"),
        ("return [pb_utils.InferenceResponse([good])]", "failed to execute the request"),
        ("return [pb_utils.InferenceResponse(error='secret')]", "secret"),
        ("return [pb_utils.InferenceResponse(error=pb_utils.TritonError('so', 99))]", "so"),
        ("def f(): f()\nf()", "failed to execute the request"),
        ("raise pb_utils.TritonModelException('no such user')", "message: TritonModelException: no such user"),
    ],
)
async def test_bad_answer_is_internal_and_the_model_serves_on(serve, body, message):
    """INTERNAL with what was wrong, the text of a TritonModelException alone; a good request is answered after it."""
    model = await serve(body)
    with pytest.raises(InternalError, match=message) as error:
        await _ask(model, 1)
    assert ("secret" in error.value.message) == (message == "secret")  # a model may say something itself
    assert 42.0 == value_of(await _ask(model, 0))


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        ("return [out(np.ones((1, 1), np.int64))]", {"OUT": ("INT64", (1, 1))}),
        ("return [out(np.zeros((2, 1), np.float32))]", {"OUT": ("FP32", (2, 1))}),
        ("return [out(np.zeros((), np.float32))]", {"OUT": ("FP32", ())}),
        ("return [out(np.array([['a']], object))]", {"OUT": ("BYTES", (1, 1))}),
        ("return [pb_utils.InferenceResponse([pb_utils.Tensor('X', good)])]", {}),
        ("return [pb_utils.InferenceResponse()]", {}),
    ],
)
async def test_what_the_configuration_says_otherwise_is_passed_on(serve, body, outputs):
    """Datatype and shape are the answer's own; what is not declared, or not given, is left out, asked for or not."""
    model = await serve(body)
    for asked in ((), ("OUT",)):
        result = await asyncio.wait_for(model.infer(call(1, asked), CallContext()), TIMEOUT_S)
        assert outputs == {name: (tensor.datatype, tensor.shape) for name, tensor in result.outputs.items()}


async def test_huge_answer_arrives(serve):
    """64 MiB are answered like anything else."""
    model = await serve("return [out(np.ones((1, 2**24), np.float32))]")
    result = await _ask(model, 1)
    assert 2**26 == len(result.outputs["OUT"].data)
    assert 42.0 == value_of(await _ask(model, 0))


async def test_model_that_hangs_holds_its_own_instance_alone(serve):
    """Another instance serves, the client that waits may leave, and the model can be stopped."""
    model = await serve("time.sleep(1000)", num_instances=2)
    hanging = asyncio.ensure_future(_ask(model, 1))
    for _ in range(5):
        assert 42.0 == value_of(await _ask(model, 0))
    start_s = time.monotonic()
    hanging.cancel()
    await asyncio.wait_for(model.stop(grace_s=0.1), TIMEOUT_S)
    assert time.monotonic() - start_s < TIMEOUT_S


async def test_thread_left_behind_does_no_harm(serve):
    """A thread that goes on after its batch, and then raises, changes nothing."""
    raised = threading.excepthook
    threading.excepthook = lambda arguments: None
    try:
        model = await serve(
            """
            threading.Thread(target=lambda: requests.clear() or 1 / 0).start()
            return [out(good)]
            """
        )
        assert 0.0 == value_of(await _ask(model, 1))
        assert 42.0 == value_of(await _ask(model, 0))
    finally:
        threading.excepthook = raised


@pytest.mark.parametrize("execution", ["thread", "process"])
@pytest.mark.parametrize(
    ("body", "message"),
    [("raise ValueError('here')", "ValueError: here"), ("sys.exit(3)", "SystemExit: 3"), ("return 1", "")],
)
async def test_bad_initialize_fails_the_load(serve_python, execution, body, message):
    """What initialize raises, an exit too, is the reason why the model does not load; what it returns is ignored."""
    source = f"import sys\n\n\nclass TritonPythonModel:\n    def initialize(self, args):\n        {body}\n\n"
    source += "    def execute(self, requests):\n        return []\n"
    start = serve_python(None, source=source, is_decoupled=False, parameters={"EXECUTION": execution})
    if message:
        with pytest.raises(WeftError, match=message):
            await asyncio.wait_for(start, TIMEOUT_S)
    else:
        await asyncio.wait_for(start, TIMEOUT_S)


async def test_process_that_hangs_while_it_loads_is_killed(serve_python, tmp_path):
    """A load that never ends can be given up, and leaves no process."""
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "loading")
    source = "import os, time\n\n\nclass TritonPythonModel:\n    def execute(self, requests): pass\n"
    source += (
        f"    def initialize(self, args):\n        open({str(folder / 'loading')!r}, 'w').write(str(os.getpid()))\n"
    )
    source += "        time.sleep(1000)\n"
    loading = asyncio.ensure_future(serve_python(None, source=source, parameters={"EXECUTION": "process"}))
    pid = int(await asyncio.to_thread((folder / "loading").read_text))
    loading.cancel()
    await asyncio.wait([loading])
    end_s = time.monotonic() + TIMEOUT_S
    while is_running(pid):
        assert time.monotonic() < end_s
        await asyncio.sleep(0.005)  # it can only be asked for
