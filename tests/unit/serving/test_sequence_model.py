"""A served model with sequences: what its backend gets, and how sequences end in it."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.case_files import Case, cases, literal, literals

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import (
    InvalidArgumentError,
    RequestCancelledError,
    UnavailableError,
)
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import decode, encode
from weft.serving.backends.base import InstanceContext, ModelContext, TensorBackend
from weft.serving.backends.sequences import ImplicitState, SequenceInputs, Signal, sequenced
from weft.serving.queues.settings import SchedulerSettings, SequenceSettings
from weft.serving.runtime.model import SequenceModel

TIMEOUT_S = 10.0
SIGNATURE = ModelSignature(
    "sums", "1", "test", 4, (TensorSpec("IN", "INT32", (1,)),), (TensorSpec("OUT", "INT32", (1,)),)
)


def signal(kind: str, datatype: Any = np.int32) -> Signal:
    """An input named after its kind."""
    no, yes = (encode(np.full((1, 1), value, datatype)) for value in (0, 1))
    return Signal(TensorSpec(kind, no.datatype, (1,)), kind, (no, yes))


STATE = ImplicitState(TensorSpec("SUM", "INT32", (1,)), "NEXT", encode(np.full((1, 1), 100, np.int32)))
SIGNALS = (signal("START"), signal("END", np.float32), signal("READY", np.bool_))


class Sums(TensorBackend):
    """OUT = NEXT = IN + SUM; keeps what it was given, and waits for ``go``.

    It raises for 13, gives bad states for 14 to 16, and is lost after 17.
    """

    given: ClassVar[list[dict[str, list[Any]]]]
    entered: ClassVar[threading.Semaphore]
    go: ClassVar[threading.Event]
    gives_next: ClassVar[bool]
    lost = False

    def load(self) -> None:
        pass

    def run(self, inputs: dict[str, Any], num_rows: int) -> dict[str, Any]:
        self.given.append({name: array.ravel().tolist() for name, array in inputs.items()})
        self.entered.release()
        assert self.go.wait(TIMEOUT_S)
        if 13 in inputs["IN"]:
            raise ValueError("unlucky")
        total = inputs["IN"] + inputs.get("SUM", np.int32(0))
        if 17 in inputs["IN"]:
            self.lost = True
            self.on_lost()
        if 14 in inputs["IN"] or not self.gives_next:
            return {"OUT": total}
        wrong = total.astype(np.int64) if 15 in inputs["IN"] else total
        return {"OUT": total, **({"NEXT": np.hstack([wrong, wrong]) if 16 in inputs["IN"] else wrong})}

    def why_lost(self) -> str:
        return "it died" if self.lost else ""


class Served:
    """A running model, and its backend's class."""

    def __init__(self, backend: type[Sums], model: SequenceModel) -> None:
        self.backend = backend
        self.model = model

    def infer(self, sequence: int | str, number: int, flags: str = "") -> "asyncio.Task[InferResult]":
        """A request that is on its way."""
        parameters = {"sequence_id": sequence, "sequence_start": "s" in flags, "sequence_end": "e" in flags}
        call = InferCall("sums", parameters=parameters, inputs={"IN": encode(np.full((1, 1), number, np.int32))})
        return asyncio.create_task(self.model.infer(call, CallContext()))

    async def sums(self, *tasks: "asyncio.Task[InferResult]") -> list[Any]:
        """OUT of each, or the class of its error."""
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), TIMEOUT_S)
        return [int(decode(o.outputs["OUT"])[0, 0]) if isinstance(o, InferResult) else type(o) for o in outcomes]

    async def entered(self) -> None:
        """A batch, beside those awaited before, runs."""
        assert await asyncio.to_thread(self.backend.entered.acquire, timeout=TIMEOUT_S)


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Any]]:
    """``serve(inputs, **sequences)`` starts a model; its batches run at once unless ``is_held``."""
    models: list[Served] = []

    async def start(inputs: SequenceInputs, *, is_held: bool = False, num_instances: int = 1, **options: Any) -> Served:
        class Backend(Sums):
            given: ClassVar[list[dict[str, list[Any]]]] = []
            entered = threading.Semaphore(0)
            go = threading.Event()
            gives_next = any(state.output == "NEXT" for state in inputs.states)

        if not is_held:
            Backend.go.set()
        policy = SequenceSettings(**{"max_idle_us": 60_000_000, "num_slots": 4, **options})
        settings = SchedulerSettings(4, is_batching=True, sequences=policy)
        places = [InstanceContext(f"sums_{i}") for i in range(num_instances)]
        context = ModelContext(SIGNATURE, Path("/nonexistent"), {}, {})
        served = Served(Backend, SequenceModel(context, sequenced(Backend, inputs), settings, places))
        models.append(served)
        await served.model.start()
        return served

    yield start
    for served in models:
        served.backend.go.set()
        await served.model.stop(grace_s=0)


def _inputs(text):
    words = text.split()
    id_type = next((word.removeprefix("id=") for word in words if word.startswith("id=")), "")
    answered = ImplicitState(STATE.spec, "OUT", STATE.initial, is_answered=True)
    return SequenceInputs(
        has_fixed_rows="fixed" in words,
        signals=SIGNALS * ("signals" in words),
        id_spec=TensorSpec("ID", id_type, (1,)) if id_type else None,
        states=(STATE,) * ("state" in words) + (answered,) * ("answered" in words),
    )


@cases(Path(__file__).with_name("sequence_models.txt"))
async def test_sequences(serve, case: Case):
    """Requests of sequences are answered, and given to the model, as the case says."""
    served = await serve(_inputs(case.option("inputs")), **literals(case.option("policy")))
    found = [await _lines(served, line, shows_given=case.option("shows") == "given") for line in case.text.split("\n")]
    case.check_script(lambda _: found.pop(0))


async def _lines(served, line, *, shows_given):
    if line == "counts":
        batches = {rows: batch.compute_infer.count for rows, batch in served.model.statistics.batches.items()}
        return [f"{batches} {served.model.statistics.inference_count}"]
    served.backend.given.clear()
    requests = [re.fullmatch(r"(.+):(\d+)(s?e?)", each).groups() for each in line.split()]
    answers = await served.sums(*(served.infer(literal(name), int(number), flags) for name, number, flags in requests))
    shown = " ".join(str(each) if isinstance(each, int) else each.__name__ for each in answers)
    return [shown, *(str(batch) for batch in served.backend.given if shows_given)]


async def test_cancelled_while_it_runs(serve):
    """Its sequence ends: what waits fails, others get its slot and their batch mates their answers."""
    served = await serve(SequenceInputs(), is_held=True, is_direct=False, num_slots=2)
    tasks = [served.infer(1, 1, "s"), served.infer(2, 2, "s")]
    await served.entered()
    tasks += [served.infer(1, 3), served.infer(3, 4, "s")]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert [RequestCancelledError] == await served.sums(tasks[2])
    served.backend.go.set()
    assert [2, 4, InvalidArgumentError] == await served.sums(tasks[1], tasks[3], served.infer(1, 1))
    assert 1 == served.model.statistics.fail.count - 2  # the one that waited, beside the cancelled and the last


async def test_cancelled_in_the_backlog_and_all_at_once(serve):
    """Every request of a client that leaves is counted once, and nothing is left behind."""
    served = await serve(SequenceInputs(), is_held=True, is_direct=False, num_slots=1)
    running = served.infer(1, 1, "se")
    await served.entered()
    tasks = [served.infer(2, i, "s" * (i == 0)) for i in range(5)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    served.backend.go.set()
    assert [1] == await served.sums(running)
    statistics = served.model.statistics
    assert (5, 0, 0) == (
        statistics.fail.count,
        served.model.sequences.num_sequences,
        statistics.pending_count,
    )


async def test_lost_instance_ends_its_sequences(serve):
    """Requests that ran or waited there fail with UNAVAILABLE; the sequences must be started again, others go on."""
    served = await serve(SequenceInputs(), is_held=True, is_direct=False, num_instances=2)
    tasks = [served.infer(1, 17, "s"), served.infer(2, 2, "s")]
    await served.entered()
    await served.entered()
    tasks += [served.infer(1, 1), served.infer(2, 3)]
    await asyncio.sleep(0)
    served.backend.go.set()
    assert [UnavailableError, 2, UnavailableError, 3] == await served.sums(*tasks)
    with pytest.raises(InvalidArgumentError, match="START flag"):
        await served.infer(1, 1)


async def test_stop_lets_sequences_end(serve):
    """No sequence starts any more, those that have started go on; when they are over, the model is."""
    served = await serve(SequenceInputs(), is_direct=False)
    await served.infer(1, 1, "s")
    stopping = asyncio.create_task(served.model.stop(grace_s=TIMEOUT_S))
    await asyncio.sleep(0)
    assert [UnavailableError, 2] == await served.sums(served.infer(2, 1, "s"), served.infer(1, 2))
    assert not stopping.done()
    assert [3] == await served.sums(served.infer(1, 3, "e"))
    await asyncio.wait_for(stopping, TIMEOUT_S)


async def test_stop_waits_no_longer_than_the_grace(serve):
    """A sequence that does not end is dropped."""
    served = await serve(SequenceInputs(), is_direct=False)
    await served.infer(1, 1, "s")
    await asyncio.wait_for(served.model.stop(grace_s=0.01), TIMEOUT_S)
    with pytest.raises(UnavailableError):
        await served.infer(1, 2)


async def test_an_idle_sequence_is_ended_by_the_clock(serve):
    """Without any other request the slot becomes free when the time is over."""
    served = await serve(SequenceInputs(), is_direct=False, num_slots=1, max_idle_us=1000)
    await served.infer(1, 1, "s")
    assert [2] == await served.sums(served.infer(2, 2, "s"))  # it waited for the slot of the other
