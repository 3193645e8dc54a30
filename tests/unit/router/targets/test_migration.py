"""Streams of language models whose replica is lost: what goes on elsewhere, with what, and how often."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import set_span_in_context
from tests.unit.router import make
from tests.unit.router.targets.test_replicated import Fleet, lost, refusal, replicated

from weft.base.core import CallContext, InferCall, InferResult, RequestedOutput
from weft.base.errors import RemoteError
from weft.base.observing import telemetry
from weft.base.signature import ModelSignature
from weft.base.tensors import decode, encode
from weft.router.target import RetryBudget, TargetModel
from weft.router.targets.replicated import ReplicatedTarget
from weft_protos.model_config_pb2 import ModelConfig

LENGTH = 12
WRONG = RemoteError("INVALID_ARGUMENT", "resume_token_ids continues one choice")
STOPPED = RemoteError("UNAVAILABLE", "the engine stopped before the request was finished")
FULL = RemoteError("RESOURCE_EXHAUSTED", "Exceeds maximum queue size")


class Writers:
    """Replicas whose language model writes 0, 1, 2 ... 11.

    Each call, whichever replica it goes to, breaks after so many tokens, as the script says; those behind it do not.
    """

    def __init__(self, target: ReplicatedTarget, *script: tuple[int, Exception]) -> None:
        self._script = list(script)
        self.calls: list[InferCall] = []
        for replica in target.replicas:
            replica.target = self  # type: ignore[assignment]

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncIterator[InferResult]:
        self.calls.append(call)
        most, error = self._script.pop(0) if self._script else (LENGTH, None)
        first = len(call.inputs["resume_token_ids"].data) // 4 if "resume_token_ids" in call.inputs else 0
        adds_ids = bool({"input_ids", "return_output_ids"} & call.inputs.keys())
        names = [output.name for output in call.outputs] or ["logprobs", *["output_ids"] * adds_ids]
        start = call.parameters.get("resume_cumulative_logprob", 0.0)
        for token in range(first, min(first + most, LENGTH)):
            made: dict[str, Any] = {"output_ids": np.array([token], np.int32)}
            made["cumulative_logprob"] = np.array([float(start) - token], np.float32)
            outputs = {name: encode(made.get(name, np.array([token]))) for name in names}
            yield InferResult("m", "1", outputs=outputs, is_final=token == LENGTH - 1)
        if error is not None:
            raise error

    async def close(self) -> None: ...


def fleet_of(num_replicas: int, limit: int = 3) -> Fleet:
    addresses = [f"{name}:1" for name in "abcde"[:num_replicas]]
    return Fleet(addresses, TargetModel(replace(make.signature("m"), migration_limit=limit), True))


async def read(target: Any, call: InferCall | None = None, **context: Any) -> tuple[list[InferResult], Any]:
    """What came, and the error that it ended with."""
    results = []
    try:
        async for result in target.stream_infer(call or InferCall("m"), CallContext(**context)):
            results.append(result)
    except RemoteError as error:
        return results, error
    return results, None


def call_with(*outputs: str, **parameters: Any) -> InferCall:
    return InferCall("m", outputs=tuple(RequestedOutput(name, {}) for name in outputs), parameters=parameters)


@pytest.mark.parametrize("outputs", [(), ("logprobs",), ("logprobs", "output_ids"), ("logprobs", "cumulative_logprob")])
@pytest.mark.parametrize("inputs", [(), ("input_ids",)])
async def test_a_stream_goes_on_behind_its_tokens(inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    """Whatever it was asked for, which is all that comes; the other replica is told what the first one had said."""
    call = call_with(*outputs, priority=2)
    call.inputs = {name: encode(np.array([5], np.int32)) for name in inputs}
    before = replace(call)
    async with replicated(fleet_of(2)) as target:
        writers = Writers(target, (5, lost()))
        results, error = await read(target, call)
        assert error is None
        assert list(range(LENGTH)) == [decode(result.outputs["logprobs"])[0] for result in results]
        shown = set(outputs) or {"logprobs", *["output_ids"] * len(inputs)}
        assert shown == set(results[0].outputs) == set(results[-1].outputs)
        assert before == call
        went_on = writers.calls[1]
        assert list(range(5)) == decode(went_on.inputs["resume_token_ids"]).tolist()
        logprob = {"resume_cumulative_logprob": -4.0} if "cumulative_logprob" in outputs else {}
        assert {"priority": 2} | logprob == went_on.parameters
        assert (1, 0, 0) == (target.num_migrated, target.num_repeated, target.num_moved)


@pytest.mark.parametrize(("limit", "num_tokens"), [(0, 2), (1, 4), (3, 8), (5, 12)])
async def test_it_moves_as_often_as_the_limit_says(limit: int, num_tokens: int) -> None:
    """Each replica brings two tokens; also where the budget of repeats is empty. Then the last loss is told."""
    async with replicated(fleet_of(5, limit)) as target:
        target.budget = RetryBudget(0)
        Writers(target, (2, lost()), (2, STOPPED), (2, lost()), (2, lost()))
        results, error = await read(target, root=CallContext())
        assert (num_tokens, min(limit, 4)) == (len(results), target.num_migrated)
        assert (error is None) == (num_tokens == LENGTH)


@pytest.mark.parametrize(
    ("second", "num_tokens", "code", "num_calls"),
    [(lost(), LENGTH, "", 3), (refusal(), LENGTH, "", 3), (FULL, LENGTH, "", 3), (WRONG, 2, "UNAVAILABLE", 2)],
)
async def test_what_becomes_of_it_where_the_next_replica_brings_nothing(
    second: RemoteError, num_tokens: int, code: str, num_calls: int
) -> None:
    """It goes on at a third, as after a refusal, which is no move; an error of who cannot go on does not count."""
    async with replicated(fleet_of(3, limit=2)) as target:
        writers = Writers(target, (2, lost()), (0, second))
        results, error = await read(target, root=CallContext())
        assert (num_tokens, num_calls) == (len(results), len(writers.calls))
        assert code == (error.code if error else "")


async def test_what_two_replicas_were_lost_with_before_a_token_came_is_not_sent_to_another() -> None:
    """It may be what ends them."""
    async with replicated(fleet_of(5, limit=4)) as target:
        writers = Writers(target, (2, lost()), (0, lost()), (0, lost()))
        results, error = await read(target, root=CallContext())
        assert (2, 3, "UNAVAILABLE") == (len(results), len(writers.calls), error.code if error else "")


@pytest.mark.parametrize(
    ("num_tokens", "error", "call"),
    [
        (2, WRONG, call_with()),
        (2, RemoteError("INTERNAL", "x"), call_with()),
        (LENGTH, lost(), call_with()),
        (2, lost(), call_with(sequence_id=4)),
        (2, lost(), InferCall("m", outputs=(RequestedOutput("output_ids", {"shared_memory_region": "x"}),))),
    ],
)
async def test_what_does_not_move(num_tokens: int, error: RemoteError, call: InferCall) -> None:
    """Other errors, what is complete, sequences, and what sends its ids elsewhere."""
    async with replicated(fleet_of(2)) as target:
        Writers(target, (num_tokens, error))
        results, found = await read(target, call)
        assert (num_tokens, 0) == (len(results), target.num_migrated)
        assert found is error or "sequence" in found.message


async def test_the_span_tells_of_each_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """From where to where, and behind how many tokens."""
    monkeypatch.setattr(telemetry, "is_enabled", lambda: True)
    span = TracerProvider().get_tracer("t").start_span("step")
    async with replicated(fleet_of(2)) as target:
        Writers(target, (2, lost()))
        await read(target, trace_context=set_span_in_context(span))
        (event,) = span.events  # type: ignore[attr-defined]
        assert ("weft.stream_migrated", 2) == (event.name, event.attributes["weft.tokens"])
        assert {"a:1", "b:1"} == {event.attributes["weft.refused_by"], event.attributes["weft.endpoint"]}


@pytest.mark.parametrize(
    ("name", "parameters", "limit"),
    [
        ("text_input", {"retry": "once"}, 0),
        ("resume_token_ids", {"retry": "once"}, 3),
        ("resume_token_ids", {"retry": "never"}, 0),
        ("resume_token_ids", {}, 0),
        ("resume_token_ids", {"migration_limit": "7"}, 7),
    ],
)
def test_the_limit_is_the_models(name: str, parameters: dict[str, str], limit: int) -> None:
    """By default that of models that may be called again, if they take tokens to go on behind."""
    config = ModelConfig(name="m")
    config.input.add(name=name)
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    assert limit == ModelSignature.from_config(config, "1").migration_limit
    assert sorted(parameters) == sorted(config.parameters)
