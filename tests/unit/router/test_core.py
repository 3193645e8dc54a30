"""The router as a server: graphs from files, readiness, statistics, pass-through."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget

from weft.base.core import CallContext, InferCall, InferResult, RequestedOutput
from weft.base.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    RemoteError,
    ResourceExhaustedError,
    UnavailableError,
    WeftError,
)
from weft.router.admission.controller import AdmissionSettings
from weft.router.target import TargetModel

#: A deadline that does not pass.
LATER_NS = 1 << 62


async def test_a_graph_is_served_as_a_model(tmp_path: Path, target: FakeTarget) -> None:
    """Ready, with a signature, in the index, and it answers."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target) as s:
        assert s.core.is_ready()
        assert s.core.is_model_ready("pipe", "")
        assert "1" == s.core.signature("pipe", "").version
        assert [("pipe", "1", "READY", ""), ("double", "1", "READY", "")] == s.core.index(ready_only=False)
        context = CallContext()
        result = await s.core.infer(make.request(), context)
        assert make.tensor(1, 2, shape=(1, 2)) == result.outputs["Z"]
        assert ("pipe", "1", "r1") == (result.model_name, result.model_version, result.request_id)
        assert [("x-graph-path", "root.one;two")] == context.trailing_metadata


async def test_a_triton_ensemble_is_served_as_it_stands(tmp_path: Path, target: FakeTarget) -> None:
    """`config.pbtxt` with `ensemble_scheduling` beside an empty version folder."""
    make.write(tmp_path, make.ENSEMBLE, "old", "7")
    async with make.started(tmp_path, target) as s:
        assert [("old", "7", "READY", "")] == s.core.index(ready_only=True)[:1]
        result = await s.core.infer(make.request("old"), CallContext())
        assert ["Z"] == list(result.outputs)
        assert ["", "1"] == [call.model_version for call in target.calls]
        config = s.core.config("old", "")
    steps = config.ensemble_scheduling.step
    assert ("ensemble", "old", 4) == (config.platform, config.name, config.max_batch_size)
    assert [("double", -1), ("double", 1)] == [(step.model_name, step.model_version) for step in steps]


async def test_a_plain_sequence_looks_like_an_ensemble_to_perf_analyzer(tmp_path: Path, target: FakeTarget) -> None:
    """Its steps can be followed to models whose configuration the router gives too."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target) as s:
        config = s.core.config("pipe", "")
        assert "ensemble" == config.platform
        first, second = config.ensemble_scheduling.step
        assert {"X": "X"} == dict(first.input_map)
        assert dict(first.output_map)["Y"] == dict(second.input_map)["X"]
        assert {"Y": "Z"} == dict(second.output_map)
        composing = s.core.config(first.model_name, "")
    assert ("double", ["X"]) == (composing.name, [tensor.name for tensor in composing.input])


async def test_statistics_grow_for_the_graph_and_for_its_models(tmp_path: Path, target: FakeTarget) -> None:
    """Success, queue and compute count requests; the parts never exceed the whole; rows are counted."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target) as s:
        assert [0, 0] == [counters.queue.count for counters in s.core.statistics("", "")]
        for _ in range(3):
            call = InferCall("pipe", inputs={"X": make.tensor(1, 2, 3, 4, shape=(2, 2))})
            await s.core.infer(call, CallContext())
        pipe, double = s.core.statistics("", "")
        assert [pipe] == s.core.statistics("pipe", "")
        assert [double] == s.core.statistics("double", "1")
    for counters, count in ((pipe, 3), (double, 6)):
        parts = (counters.queue, counters.compute_input, counters.compute_infer, counters.compute_output)
        assert [count] * 5 == [counters.success.count, *(part.count for part in parts)]
        assert 0 < sum(part.total_ns for part in parts) <= counters.success.total_ns
        assert 2 * count == counters.inference_count
        assert count == sum(sum(histogram.counts) for histogram in counters.request_latency.values())


async def test_failures_are_counted_with_their_reason(tmp_path: Path, target: FakeTarget) -> None:
    """A step's failure counts for the graph as well."""

    async def fail(call: InferCall, context: CallContext) -> dict[str, Any]:
        raise RemoteError("INTERNAL", "boom")

    target.answers["double"] = fail
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target) as s:
        with pytest.raises(RemoteError, match=r"^pipe/1: root/one -> double@1: boom$"):
            await s.core.infer(make.request(), CallContext())
        assert {"BACKEND": 1} == s.core.statistics("pipe", "")[0].failures_by_reason


async def test_an_invalid_request_calls_nothing(tmp_path: Path, target: FakeTarget) -> None:
    """The graph's own signature is checked before any step."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target) as s:
        with pytest.raises(InvalidArgumentError, match="unexpected shape for input 'X' for model 'pipe'"):
            await s.core.infer(InferCall("pipe", inputs={"X": make.tensor(1, 2, 3, shape=(1, 3))}), CallContext())
        asked = (RequestedOutput("Z", {"classification": 0}),)
        with pytest.raises(InvalidArgumentError, match="'classification' of output 'Z' must be an integer above 0"):
            await s.core.infer(make.request(outputs=asked), CallContext())
    assert [] == target.calls


async def test_the_timeout_parameter_shortens_the_deadline(tmp_path: Path, target: FakeTarget) -> None:
    """Microseconds from arrival; a client deadline that is earlier stays."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target) as s:
        context = CallContext(arrival_ns=1_000)
        await s.core.infer(make.request(parameters={"timeout": 5_000_000}), context)
        await s.core.infer(
            make.request(parameters={"timeout": 5_000_000}), CallContext(arrival_ns=1_000, deadline_ns=1_007)
        )
    assert [5_000_001_000] * 2 + [1_007] * 2 == [seen.deadline_ns for seen in target.contexts]


async def test_unknown_names_and_versions_are_not_found(tmp_path: Path, target: FakeTarget) -> None:
    """The texts are those that clients of Triton Inference Server look for; an unknown version is not ready."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target) as s:
        for name, version, error, text in (
            ("nobody", "", NotFoundError, "Request for unknown model: 'nobody' is not found"),
            ("double", "9", NotFoundError, "Request for unknown model: 'double' version 9 is not found"),
            ("pipe", "9", NotFoundError, "Request for unknown model: 'pipe' version 9 is not found"),
            *(
                (name, version, InvalidArgumentError, "failed to get model version from specified version string")
                for name in ("pipe", "double")
                for version in ("x", "0", "-1", "1.0", " 1", "²", "9" * 5_000)
            ),
        ):
            with pytest.raises(error, match=text):
                await s.core.infer(make.request(name, version), CallContext())
            if version == "9":
                assert not s.core.is_model_ready(name, version)
            else:
                with pytest.raises(error, match=text):
                    s.core.is_model_ready(name, version)
            for ask in (s.core.signature, s.core.config, s.core.statistics):
                with pytest.raises(WeftError, match=text):
                    ask(name, version)


async def test_leading_zeros_of_a_version_mean_nothing(tmp_path: Path, target: FakeTarget) -> None:
    """As in Triton Inference Server, for graphs and models alike; the target and the counters see the plain number."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target) as s:
        for name in ("pipe", "double"):
            assert "1" == (await s.core.infer(make.request(name, "001"), CallContext())).model_version
            assert s.core.is_model_ready(name, "01")
            assert ["1"] == [counters.version for counters in s.core.statistics(name, "01")]
        assert "1" == target.calls[-1].model_version
        assert 2 == len(s.core.statistics("", ""))


@pytest.mark.parametrize(("first_answer_s", "error"), [(30, UnavailableError), (0, NotFoundError)])
async def test_an_unknown_model_may_be_one_of_a_target_that_does_not_answer(
    tmp_path: Path, target: FakeTarget, monkeypatch: pytest.MonkeyPatch, first_answer_s: float, error: type[WeftError]
) -> None:
    """UNAVAILABLE, which clients repeat, for a time after the start; the message says which targets were not heard."""
    monkeypatch.setattr("weft.router.targets.catalog.FIRST_ANSWER_S", first_answer_s)
    target.models = RemoteError("UNAVAILABLE", "refused")
    async with make.started(tmp_path, target) as s:
        with pytest.raises(error, match=r"'double' is not .*; targets that do not answer: model \(fake:1\)$"):
            await s.core.infer(make.request("double"), CallContext())


async def test_a_model_that_is_called_itself_is_reported_as_a_step_is(tmp_path: Path, target: FakeTarget) -> None:
    """The path is its name; a trace has its one call."""

    async def answer(call: InferCall, context: CallContext) -> InferResult:
        return InferResult("double", "1", call.request_id, {"cost": 2}, {"Y": call.inputs["X"]})

    target.answers["double"] = answer
    async with make.started(tmp_path, target) as s:
        context = CallContext()
        assert {"cost": 2} == (await s.core.infer(make.request("double"), context)).parameters
        assert [("x-graph-path", "double")] == context.trailing_metadata
        result = await s.core.infer(make.request("double", parameters={"graph_trace": True}), CallContext())
    assert 2 == result.parameters["cost"]
    (entry,) = json.loads(result.parameters["graph_trace"])  # type: ignore[arg-type]
    assert entry.pop("ms") >= 0
    assert {
        "path": "double",
        "target": "model",
        "model": "double",
        "version": "1",
        "start_ms": 0.0,
        "status": "OK",
    } == entry


async def test_an_error_of_a_model_that_is_called_itself_is_its_own(tmp_path: Path, target: FakeTarget) -> None:
    """Its text is what its server said, with the path in the trailer."""

    async def fail(call: InferCall, context: CallContext) -> dict[str, Any]:
        raise RemoteError("INTERNAL", "boom", retry_after_ms=3)

    target.answers["double"] = fail
    async with make.started(tmp_path, target) as s:
        context = CallContext()
        with pytest.raises(RemoteError, match=r"^boom$") as caught:
            await s.core.infer(make.request("double"), context)
    assert ("INTERNAL", 3) == (caught.value.code, caught.value.retry_after_ms)
    assert [("x-graph-path", "double")] == context.trailing_metadata


async def test_a_models_own_name_reaches_it_through_the_router(tmp_path: Path, target: FakeTarget) -> None:
    """Pass-through: deadline and headers go along, hop-by-hop headers do not."""
    async with make.started(tmp_path, target) as s:
        context = CallContext(deadline_ns=LATER_NS, headers={"x-user-id": "7", "user-agent": "a"})
        call = make.request("double", outputs=(RequestedOutput("Y", {}),))
        assert ["Y"] == list((await s.core.infer(call, context)).outputs)
        assert s.core.is_model_ready("double", "")
        assert "double" == s.core.signature("double", "1").name
    assert (LATER_NS, {"x-user-id": "7"}) == (target.contexts[0].deadline_ns, target.contexts[0].headers)


async def test_what_routers_alone_say_is_taken_from_a_clients_request(tmp_path: Path, target: FakeTarget) -> None:
    """A client can neither have its request handed over nor name a source of blocks; its other parameters go along."""
    async with make.started(tmp_path, target) as s:
        said = {"kv_lease": True, "kv_source": "10.0.0.1:1 a.b 00", "seed": 7}
        await s.core.infer(make.request("double", parameters=said), CallContext())
    assert {"seed": 7} == dict(target.calls[0].parameters)


async def test_a_graph_waits_for_its_models(tmp_path: Path, target: FakeTarget) -> None:
    """A target that comes later makes the graph ready; until then index and answers say why it is not."""
    target.models = RemoteError("UNAVAILABLE", "refused")
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target) as s:
        assert not s.core.is_ready()
        assert not s.core.is_model_ready("pipe", "")
        entry, model = s.core.index(ready_only=False)
        assert ("UNAVAILABLE", "double", "UNAVAILABLE") == (entry.state, model.name, model.state)
        assert "'double'" in entry.reason
        assert "targets that do not answer yet: model (fake:1)" in entry.reason
        with pytest.raises(UnavailableError, match="graph 'pipe' version 1 is not at ready state"):
            await s.core.infer(make.request(), CallContext())
        make.serve(target, "double")
        await s.refresh(s.core.is_ready)
        await s.core.infer(make.request(), CallContext())


@pytest.mark.parametrize("version", ["", "1"])
async def test_a_model_that_is_to_come_is_unavailable(tmp_path: Path, target: FakeTarget, version: str) -> None:
    """By its name, before it was ever served: one that a target is loading, or that a graph names while one is down.

    Nothing is not found until each target has answered; what a target that answers does not list is.
    """

    async def answers() -> list[str]:
        found = []
        for name in ("double", "other"):
            with pytest.raises(WeftError) as caught:
                await s.core.infer(make.request(name, version), CallContext())
            found.append(caught.value.code)
            if caught.value.code == "UNAVAILABLE":
                assert not s.core.is_model_ready(name, version)
                states = {entry.name: entry.state for entry in s.core.index(ready_only=False)}
                assert states.get(name) == ("UNAVAILABLE" if name == "double" else ("LOADING" if is_listed else None))
                assert "is not at ready state; " in caught.value.message
        return found

    is_listed = False
    target.models = RemoteError("UNAVAILABLE", "refused")
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target) as s:
        assert ["UNAVAILABLE", "UNAVAILABLE"] == await answers()
        is_listed = True
        target.models = [TargetModel.undescribed("other", version, "LOADING", "")]
        await s.core.refresh("model")
        assert ["NOT_FOUND", "UNAVAILABLE"] == await answers()
        make.serve(target, "double", "other")
        await s.refresh(s.core.is_ready)
        for name in ("double", "other"):
            await s.core.infer(make.request(name, version), CallContext())


@pytest.mark.parametrize(("version", "state"), [("1", "LOADING"), ("", "LOADING"), ("1", "UNAVAILABLE")])
async def test_what_was_served_is_unavailable_until_its_server_says_otherwise(
    tmp_path: Path, target: FakeTarget, version: str, state: str
) -> None:
    """After a crash of the service its models are listed, and no more is told of them; then one is gone."""
    make.write(tmp_path, make.PIPE)
    make.serve(target, "double", "other")
    async with make.started(tmp_path, target) as s:
        target.models = RemoteError("UNAVAILABLE", "refused")
        await s.core.refresh("model")
        target.models = [TargetModel.undescribed("double", version, state, "")]
        await s.core.refresh("model")
        assert not s.core.is_model_ready("double", "1")
        assert not s.core.is_model_ready("pipe", "")
        assert "X" == s.core.signature("double", "").inputs[0].name
        with pytest.raises(NotFoundError):
            s.core.is_model_ready("other", "")
        make.serve(target, "double")
        await s.refresh(s.core.is_ready)


async def test_the_order_of_outputs_does_not_tell_kept_answers_apart(tmp_path: Path, target: FakeTarget) -> None:
    """Of a whole graph; each request has its own order, and hits and misses count."""
    outputs = (
        'output [ { name: "Z" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "M" data_type: TYPE_FP32 dims: [ 2 ] } ]'
    )
    lines = [outputs if line.startswith("output [") else line for line in make.PIPE.splitlines()]
    make.write(tmp_path, "\n".join([*lines, "policy { cache { } }"]))
    async with make.started(tmp_path, target) as s:
        for names in (("Z", "M"), ("M", "Z"), ("Z", "M")):
            call = make.request(outputs=tuple(RequestedOutput(name, {}) for name in names))
            assert list(names) == list((await s.core.infer(call, CallContext())).outputs)
        (found,) = s.core.statistics("pipe", "")
        assert (2, 2, 1) == (len(target.calls), found.cache_hit.count, found.cache_miss.count)


async def test_readiness_follows_the_models(tmp_path: Path, target: FakeTarget) -> None:
    """A lost model makes the graph not ready; it is tried all the same, and is ready again by itself."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target) as s:
        target.models = RemoteError("UNAVAILABLE", "refused")
        await s.refresh(lambda: not s.core.is_ready())
        assert not s.core.is_model_ready("pipe", "")
        *entry, reason = s.core.index(ready_only=False)[0]
        assert ["pipe", "1", "UNAVAILABLE"] == entry
        told = r"step 'root/one': model 'double' on target 'model' is not ready since 20\S+: the target does not answer"
        assert re.fullmatch(told, reason), reason
        await s.core.infer(make.request(), CallContext())
        make.serve(target, "double")
        await s.refresh(s.core.is_ready)


async def test_a_model_that_changes_under_a_graph_takes_it_out_of_service(tmp_path: Path, target: FakeTarget) -> None:
    """The graph is checked anew; it comes back when the model fits again."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target) as s:
        make.serve(target, "double", dims=3)
        await s.refresh(lambda: not s.core.is_ready())
        with pytest.raises(FailedPreconditionError, match=r"\[-1,2\].*\[-1,3\]"):
            await s.core.infer(make.request(), CallContext())
        make.serve(target, "double")
        await s.refresh(s.core.is_ready)


async def test_a_graph_goes_over_to_a_replica_of_its_model(tmp_path: Path, target: FakeTarget) -> None:
    """The steps are bound anew to the target that is left, and back when the first has returned."""
    replica = FakeTarget("replica")
    make.serve(replica, "double")
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target, replica) as s:
        await s.core.infer(make.request(), CallContext())
        assert (2, 0) == (len(target.calls), len(replica.calls))
        target.models = RemoteError("UNAVAILABLE", "refused")
        await s.refresh(lambda: s.core._graphs.find("pipe", "").serving.calls[0].target == "replica")
        assert s.core.is_ready()
        await s.core.infer(make.request(), CallContext())
        assert (2, 2) == (len(target.calls), len(replica.calls))
        make.serve(target, "double")
        await s.refresh(lambda: s.core._graphs.find("pipe", "").serving.calls[0].target == "model")


async def test_a_bad_graph_does_not_stop_the_others(tmp_path: Path, target: FakeTarget) -> None:
    """Its reason has file, line and column; the router is not ready, the good graph is."""
    make.write(tmp_path, make.PIPE)
    make.write(tmp_path, 'name: "bad" platfrom: "graph"', "bad")
    async with make.started(tmp_path, target) as s:
        assert not s.core.is_ready()
        assert s.core.is_model_ready("pipe", "")
        reason = next(entry.reason for entry in s.core.index(ready_only=False) if entry.name == "bad")
    assert f"{tmp_path}/bad/1/graph.pbtxt:1:13: error: unknown field 'platfrom'" in reason
    assert "did you mean 'platform'?" in reason


async def test_a_bad_new_version_leaves_the_last_good_one_in_service(tmp_path: Path, target: FakeTarget) -> None:
    """The default version is the highest that is ready."""
    make.write(tmp_path, make.PIPE)
    make.write(tmp_path, make.PIPE.replace("double", "nobody"), version="2")
    async with make.started(tmp_path, target) as s:
        assert "1" == (await s.core.infer(make.request(), CallContext())).model_version
        assert not s.core.is_model_ready("pipe", "2")
        make.serve(target, "double", "nobody")
        await s.refresh(s.core.is_ready)
        assert "2" == (await s.core.infer(make.request(), CallContext())).model_version
        assert "1" == (await s.core.infer(make.request(version="1"), CallContext())).model_version


async def test_admission_is_decided_before_any_work(tmp_path: Path, target: FakeTarget) -> None:
    """The graph's limit and the router's: the request beyond is refused with a hint, and calls nothing."""
    is_called, release = asyncio.Event(), asyncio.Event()

    async def hold(call: InferCall, context: CallContext) -> dict[str, Any]:
        is_called.set()
        await release.wait()
        return {"Y": call.inputs["X"]}

    target.answers["double"] = hold
    make.write(tmp_path, make.PIPE + "policy { max_inflight: 1 }")
    for options, text in (
        ({}, "graph 'pipe' has 1 requests in flight"),
        ({"admission": AdmissionSettings(max_inflight=1)}, "the router has 1 requests in flight"),
    ):
        is_called.clear()
        release.clear()
        async with make.started(tmp_path, target, **options) as s:
            first = asyncio.create_task(s.core.infer(make.request(), CallContext()))
            await is_called.wait()
            with pytest.raises(ResourceExhaustedError, match=text) as caught:
                await s.core.infer(make.request(), CallContext())
            assert caught.value.retry_after_ms
            release.set()
            await first
            await s.core.infer(make.request(), CallContext())


async def test_a_stream_has_one_answer_to_a_request(tmp_path: Path, target: FakeTarget) -> None:
    """Graphs are not decoupled in this version."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target) as s:
        answers = [result async for result in s.core.stream_infer(make.request(), CallContext())]
    assert [True] == [answer.is_final for answer in answers]


async def test_nothing_is_compiled_for_a_request(
    tmp_path: Path, target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between requests neither compiler, nor checker, nor executor construction runs."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target) as s:

        def forbidden(*arguments: Any, **options: Any) -> None:
            raise AssertionError("compiled while serving")

        for place in (
            "repository.serving.compile_with_warnings",
            "repository.serving.GraphExecutor",
            "executor.Assembly",
        ):
            monkeypatch.setattr(f"weft.router.{place}", forbidden)
        for _ in range(3):
            await s.core.infer(make.request(), CallContext())


async def test_closing_leaves_no_task(tmp_path: Path, target: FakeTarget) -> None:
    """Pollers and followers end with the router."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target):
        assert make.num_other_tasks() > 0
    assert 0 == make.num_other_tasks()
    assert target.is_closed
