"""Feedback over gRPC: whose steps are rewarded, and what is refused; and what the bandits' metrics say of it."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, failing

from weft.base.core import CallContext, InferCall
from weft.base.errors import RemoteError
from weft.v2.server.make_server import make_server
from weft.v2.server.server import add_services
from weft_protos import graph_service_pb2 as pb
from weft_protos.graph_service_pb2_grpc import GraphServiceStub


def graph(*steps: str, name: str = "pipe") -> str:
    """A root sequence with a bandit over models of these names."""
    listed = " ".join(f'step {{ name: "{step}" weight: 1 model_name: "{step}" }}' for step in steps)
    return f"""name: "{name}" platform: "graph" max_batch_size: 4
input  [ {{ name: "X" data_type: TYPE_FP32 dims: [ 2 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }} ]
node {{ name: "root" sequence {{ step {{ name: "ab" node: "ab" }} }} }}
node {{ name: "ab" splitter {{ bandit {{ algorithm: THOMPSON }} {listed} }} }}
"""


class Served:
    """A router behind gRPC."""

    def __init__(self, core: Any, stub: Any) -> None:
        self.core = core
        self._stub = stub

    async def ask(self, request_id: str = "", name: str = "pipe", version: str = "") -> str:
        """The path that a request takes."""
        context = CallContext()
        call = InferCall(name, version, request_id, inputs={"X": make.tensor(1, 2, shape=(1, 2))})
        try:
            await self.core.infer(call, context)
        except RemoteError:
            assert "!" in dict(context.trailing_metadata)["x-graph-path"]
        return dict(context.trailing_metadata)["x-graph-path"]

    async def reward(self, reward: float | None, **request: Any) -> list[tuple[str, int, int, float]]:
        """The steps that were rewarded."""
        request.setdefault("graph", "pipe")
        response = await self._stub.GraphFeedback(pb.GraphFeedbackRequest(reward=reward, **request))
        return [(f"{arm.node}[{arm.step}]", arm.num_pulls, arm.num_rewards, arm.reward_sum) for arm in response.arm]

    async def refusal(self, reward: float | None, **request: Any) -> tuple[str, str]:
        """Status and message."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.reward(reward, **request)
        return caught.value.code().name, caught.value.details()

    def metrics(self) -> dict[str, float]:
        """What the router tells Prometheus, the zeros left out."""
        registry = CollectorRegistry()
        for collector in self.core.extension().collectors:
            registry.register(collector)
        lines = (line for line in generate_latest(registry).decode().splitlines() if line[0] != "#")
        samples = ((key, float(value)) for key, _, value in (line.rpartition(" ") for line in lines))
        return {key: value for key, value in samples if value}


@asynccontextmanager
async def served(root: Path, target: Any) -> AsyncIterator[Served]:
    async with make.started(root, target, model_control="explicit", load_graphs=["*"]) as s:
        server = make_server()
        add_services(server, s.core, "weft.router", s.core.extension())
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield Served(s.core, GraphServiceStub(channel))
        finally:
            await server.stop(None)


@pytest.fixture
def target() -> Any:
    """Serves the models a, b and c."""
    target = FakeTarget()
    make.serve(target, "a", "b", "c")
    return target


async def test_a_request_is_rewarded_by_its_id_once(tmp_path: Path, target: Any) -> None:
    """The answer has the figures of what was chosen; whoever sends it again is told."""
    make.write(tmp_path, graph("a"))
    async with served(tmp_path, target) as s:
        await s.ask("r1")
        assert [("root/ab/ab[a]", 1, 1, 0.5)] == await s.reward(0.5, request_id="r1")
        assert ("ALREADY_EXISTS", "feedback for request 'r1' of graph 'pipe' was already given") == (
            await s.refusal(1.0, request_id="r1")
        )
        code, text = await s.refusal(1.0, request_id="r2")
        assert "NOT_FOUND" == code
        assert text.startswith("no request 'r2' of graph 'pipe' that passed a bandit is known; the latest 100000")


async def test_a_path_is_rewarded_each_time(tmp_path: Path, target: Any) -> None:
    """It needs no memory of the request; it may come from another router."""
    make.write(tmp_path, graph("a"))
    async with served(tmp_path, target) as s:
        path = await s.ask()
        assert "root.ab=ab[a]" == path
        for count in (1, 2):
            assert [("root/ab/ab[a]", 1, count, float(count))] == await s.reward(1.0, path=path)


@pytest.mark.parametrize("reward", [-0.001, 1.001, math.nan, math.inf, -math.inf])
async def test_a_reward_that_is_none_is_refused(tmp_path: Path, target: Any, reward: float) -> None:
    """Whichever way the request is named; it can still be rewarded."""
    make.write(tmp_path, graph("a"))
    async with served(tmp_path, target) as s:
        path = await s.ask("r1")
        expected = ("INVALID_ARGUMENT", f"a reward is a number from 0 (worst) to 1 (best), got {reward:g}")
        assert expected == await s.refusal(reward, request_id="r1") == await s.refusal(reward, path=path)
        assert [("root/ab/ab[a]", 1, 1, 1.0)] == await s.reward(1.0, request_id="r1")


async def test_wrong_feedback_is_told_what_is_wrong(tmp_path: Path, target: Any) -> None:
    """Nothing is counted."""
    make.write(tmp_path, graph("a"))
    make.write(tmp_path, make.PIPE.replace('"double"', '"a"').replace('"pipe"', '"plain"'), "plain")
    async with served(tmp_path, target) as s:
        for request, code, text in (
            ({"graph": "nobody", "request_id": "r"}, "NOT_FOUND", "'nobody' is no graph of this router"),
            ({"graph": "a", "request_id": "r"}, "NOT_FOUND", "'a' is no graph of this router"),
            ({}, "INVALID_ARGUMENT", "give 'request_id' or 'path'"),
            ({"request_id": ""}, "INVALID_ARGUMENT", "a request id for feedback has 1 to 1024 characters, got 0"),
            ({"path": ""}, "INVALID_ARGUMENT", "'' is no path of this graph"),
            ({"path": "root.ab=ab[z]"}, "INVALID_ARGUMENT", "has 'z]' in place of a step of node 'ab': a"),
            ({"path": "root.ab=ab[a]", "version": 2}, "NOT_FOUND", "version 2 is not found"),
            ({"path": "root.ab=ab[a]", "version": -1}, "INVALID_ARGUMENT", "-1"),
            ({"graph": "plain", "path": "root.one;two"}, "INVALID_ARGUMENT", "passes no bandit of graph 'plain'"),
            ({"path": "x" * 5000}, "INVALID_ARGUMENT", "a path of 5000 characters was cut"),
        ):
            got = await s.refusal(1.0, **request)
            assert code == got[0], (request, got)
            assert text in got[1]
        missing = await s.refusal(None, request_id="r1")
        assert ("INVALID_ARGUMENT", "'reward' is missing; give a number from 0 (worst) to 1 (best)") == missing
        assert {} == {key: value for key, value in s.metrics().items() if "bandit" in key}


async def test_late_feedback_counts_though_the_graph_was_loaded_anew(tmp_path: Path, target: Any) -> None:
    """For a step that is gone by the request's id; by a path as long as a version has it, here again after rollback."""
    make.write(tmp_path, graph("a"))
    async with served(tmp_path, target) as s:
        for request_id in ("r1", "r2"):
            path = await s.ask(request_id)
        make.write(tmp_path, graph("b", "c"))
        await s.core.load("pipe", {})
        assert [("root/ab/ab[a]", 2, 1, 1.0)] == await s.reward(1.0, request_id="r1")
        assert "INVALID_ARGUMENT" == (await s.refusal(1.0, path=path))[0]
        await s.core.load("pipe", {"rollback": True})
        assert [("root/ab/ab[a]", 2, 2, 2.0)] == await s.reward(1.0, path=path)
        await s.core.unload("pipe", unload_dependents=False)
        assert [("root/ab/ab[a]", 2, 3, 2.0)] == await s.reward(0.0, request_id="r2")
        assert ("NOT_FOUND", "no version of graph 'pipe' is loaded") == await s.refusal(1.0, path=path)


async def test_versions_that_serve_beside_each_other_are_both_rewarded(tmp_path: Path, target: Any) -> None:
    """Each has steps that the other lacks; what is known of the step that both have is shared."""
    make.write(tmp_path, graph("a", "b"))
    make.write(tmp_path, graph("b", "c"), version="2")
    async with served(tmp_path, target) as s:
        for step, version in (("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("b", 2), ("c", 2)):
            await s.reward(1.0, path=f"root.ab=ab[{step}]", version=version)
        rewards = {key: value for key, value in s.metrics().items() if "bandit_rewards_total" in key}
    labels = 'graph="pipe",node="root/ab/ab"'
    assert {
        f'weft_bandit_rewards_total{{{labels},step="{s}"}}': n for s, n in (("a", 2), ("b", 3), ("c", 2))
    } == rewards


async def test_a_step_that_fails_is_worth_nothing(tmp_path: Path, target: Any) -> None:
    """Whatever the answer was."""
    target.answers["a"] = failing()
    make.write(tmp_path, graph("a"))
    async with served(tmp_path, target) as s:
        assert "root.ab=ab[a!]!" == await s.ask("r1")
        assert [("root/ab/ab[a]", 1, 1, 0.0)] == await s.reward(1.0, request_id="r1")
        assert [("root/ab/ab[a]", 1, 2, 0.0)] == await s.reward(1.0, path="root.ab=ab[a!]!")


async def test_metrics_are_those_of_what_serves(tmp_path: Path, target: Any) -> None:
    """Series of steps, versions and graphs that are gone are gone, so that their number is bounded."""
    make.write(tmp_path, graph("a"))
    async with served(tmp_path, target) as s:
        await s.ask("r1")
        await s.reward(0.25, request_id="r1")
        labels = 'graph="pipe",node="root/ab/ab",step="a"'
        expected = {
            f"weft_bandit_pulls_total{{{labels}}}": 1,
            f"weft_bandit_rewards_total{{{labels}}}": 1,
            f"weft_bandit_reward_sum_total{{{labels}}}": 0.25,
            'weft_graph_step_requests_total{graph="pipe",status="OK",step="root/ab/ab[a]",version="1"}': 1,
        }
        got = s.metrics()
        assert expected == {key: got.get(key) for key in expected}
        for step in "bcb":
            make.write(tmp_path, graph(step))
            await s.core.load("pipe", {})
            await s.ask()
        steps = {key.partition('step="')[2].partition('"')[0] for key in s.metrics() if 'step="' in key}
        assert {"b", "root/ab", "root/ab/ab[b]"} == steps
        assert 2 == s.metrics()['weft_bandit_pulls_total{graph="pipe",node="root/ab/ab",step="b"}']
        make.write(tmp_path, "nonsense {")
        with pytest.raises(Exception, match="pbtxt"):
            await s.core.load("pipe", {})
        assert 1 == s.metrics()['weft_graph_load_failures_total{graph="pipe",version="1"}']
        assert {"pipe"} == {one.name for one in s.core.statistics("", "")} - {"a", "b", "c"}
        await s.core.unload("pipe", unload_dependents=False)
        assert ["weft_endpoint_state", "weft_target_serving_replicas"] == sorted(
            key.partition("{")[0] for key in s.metrics()
        )
        assert set() == {one.name for one in s.core.statistics("", "")} - {"a", "b", "c"}


async def test_the_texts_that_serve_are_told(tmp_path: Path, target: Any) -> None:
    """The router gives the source of a graph; a name that is no graph's is NOT_FOUND."""
    make.write(tmp_path, graph("a"))
    async with served(tmp_path, target) as s:
        (one,) = (await s._stub.GraphSource(pb.GraphSourceRequest(graph="pipe"))).graph
        assert ("pipe", 1, graph("a").encode()) == (one.graph, one.version, one.text)
        with pytest.raises(grpc.aio.AioRpcError, match="'gone' is no graph of this router"):
            await s._stub.GraphSource(pb.GraphSourceRequest(graph="gone"))


def split(*steps: str, more: str = "") -> str:
    """A root splitter over models of these names."""
    listed = " ".join(f'step {{ name: "{step}" model_name: "{step}" }}' for step in steps)
    return graph(*steps).partition("node {")[0] + f'node {{ name: "root" splitter {{ {more} {listed} }} }}'


async def test_counters_of_what_was_rolled_back_stay(tmp_path: Path, target: Any) -> None:
    """Of steps and of versions, so that one sees why; until the router ends."""
    make.write(tmp_path, split("a"))
    async with served(tmp_path, target) as s:
        make.write(tmp_path, split("b"))
        make.write(tmp_path, split("c"), version="2")
        await s.core.load("pipe", {})
        await s.ask(version="1")
        await s.ask()
        await s.core.load("pipe", {"rollback": True})
        assert "root[a]" == await s.ask()
        name = 'weft_graph_step_requests_total{graph="pipe",status="OK",step="root[%s]",version="%s"}'
        for _ in range(2):
            assert [1, 1, 1] == [s.metrics().get(name % key) for key in (("a", "1"), ("b", "1"), ("c", "2"))]
            counted = {one.version: one.success.count for one in s.core.statistics("", "") if one.name == "pipe"}
            assert {"1": 2, "2": 1} == counted
            make.write(tmp_path, split("a"))
            await s.core._lifecycle.recheck()


async def test_who_sets_weights_and_why_is_logged(
    tmp_path: Path, target: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In one line, with the old and the new ones; not where a bandit or a rollout sets them."""
    make.write(tmp_path, split("a", "b"))
    make.write(tmp_path, graph("a", "b", name="learns"), name="learns")
    more = "rollout { steps: [10, 100] guard { max_error_rate: 0.1 } }"
    make.write(tmp_path, split("a", "b", more=more).replace("pipe", "rolls"), name="rolls")
    async with served(tmp_path, target) as s:
        request = pb.SetWeightsRequest(graph="pipe", node="root", weight={"b": 0.0}, reason="b is slow\n")
        with caplog.at_level("WARNING"):
            first = await s._stub.SetWeights(request)
            second = await s._stub.SetWeights(pb.SetWeightsRequest(graph="pipe", node="root", weight={"b": 3.0}))
        assert ({"a": 1.0, "b": 0.0}, True) == (dict(first.weight), second.revision >= first.revision > 0)
        expected = f"weights of graph 'pipe' version 1, node 'root', revision {first.revision}, set by '', reason "
        expected += "'b is slow\\n': {'a': 1.0, 'b': 1.0} -> {'a': 1.0, 'b': 0.0}"
        assert expected in [record.getMessage() for record in caplog.records]
        for name, node, why in (("learns", "ab", "has a 'bandit'"), ("rolls", "root", "has a 'rollout'")):
            with pytest.raises(grpc.aio.AioRpcError, match=f"splitter '{node}' {why}, which sets its shares"):
                await s._stub.SetWeights(pb.SetWeightsRequest(graph=name, node=node, weight={"a": 1.0}))
        with pytest.raises(grpc.aio.AioRpcError, match="'nothing' is no graph of this router"):
            await s._stub.SetWeights(pb.SetWeightsRequest(graph="nothing", node="root", weight={"a": 1.0}))


async def test_rollouts_are_told_to_who_asks(tmp_path: Path, target: Any) -> None:
    """Of a graph, or of every one; an action needs a graph, and a node where there are several."""
    node = 'node { name: "%s" splitter { rollout { steps: [10] guard { max_error_rate: 0.1 } } '
    node += 'step { name: "a" model_name: "a" } step { name: "b" model_name: "b" } } }'
    head = graph("a").partition("node {")[0]
    root = 'node { name: "root" sequence { step { name: "x" node: "one" output_map { key: "Y" value: "Z" } } '
    root += 'step { name: "y" node: "two" input_map { key: "X" value: "Z" } } } }'
    make.write(tmp_path, "\n".join([head, root, node % "one", node % "two"]))
    make.write(tmp_path, graph("a", name="other"), name="other")
    async with served(tmp_path, target) as s:

        async def asked(**request: Any) -> Any:
            try:
                response = await s._stub.Rollout(pb.RolloutRequest(**request))
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
            return [(one.graph, one.node, one.candidate, one.percent, one.num_steps) for one in response.rollout]

        assert [("pipe", "one", "b", 10, 1), ("pipe", "two", "b", 10, 1)] == await asked() == await asked(graph="pipe")
        assert [("pipe", "two", "b", 10, 1)] == await asked(graph="pipe", node="two")
        assert "INVALID_ARGUMENT: graph 'pipe' has rollouts of nodes one, two; give one 'node'" == await asked(
            graph="pipe", action="PAUSE"
        )
        assert [("pipe", "two", "b", 0, 1)] == await asked(graph="pipe", node="two", action="ABORT")
        assert "INVALID_ARGUMENT: 'graph' is missing" in await asked(action="PAUSE")
        assert "NOT_FOUND: graph 'other' has no rollout" in await asked(graph="other")
        assert "NOT_FOUND: 'nothing' is no graph of this router" == await asked(graph="nothing")
        assert "INVALID_ARGUMENT: no action '9' of a rollout" in await asked(graph="pipe", node="one", action=9)
