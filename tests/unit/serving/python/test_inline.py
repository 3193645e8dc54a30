"""Python models that execute on the event loop: what they may not do is refused, instead of waiting for ever."""

import asyncio
import threading

import pytest
from tests.unit.serving.python.python_models import TIMEOUT_S, call, value_of

from weft.base.core import CallContext
from weft.base.errors import InternalError, InvalidArgumentError


async def _ask(model, value=1.0):
    return await asyncio.wait_for(model.infer(call(value), CallContext()), TIMEOUT_S)


def _doubled(request, pb_utils):
    (tensor,) = request.inputs()
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor.as_numpy() * 2)])


async def test_execute_runs_on_the_event_loop(serve_python):
    """Its answer is that of a model on a thread."""
    threads = []

    def execute(requests, pb_utils):
        threads.append(threading.get_ident())
        return [_doubled(request, pb_utils) for request in requests]

    model = await serve_python(execute, is_decoupled=False, is_inline=True)
    assert 6 == value_of(await _ask(model, 3))
    assert [threading.get_ident()] == threads


@pytest.mark.parametrize(
    ("attempt", "refused"),
    [
        (lambda pb_utils: pb_utils.InferenceRequest(model_name="m", inputs=[]).exec(), "cannot call model 'm'"),
        (
            lambda pb_utils: pb_utils.InferenceRequest(model_name="m", inputs=[]).exec(decoupled=True),
            "cannot call model 'm'",
        ),
        (lambda pb_utils: pb_utils.load_model("m"), "cannot load model 'm'"),
        (lambda pb_utils: pb_utils.unload_model("m"), "cannot unload model 'm'"),
        (lambda pb_utils: pb_utils.is_model_ready("m"), "cannot ask for model 'm'"),
    ],
)
async def test_what_would_wait_for_the_event_loop_is_an_error_in_the_model(serve_python, attempt, refused):
    """The message says why, and the cure."""
    messages = []

    def execute(requests, pb_utils):
        try:
            attempt(pb_utils)
        except pb_utils.TritonModelException as error:
            messages.append(error.message())
        return [_doubled(request, pb_utils) for request in requests]

    model = await serve_python(execute, is_decoupled=False, is_inline=True)
    await _ask(model)
    (message,) = messages
    assert f"a model with the parameter EXECUTION inline {refused}: it executes on the event loop" in message


async def test_a_response_that_is_sent_later_is_an_error(serve_python):
    """The event loop does not wait for another thread of the model."""
    senders = []

    def execute(requests, pb_utils):
        senders.extend(request.get_response_sender() for request in requests)

    model = await serve_python(execute, is_decoupled=False, is_inline=True)
    with pytest.raises(InternalError, match="did not send its response before execute returned"):
        await _ask(model)


async def test_a_response_that_is_sent_at_once_is_the_answer(serve_python):
    """A sender may be used inside ``execute``."""

    def execute(requests, pb_utils):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(_doubled(request, pb_utils), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    model = await serve_python(execute, is_decoupled=False, is_inline=True)
    assert 4 == value_of(await _ask(model, 2))


async def test_a_coroutine_is_refused_when_it_is_loaded(serve_python):
    """It needs a thread of its own."""
    source = "class TritonPythonModel:\n    async def execute(self, requests):\n        return []\n"
    with pytest.raises(InvalidArgumentError, match="execute is a coroutine, which runs on a thread; remove"):
        await serve_python(None, source=source, is_decoupled=False, is_inline=True)
