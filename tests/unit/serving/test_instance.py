"""One instance: its thread, its outputs, and what it does with a backend that misbehaves."""

import asyncio
import logging
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.unit.serving.builders import make_call
from tests.unit.serving.fake_backends import (
    CannotClose,
    CannotLoad,
    Echo,
    FailsFirst,
    Raises,
    RaisesOwnError,
    WrongShape,
)

from weft.base.core import CallContext
from weft.base.errors import InternalError, InvalidArgumentError, NotFoundError, WeftError
from weft.base.tensors import decode
from weft.serving.backends.base import InstanceContext
from weft.serving.queues.settings import SchedulerSettings
from weft.serving.request.request import InferenceRequest, InferenceResponse
from weft.serving.runtime.execution import OutputEncoder
from weft.serving.runtime.instance import Instance
from weft.serving.runtime.model import ServedModel


class Runner:
    """An instance and the executions that it reported."""

    def __init__(self, model_context, backend):
        self.reports = asyncio.Queue()
        self.num_reports = 0
        self.instance = Instance(model_context, backend, InstanceContext("echo_0"), self._report)

    def _report(self, instance, execution):
        assert instance is self.instance
        self.num_reports += 1
        self.reports.put_nowait(execution)

    async def run(self, *calls):
        """The execution of the calls as one batch."""
        requests = [InferenceRequest(call, CallContext(), call.inputs["IN"].shape[0]) for call in calls]
        self.instance.execute(requests)
        return await asyncio.wait_for(self.reports.get(), 10)


@pytest.fixture
async def start(model_context):
    """Makes a runner of a backend, its instance loaded; it is closed after the test."""
    runners = []

    async def start(backend):
        runner = Runner(model_context, backend)
        await runner.instance.load()
        runners.append(runner)
        return runner

    yield start
    for runner in runners:
        await runner.instance.close()


async def test_one_thread_does_everything(start):
    """Construction, load, every execute and close of a backend happen on one thread that is not the loop's."""
    threads = []

    class Recording(Echo):
        def __init__(self, *args):
            super().__init__(*args)
            threads.append(threading.current_thread())

        def load(self):
            threads.append(threading.current_thread())

        def execute(self, batch):
            threads.append(threading.current_thread())
            return super().execute(batch)

        def close(self):
            threads.append(threading.current_thread())

    runner = await start(Recording)
    await runner.run(make_call())
    await runner.run(make_call())
    await runner.instance.close()
    assert 5 == len(threads)
    assert 1 == len(set(threads))
    assert threading.current_thread() not in threads


async def test_batch_is_split_into_results(start):
    """Each member gets its own rows, encoded, under its own request id, and the batch is reported once."""
    runner = await start(Echo)
    execution = await runner.run(make_call(1, rows=2), make_call(2, rows=1))
    assert ["r1", "r2"] == [answer.request_id for answer in execution.answers]
    assert ["echo", "1"] == [execution.answers[0].model_name, execution.answers[0].model_version]
    assert [[1, 1], [1, 1]] == decode(execution.answers[0].outputs["OUT"]).tolist()
    assert [[2, 2]] == decode(execution.answers[1].outputs["OUT"]).tolist()
    assert (3, 1) == (execution.num_rows, runner.num_reports)
    assert execution.start_ns <= execution.infer_start_ns <= execution.infer_end_ns <= execution.end_ns


async def test_wrong_time_stamps_stay_in_order(start):
    """A backend that stamps nonsense, or nothing, still gives times that never decrease."""

    class Stamps(Echo):
        stamp = 0

        def execute(self, batch):
            outcomes = super().execute(batch)
            batch.infer_start_ns, batch.infer_end_ns = self.stamp, self.stamp
            return outcomes

    runner = await start(Stamps)
    for Stamps.stamp in (0, 1, 2**63):
        execution = await runner.run(make_call())
        assert execution.start_ns <= execution.infer_start_ns <= execution.infer_end_ns <= execution.end_ns


@pytest.mark.parametrize(("bad", "text"), [(Raises, "secret of the model"), (WrongShape, "shape")])
async def test_a_failure_is_logged_once_under_the_id_that_its_members_get(start, caplog, bad, text):
    """Each member has an error of its own; an error that the model raises on purpose is not logged."""
    execution = await (await start(bad)).run(make_call(1), make_call(2))
    failed = [answer for answer in execution.answers if isinstance(answer, InternalError)]
    assert len(failed) == len({id(error) for error in failed})
    (record,) = caplog.records
    assert {(logging.ERROR, "weft.serving", record.error_id)} == {
        (record.levelno, record.name, error.error_id) for error in failed
    }
    assert failed[0].error_id in record.getMessage()
    assert text in caplog.text
    caplog.clear()
    for own in (FailsFirst, RaisesOwnError):
        await (await start(own)).run(make_call(1), make_call(2))
    assert [] == caplog.records


def test_an_optional_output_may_be_missing(model_context):
    """An answer that lacks it has the others, also where the request named it."""
    signature = model_context.signature
    optional = tuple(replace(spec, is_optional=spec.name == "COUNT") for spec in signature.outputs)
    encoder = OutputEncoder(replace(signature, outputs=optional))
    response = InferenceResponse({"OUT": np.zeros((1, 2), np.float32)})
    request = InferenceRequest(make_call(outputs=["COUNT", "OUT"]), CallContext(), num_rows=1)
    assert ["OUT"] == list(encoder.encode(request, response).outputs)


async def test_cancelled_members_are_not_executed(start, gate):
    """A member that was cancelled before its batch began is left out; an empty batch is reported without a run."""
    runner = await start(gate.backend)
    gate.open()
    requests = [InferenceRequest(make_call(value), CallContext()) for value in (1, 2, 3)]
    requests[1].is_cancelled = True
    runner.instance.execute(requests)
    execution = await asyncio.wait_for(runner.reports.get(), 10)
    assert [requests[0], requests[2]] == execution.requests
    runner.instance.execute([requests[1]])
    execution = await asyncio.wait_for(runner.reports.get(), 10)
    assert ([], []) == (execution.requests, execution.answers)
    assert [[1, 3]] == gate.batches


async def test_load_failure_has_its_cause(model_context, caplog):
    """A backend that cannot load says why, and nothing is left to close."""
    runner = Runner(model_context, CannotLoad)
    text = r"model 'echo' failed to load on instance echo_0: OSError: weights"
    with pytest.raises(WeftError, match=text) as failure:
        await runner.instance.load()
    await runner.instance.close()
    assert failure.value.traceback.startswith("Traceback")
    assert "" == caplog.text, "who loads it logs why, once"


async def test_close_failure_is_logged(start, caplog):
    """An exception in close is logged and goes no further."""
    runner = await start(CannotClose)
    await runner.instance.close()
    assert "raised in close" in caplog.text


async def test_bytes_are_encoded(start, model_context):
    """A text that cannot be encoded fails its request with INTERNAL, not the instance."""

    class Surrogate(Echo):
        def run(self, inputs, num_rows):
            out = np.empty((num_rows, 1), dtype=object)
            out[:] = "\ud800"
            return {"COUNT": out}

    object.__setattr__(model_context.signature.outputs[1], "datatype", "BYTES")
    runner = await start(Surrogate)
    execution = await runner.run(make_call())
    with pytest.raises(InternalError, match="an output of model 'echo' cannot be encoded"):
        raise execution.answers[0]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A version folder with a file that its owner alone can read, as seen by another user."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    file.chmod(0o600)
    real = os.access

    def access(path: Path, mode: int) -> bool:
        return real(path, mode) and path.stat().st_mode & 0o004 != 0

    tmp_path.chmod(0o755)
    monkeypatch.setattr(os, "access", access)
    return tmp_path


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(NotFoundError("No such file or directory"), InvalidArgumentError), (OSError(2, "No such file"), InternalError)],
    ids=["an error of the backend", "any other"],
)
async def test_a_file_that_cannot_be_read_is_the_reason(
    model_context, directory: Path, raised: Exception, expected: type[WeftError]
) -> None:
    """Path, mode, both users and the cure are in the message, in place of a missing file."""

    class Unreadable(Echo):
        def load(self) -> None:
            raise raised

    context = replace(model_context, directory=directory)
    model = ServedModel(context, Unreadable, SchedulerSettings(8), [InstanceContext("echo_0")])
    with pytest.raises(expected, match=rf"permission denied: .*model.safetensors has mode 0600 .* user {os.geteuid()}"):
        await model.start()
    (directory / "model.safetensors").chmod(0o644)
    with pytest.raises(WeftError, match="No such file"):
        await ServedModel(context, Unreadable, SchedulerSettings(8), [InstanceContext("echo_0")]).start()
