"""Load, reload and unload of graphs."""

import asyncio
import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.pipes import answered_by, index_of, named

from weft.base.core import CallContext, InferCall
from weft.base.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from weft.router.repository.files import VersionFile
from weft.router.repository.lifecycle import GraphLifecycle


async def test_load_and_unload_need_explicit_control(tmp_path: Path, target: FakeTarget) -> None:
    """Otherwise both are refused with the words of Triton Inference Server."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target) as s:
        with pytest.raises(UnavailableError, match="explicit model load / unload is not allowed"):
            await s.core.load("pipe", {})
        with pytest.raises(UnavailableError, match="explicit model load / unload is not allowed"):
            await s.core.unload("pipe", unload_dependents=False)


async def test_explicit_control_loads_reloads_and_unloads(tmp_path: Path, target: FakeTarget) -> None:
    """Nothing is loaded unasked; a reload swaps what serves; an unloaded graph says so and does not hurt readiness."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target, model_control="explicit") as s:
        assert s.core.is_ready()
        assert ("pipe", "1", "", "") == s.core.index(ready_only=False)[0]
        await s.core.load("pipe", {})
        assert s.core.is_model_ready("pipe", "")
        make.write(tmp_path, make.PIPE.replace('name: "one"', 'name: "first"'))
        await s.core.load("pipe", {})
        context = CallContext()
        await s.core.infer(make.request(), context)
        assert [("x-graph-path", "root.first;two")] == context.trailing_metadata
        await s.core.unload("pipe", unload_dependents=False)
        assert ("pipe", "1", "UNAVAILABLE", "unloaded") == s.core.index(ready_only=False)[0]
        assert s.core.is_ready()
        with pytest.raises(UnavailableError, match="unloaded"):
            await s.core.infer(make.request(), CallContext())


async def test_a_reload_that_fails_keeps_what_serves(tmp_path: Path, target: FakeTarget) -> None:
    """The caller gets the diagnostics; requests go on, those in flight too."""
    is_called, release = asyncio.Event(), asyncio.Event()

    async def hold(call: InferCall, context: CallContext) -> dict[str, Any]:
        is_called.set()
        await release.wait()
        return {"Y": call.inputs["X"]}

    make.write(tmp_path, make.PIPE)
    target.answers["double"] = hold
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        inflight = asyncio.create_task(s.core.infer(make.request(), CallContext()))
        await is_called.wait()
        make.write(tmp_path, make.PIPE.replace("double", "nobody"))
        with pytest.raises(InvalidArgumentError, match="nobody"):
            await s.core.load("pipe", {})
        assert s.core.is_model_ready("pipe", "")
        release.set()
        assert ["Z"] == list((await inflight).outputs)
        await s.core.infer(make.request(), CallContext())


async def test_a_removed_version_is_gone_after_a_reload(tmp_path: Path, target: FakeTarget) -> None:
    """What the folder has is what is served; a folder without a graph cannot be loaded."""
    make.write(tmp_path, make.PIPE)
    make.write(tmp_path, make.PIPE, version="2")
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["pipe"]) as s:
        shutil.rmtree(tmp_path / "pipe" / "2")
        await s.core.load("pipe", {})
        assert ["1"] == [entry.version for entry in s.core.index(ready_only=True) if entry.name == "pipe"]
        for name in ("nobody", "../pipe", ""):
            with pytest.raises(NotFoundError, match=r"failed to load '.*', failed to poll from model repository"):
                await s.core.load(name, {})
        with pytest.raises(UnsupportedError, match="config"):
            await s.core.load("pipe", {"config": "{}"})


@pytest.mark.parametrize("is_graph_mended", [False, True])
async def test_a_graph_that_no_longer_fits_its_model_says_both_signatures(
    tmp_path: Path, target: FakeTarget, is_graph_mended: bool
) -> None:
    """FAILED_PRECONDITION, as no second try helps; it is back when the model fits again, or a graph that fits it."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["pipe"]) as s:
        await s.core.infer(make.request(), CallContext())
        make.serve(target, "double", dims=3)
        await s.core.refresh("model")
        was, now = (f"X FP32 [-1,{size}] -> Y FP32 [-1,{size}] on target 'model'" for size in (2, 3))
        with pytest.raises(FailedPreconditionError) as caught:
            await s.core.infer(make.request(), CallContext())
        assert f"model 'double' was {was}, and now it is {now}; it serves again" in str(caught.value)
        if is_graph_mended:
            make.write(tmp_path, make.PIPE.replace("dims: 2", "dims: 3").replace("dims: [ 2 ]", "dims: [ 3 ]"))
            await s.core.load("pipe", {})
        else:
            make.serve(target, "double")
            await s.refresh(lambda: s.core.is_model_ready("pipe", ""))
        assert s.core.is_model_ready("pipe", "")


ROLLBACK = {"rollback": True}


async def test_the_default_is_the_highest_version_that_is_ready(tmp_path: Path, target: FakeTarget) -> None:
    """It follows the models of the versions, up and down; without any it is the highest."""
    make.serve(target, "double", "twice")
    make.write(tmp_path, named("a"))
    make.write(tmp_path, named("b", double="twice"), version="2")
    async with make.started(tmp_path, target) as s:
        assert "b/2" == await answered_by(s.core)
        models = list(target.models)
        target.models = [models[0], models[1]._replace(is_ready=False)]
        await s.refresh(lambda: not s.core.is_model_ready("pipe", "2"))
        assert "a/1" == await answered_by(s.core)
        target.models = [model._replace(is_ready=False) for model in models]
        await s.refresh(lambda: not s.core.is_model_ready("pipe", ""))
        assert "2" == s.core._graphs.find("pipe", "").file.version
        target.models = models
        await s.refresh(lambda: s.core.is_model_ready("pipe", "2"))
        assert "b/2" == await answered_by(s.core)


async def test_a_new_version_of_a_file_waits_for_its_models(tmp_path: Path, target: FakeTarget) -> None:
    """What serves goes on until they are ready; then the new one takes over without being asked again."""
    make.serve(target, "double", "twice")
    target.models[1] = target.models[1]._replace(is_ready=False)
    make.write(tmp_path, named("a"))
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        make.write(tmp_path, named("b", double="twice"))
        with pytest.raises(UnavailableError, match="model 'twice' on target 'model' is not ready"):
            await s.core.load("pipe", {})
        assert "a/1" == await answered_by(s.core)
        state, reason = index_of(s.core)["1"]
        assert "READY" == state
        told = r"reload failed: step 'root/b': model 'twice' on target 'model' is not ready since 20\S+"
        assert re.fullmatch(told, reason), reason
        make.serve(target, "double", "twice")
        await s.refresh(lambda: index_of(s.core)["1"] == ("READY", ""))
        assert "b/1" == await answered_by(s.core)


async def test_a_change_that_failed_does_not_hurt_what_serves_when_models_change(
    tmp_path: Path, target: FakeTarget
) -> None:
    """The old file is compiled anew for the changed model while the new one waits for another."""
    make.write(tmp_path, named("a"))
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        make.write(tmp_path, named("b", double="nobody"))
        with pytest.raises(InvalidArgumentError):
            await s.core.load("pipe", {})
        double = target.models[0].signature
        wide = dataclasses.replace(double, max_batch_size=8)
        target.models[0] = target.models[0]._replace(signature=wide)
        serving = s.core._graphs.find("pipe", "").serving
        await s.refresh(lambda: s.core._graphs.find("pipe", "").serving is not serving)
        assert "a/1" == await answered_by(s.core)
        assert "unknown model 'nobody'" in index_of(s.core)["1"][1]


OUTER = """
name: "outer" platform: "graph" max_batch_size: 4
input  [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Z" data_type: TYPE_FP32 dims: [ 2 ] } ]
node { name: "root" sequence { step { name: "in" graph: "pipe" } } }
"""


async def inner_step(core: Any) -> str:
    """First step of the pipe inside the outer graph."""
    context = CallContext()
    await core.infer(make.request("outer"), context)
    return dict(context.trailing_metadata)["x-graph-path"].removeprefix("root.in=root(").partition(";")[0]


async def test_graphs_that_contain_a_graph_follow_what_serves(tmp_path: Path, target: FakeTarget) -> None:
    """A changed file counts when it is loaded, not before; a bad one and a rollback reach them as they reach it."""
    make.write(tmp_path, named("a"))
    make.write(tmp_path, OUTER, "outer")
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        assert "a" == await inner_step(s.core)
        make.write(tmp_path, named("b"))
        await s.core.load("outer", {})
        assert "a" == await inner_step(s.core)
        await s.core.load("pipe", {})
        assert "b" == await inner_step(s.core)
        make.write(tmp_path, "nonsense {")
        with pytest.raises(InvalidArgumentError):
            await s.core.load("pipe", {})
        await s.core.load("outer", {})
        assert "b" == await inner_step(s.core)
        await s.core.load("pipe", ROLLBACK)
        assert "a" == await inner_step(s.core)


async def test_graphs_are_loaded_whatever_their_order(tmp_path: Path, target: FakeTarget) -> None:
    """One that contains a graph which appears with it, and one whose graph appears later."""
    make.write(tmp_path, OUTER.replace('"outer"', '"a_outer"'), "a_outer")
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        assert "unknown graph 'pipe'" in index_of(s.core, "a_outer")["1"][1]
        make.write(tmp_path, named("a"))
        await s.core.load("pipe", {})
        await s.core.load("a_outer", {})
        assert s.core.is_ready()


async def test_a_graph_named_like_its_missing_model_says_so(tmp_path: Path, target: FakeTarget) -> None:
    """It is no cycle: a graph may be called like the model that it wraps."""
    make.write(tmp_path, make.PIPE.replace('"double"', '"pipe"'))
    async with make.started(tmp_path, target) as s:
        state, reason = index_of(s.core)["1"]
        assert "UNAVAILABLE" == state
        assert "unknown model 'pipe'; the graph cannot call itself" in reason
        assert "cycle" not in reason
        make.serve(target, "double", "pipe")
        await s.refresh(s.core.is_ready)


async def test_a_soft_step_a_fallback_and_a_shadow_do_not_keep_a_graph_from_serving(
    tmp_path: Path, target: FakeTarget
) -> None:
    """Their models may be lost while the graph is ready."""
    make.serve(target, "double", "spare", "copy")
    text = make.PIPE.replace(
        'step { name: "two" model_name: "double"',
        'step { name: "copy" model_name: "copy" shadow { percent: 50 } }\n'
        '  step { name: "two" model_name: "double" fallback { model_name: "spare" '
        'input_map { key: "X" value: "M" } output_map { key: "Y" value: "Z" } }',
    )
    make.write(tmp_path, text)
    async with make.started(tmp_path, target) as s:
        assert s.core.is_ready(), index_of(s.core)
        target.models = [model._replace(is_ready=model.signature.name == "double") for model in target.models]
        await s.refresh(lambda: not s.core.is_model_ready("copy", ""))
        assert s.core.is_ready()


async def test_a_compiled_graph_is_compiled_once(
    tmp_path: Path, target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its warnings come from the same compilation; loading the same file again compiles nothing."""
    from weft.router.repository import serving

    compiled = []
    compile_with_warnings = serving.compile_with_warnings  # type: ignore[attr-defined]

    def counting(source: Any, *arguments: Any) -> Any:
        compiled.append(source)
        return compile_with_warnings(source, *arguments)

    monkeypatch.setattr(serving, "compile_with_warnings", counting)
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        await s.core.load("pipe", {})
        assert 1 == len(compiled)


async def test_the_index_says_what_is_left_out(tmp_path: Path, target: FakeTarget) -> None:
    """Without a version; a folder without a graph hides no model of its name, and who loads it is told."""
    make.write(tmp_path, make.PIPE)
    make.write(tmp_path, make.PIPE, version="02")
    make.write(tmp_path, make.PIPE, "double", version="v1")
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["pipe"]) as s:
        states = {(entry.name, entry.version): (entry.state, entry.reason) for entry in s.core.index(ready_only=False)}
        why = "the folder is no version, which is a whole number from 1 without leading zeros"
        assert {
            ("pipe", "1"): ("READY", ""),
            ("pipe", ""): ("UNAVAILABLE", f"'02/graph.pbtxt': {why}"),
            ("double", ""): ("UNAVAILABLE", f"'v1/graph.pbtxt': {why}"),
            ("double", "1"): ("READY", ""),
        } == states
        with pytest.raises(
            NotFoundError, match=r"failed to load 'double', failed to poll .*; 'v1/graph.pbtxt': the fol"
        ):
            await s.core.load("double", {})
        shutil.rmtree(tmp_path / "pipe/02")
        await s.core.load("pipe", {})
        assert {"1": ("READY", "")} == index_of(s.core)


async def test_a_folder_that_cannot_be_read_is_not_loaded(
    tmp_path: Path, target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other versions are not taken for all that there is; without a repository the router does not start."""
    make.write(tmp_path, named("a"))
    make.write(tmp_path, named("b"), version="2")
    stat = Path.stat

    def guarded(path: Path, **options: bool) -> Any:
        if path.parent == tmp_path / "pipe/2":
            raise PermissionError(13, "Permission denied")
        return stat(path, **options)

    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["pipe"]) as s:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", guarded)
            with pytest.raises(
                UnavailableError, match=r"load 'pipe': '2/graph.pbtxt' cannot be read: Permission denied"
            ):
                await s.core.load("pipe", {})
        assert "b/2" == await answered_by(s.core)
    with pytest.raises(UnavailableError, match=r"the graph repository cannot be read: .*No such file"):
        async with make.started(tmp_path / "nowhere", target):
            pass
    with pytest.raises(NotFoundError, match="failed to load 'nobody'"):
        async with make.started(tmp_path, target, model_control="explicit", load_graphs=["pipe", "nobody"]):
            pass


async def test_a_load_goes_on_when_its_client_is_gone(
    tmp_path: Path, target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is never left half loaded; when the router closes, nothing is left."""
    make.write(tmp_path, named("a"))
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        make.write(tmp_path, named("b"))
        make.write(tmp_path, named("c"), version="2")
        is_reached, release = asyncio.Event(), asyncio.Event()
        read = GraphLifecycle._read

        async def slow(loader: GraphLifecycle, file: VersionFile) -> Any:
            if file.version == "2":
                is_reached.set()
                await release.wait()
            return await read(loader, file)

        monkeypatch.setattr(GraphLifecycle, "_read", slow)
        client = asyncio.create_task(s.core.load("pipe", {}))
        await is_reached.wait()
        client.cancel()
        await asyncio.wait((client,))
        release.set()
        await s.core.load("pipe", {})
        assert "c/2" == await answered_by(s.core)
        await s.core.load("pipe", ROLLBACK)
        assert "a/1" == await answered_by(s.core)
        is_reached.clear()
        release.clear()
        client = asyncio.create_task(s.core.load("pipe", {}))
        await is_reached.wait()
    assert isinstance((await asyncio.gather(client, return_exceptions=True))[0], asyncio.CancelledError)
    assert 0 == make.num_other_tasks()


DEGRADABLE = """
name: "pipe" platform: "graph" max_batch_size: 4
input  [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Z" data_type: TYPE_FP32 dims: [ 2 ] } ]
node { name: "root" sequence {
  step { name: "a" model_name: "double" output_map { key: "Y" value: "Z" }
         fallback { model_name: "twice" output_map { key: "Y" value: "Z" } } } } }
"""


async def test_a_graph_that_can_do_without_a_model_is_degraded(tmp_path: Path, target: FakeTarget) -> None:
    """It stays READY; the index says which step lacks which model since when, and a metric counts it."""
    make.serve(target, "double", "twice")
    make.write(tmp_path, DEGRADABLE)

    def degraded(core: Any) -> float:
        (family,) = (f for c in core.extension().collectors for f in c.collect() if f.name == "weft_graph_degraded")
        (sample,) = family.samples
        return sample.value

    async with make.started(tmp_path, target) as s:
        assert (("READY", ""), 0.0) == (index_of(s.core)["1"], degraded(s.core))
        target.models[0] = target.models[0]._replace(is_ready=False, reason="no file")
        await s.refresh(lambda: index_of(s.core)["1"] != ("READY", ""))
        state, reason = index_of(s.core)["1"]
        told = r"degraded: step 'root/a': model 'double' on target 'model' is not ready since 20\S+: no file"
        assert re.fullmatch(told, reason), reason
        assert ("READY", True, 1.0) == (state, s.core.is_model_ready("pipe", ""), degraded(s.core))
        make.serve(target, "double", "twice")
        await s.refresh(lambda: index_of(s.core)["1"] == ("READY", ""))
        assert 0.0 == degraded(s.core)
