"""Streams of language models whose replica is lost: what goes on elsewhere, with what, and how often."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.router import make
from tests.unit.router.targets.test_replicated import Fleet, lost, refusal, replicated

from weft.base.core import CallContext, InferCall, InferResult, RequestedOutput
from weft.base.errors import RemoteError
from weft.base.signature import ModelSignature
from weft.base.tensors import decode, encode
from weft.router.target import RetryBudget, TargetModel
from weft.router.targets.replicated import ReplicatedTarget
from weft_protos.model_config_pb2 import ModelConfig

LENGTH = 12
WRONG = RemoteError("INVALID_ARGUMENT", "resume_token_ids continues one choice")
STOPPED = RemoteError("UNAVAILABLE", "the engine stopped before the request was finished")


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
        resumed = decode(call.inputs["resume_token_ids"]).tolist() if "resume_token_ids" in call.inputs else []
        assert resumed == list(range(len(resumed)))
        start = call.parameters.get("resume_cumulative_logprob", 0.0)
        for token in range(len(resumed), min(len(resumed) + most, LENGTH)):
            outputs = {name: encode(array) for name, array in self._made(token, float(start) - token).items()}
            names = {output.name for output in call.outputs} or {"text_output", "output_ids" * self._adds(call)}
            wanted = {name: tensor for name, tensor in outputs.items() if name in names}
            yield InferResult("m", "1", outputs=wanted, is_final=token == LENGTH - 1)
        if error is not None:
            raise error

    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        return []

    async def close(self) -> None: ...

    def _adds(self, call: InferCall) -> bool:
        return "input_ids" in call.inputs or "return_output_ids" in call.inputs

    def _made(self, token: int, logprob: float) -> dict[str, Any]:
        text = np.array([b"%d," % token], np.object_)
        return {
            "text_output": text,
            "output_ids": np.array([token], np.int32),
            "cumulative_logprob": np.array([logprob], np.float32),
        }


def fleet_of(num_replicas: int, limit: int = 3) -> Fleet:
    addresses = [f"{name}:1" for name in "abcde"[:num_replicas]]
    return Fleet(addresses, TargetModel(replace(make.signature("m"), migration_limit=limit), True))


async def stream(target: Any, call: InferCall | None = None, **context: Any) -> tuple[list[InferResult], Any]:
    """What came, and the error that it ended with."""
    results = []
    try:
        async for result in target.stream_infer(call or InferCall("m"), CallContext(**context)):
            results.append(result)
    except RemoteError as error:
        return results, error
    return results, None


def text_of(results: Sequence[InferResult]) -> str:
    return b"".join(decode(result.outputs["text_output"])[0] for result in results).decode()


WHOLE = "".join(f"{token}," for token in range(LENGTH))


@pytest.mark.parametrize(
    ("inputs", "outputs", "shown"),
    [
        ({}, (), {"text_output"}),
        ({"input_ids": np.array([5], np.int32)}, (), {"text_output", "output_ids"}),
        ({}, ("text_output",), {"text_output"}),
        ({}, ("text_output", "output_ids"), {"text_output", "output_ids"}),
        ({}, ("text_output", "cumulative_logprob"), {"text_output", "cumulative_logprob"}),
    ],
)
async def test_a_stream_goes_on_behind_its_tokens(
    inputs: dict[str, Any], outputs: tuple[str, ...], shown: set[str]
) -> None:
    """Whatever it was asked for, which is all that comes; the other replica is told what the first one had said."""
    call = InferCall("m", "", "id", {"priority": 2}, {name: encode(array) for name, array in inputs.items()})
    call.outputs = tuple(RequestedOutput(name, {}) for name in outputs)
    before = replace(call)
    async with replicated(fleet_of(2)) as target:
        writers = Writers(target, (5, lost()))
        results, error = await stream(target, call)
        assert (WHOLE, None) == (text_of(results), error)
        assert [shown] * LENGTH == [set(result.outputs) for result in results]
        assert before == call
        began, went_on = writers.calls
        assert list(range(5)) == decode(went_on.inputs["resume_token_ids"]).tolist()
        logprob = {"resume_cumulative_logprob": -4.0} if "cumulative_logprob" in outputs else {}
        assert {"priority": 2} | logprob == went_on.parameters
        assert (1, 0, 0) == (target.num_migrated, target.num_repeated, target.num_moved)
        assert "resume_token_ids" not in began.inputs
        assert 2 == sum(replica.num_picks == 1 for replica in target.replicas)


@pytest.mark.parametrize(("limit", "num_tokens"), [(0, 2), (1, 4), (2, 6), (3, 8), (5, 12)])
async def test_it_moves_as_often_as_the_limit_says(limit: int, num_tokens: int) -> None:
    """Each replica brings two tokens; also where the budget of repeats is empty. Then the last loss is told."""
    async with replicated(fleet_of(5, limit)) as target:
        target.budget = RetryBudget(0)
        Writers(target, (2, lost()), (2, STOPPED), (2, lost()), (2, lost()))
        results, error = await stream(target, root=CallContext())
        assert num_tokens == len(results)
        assert (error is None) == (num_tokens == LENGTH)
        assert min(limit, 4) == target.num_migrated


async def test_a_stream_without_a_token_between_two_losses_does_not_move() -> None:
    """It may be what ends them."""
    async with replicated(fleet_of(3)) as target:
        writers = Writers(target, (2, lost()), (0, lost()))
        results, error = await stream(target, root=CallContext())
        assert (2, 2) == (len(results), len(writers.calls))
        assert "Socket closed" in error.message


async def test_a_refusal_in_the_pause_is_no_move() -> None:
    """The next replica is asked; one that cannot go on ends the stream with what it was lost by."""
    async with replicated(fleet_of(3, limit=1)) as target:
        Writers(target, (2, lost()), (0, refusal()))
        results, error = await stream(target)
        assert (WHOLE, None, 1, 1) == (text_of(results), error, target.num_migrated, target.num_moved)
        Writers(target, (2, lost()), (0, WRONG))
        results, error = await stream(target)
        assert (2, "UNAVAILABLE") == (len(results), error.code)


@pytest.mark.parametrize(
    ("num_tokens", "error", "parameters"),
    [(2, WRONG, {}), (2, RemoteError("INTERNAL", "x"), {}), (LENGTH, lost(), {}), (2, lost(), {"sequence_id": 4})],
)
async def test_what_does_not_move(num_tokens: int, error: RemoteError, parameters: dict[str, Any]) -> None:
    """Other errors, what is complete, and sequences."""
    async with replicated(fleet_of(2)) as target:
        Writers(target, (num_tokens, error))
        results, found = await stream(target, InferCall("m", parameters=parameters))
        assert (num_tokens, 0) == (len(results), target.num_migrated)
        assert found is not None
        assert found is error or "sequence" in found.message


async def test_ids_that_go_elsewhere_are_not_known() -> None:
    """As to a region of shared memory: such a stream fails."""
    call = InferCall("m", outputs=(RequestedOutput("output_ids", {"shared_memory_region": "x"}),))
    async with replicated(fleet_of(2)) as target:
        Writers(target, (2, lost()))
        results, error = await stream(target, call)
        assert (2, "UNAVAILABLE") == (len(results), error.code)


@pytest.mark.parametrize(
    ("has_input", "parameters", "limit"),
    [
        (False, {"retry": "once"}, 0),
        (True, {"retry": "once"}, 3),
        (True, {"retry": "never"}, 0),
        (True, {}, 0),
        (True, {"retry": "once", "migration_limit": "0"}, 0),
        (True, {"migration_limit": "7"}, 7),
        (True, {"migration_limit": "many"}, 0),
    ],
)
def test_the_limit_is_the_models(has_input: bool, parameters: dict[str, str], limit: int) -> None:
    """By default that of models that may be called again, if they take tokens to go on behind."""
    config = ModelConfig(name="m")
    if has_input:
        config.input.add(name="resume_token_ids")
    for name, value in parameters.items():
        config.parameters[name].string_value = value
    assert limit == ModelSignature.from_config(config, "1").migration_limit
    assert sorted(parameters) == sorted(config.parameters)
