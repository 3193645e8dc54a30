"""What served before the files of a graph changed serves again."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.pipes import answered_by, index_of, named

from weft.base.errors import (
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)

ROLLBACK = {"rollback": True}


async def test_rollback_puts_back_what_served_without_compiling(
    tmp_path: Path, target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed, new and removed versions alike; the next rollback takes it back."""
    make.write(tmp_path, named("a"))
    make.write(tmp_path, named("b"), version="2")
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        make.write(tmp_path, named("c"))
        make.write(tmp_path, named("d"), version="3")
        shutil.rmtree(tmp_path / "pipe/2")
        await s.core.load("pipe", {})
        assert ["c/1", "d/3"] == [await answered_by(s.core, version=version) for version in ("1", "")]
        monkeypatch.setattr("weft.router.repository.serving.compile_with_warnings", None)
        await s.core.load("pipe", ROLLBACK)
        assert ["a/1", "b/2"] == [await answered_by(s.core, version=version) for version in ("1", "")]
        assert {"1": ("READY", ""), "2": ("READY", ""), "3": ("UNAVAILABLE", "rolled back")} == index_of(s.core)
        assert s.core.is_ready()
        with pytest.raises(UnavailableError, match="rolled back"):
            await answered_by(s.core, version="3")
        await s.core.load("pipe", ROLLBACK)
        assert ["c/1", "d/3"] == [await answered_by(s.core, version=version) for version in ("1", "")]
        assert ("UNAVAILABLE", "rolled back") == index_of(s.core)["2"]


async def test_rollback_leads_behind_a_file_that_had_to_wait(tmp_path: Path, target: FakeTarget) -> None:
    """It took over when its model came, long after it was loaded; its version may be new, and the old one gone."""
    make.write(tmp_path, named("a"))
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        make.write(tmp_path, named("b", double="twice"))
        with pytest.raises(InvalidArgumentError, match="unknown model 'twice'"):
            await s.core.load("pipe", {})
        make.serve(target, "double", "twice")
        await s.refresh(lambda: index_of(s.core)["1"] == ("READY", ""))
        assert "b/1" == await answered_by(s.core)
        await s.core.load("pipe", ROLLBACK)
        assert "a/1" == await answered_by(s.core)
        shutil.rmtree(tmp_path / "pipe/1")
        make.write(tmp_path, named("c", double="thrice"), version="2")
        with pytest.raises(InvalidArgumentError, match="unknown model 'thrice'"):
            await s.core.load("pipe", {})
        make.serve(target, "double", "twice", "thrice")
        await s.refresh(lambda: index_of(s.core) == {"2": ("READY", "")})
        await s.core.load("pipe", ROLLBACK)
        assert "a/1" == await answered_by(s.core)


async def test_a_graph_that_was_removed_can_be_put_back(tmp_path: Path, target: FakeTarget) -> None:
    """Its folder is gone, by mistake."""
    make.write(tmp_path, named("a"))
    async with make.started(tmp_path, target, model_control="poll") as s:
        shutil.rmtree(tmp_path / "pipe")
        await s.core._watcher.look()
        assert {} == index_of(s.core)
        await s.core.load("pipe", ROLLBACK)
        assert "a/1" == await answered_by(s.core)


async def test_rollback_leads_past_what_changed_nothing(tmp_path: Path, target: FakeTarget) -> None:
    """Neither a file that failed to load nor one that is the same is a change to go back behind."""
    make.write(tmp_path, named("a"))
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        with pytest.raises(InvalidArgumentError, match="nothing to roll back to: its files have not changed"):
            await s.core.load("pipe", ROLLBACK)
        make.write(tmp_path, named("b"))
        await s.core.load("pipe", {})
        await s.core.load("pipe", {})
        make.write(tmp_path, "nonsense {")
        with pytest.raises(InvalidArgumentError):
            await s.core.load("pipe", {})
        await s.core.load("pipe", ROLLBACK)
        assert "a/1" == await answered_by(s.core)
        assert ("READY", "") == index_of(s.core)["1"]


async def test_rollback_is_refused_where_it_would_break(tmp_path: Path, target: FakeTarget) -> None:
    """The model of what served before has changed or is lost; what serves goes on."""
    make.serve(target, "double", "twice")
    make.write(tmp_path, named("a", double="twice"))
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        make.write(tmp_path, named("b"))
        await s.core.load("pipe", {})
        twice = target.models[1]
        target.models[1] = twice._replace(is_ready=False)
        await s.refresh(lambda: not s.core.is_model_ready("twice", ""))
        with pytest.raises(
            UnavailableError, match="cannot be rolled back: step 'root/a': model 'twice' on target 'model' is not ready"
        ):
            await s.core.load("pipe", ROLLBACK)
        narrow = dataclasses.replace(twice.signature, inputs=(make.spec("X", "INT8", (2,)),))
        target.models[1] = twice._replace(signature=narrow)
        await s.refresh(lambda: s.core.is_model_ready("twice", ""))
        with pytest.raises(InvalidArgumentError, match="inconsistent data type"):
            await s.core.load("pipe", ROLLBACK)
        assert "b/1" == await answered_by(s.core)
        for parameters, error in (
            ({"rollback": "yes"}, InvalidArgumentError),
            ({**ROLLBACK, "x": 1}, UnsupportedError),
        ):
            with pytest.raises(error):
                await s.core.load("pipe", parameters)
        with pytest.raises(NotFoundError, match="unknown model: 'nobody'"):
            await s.core.load("nobody", ROLLBACK)


async def test_rollback_compiles_anew_where_a_model_has_changed(tmp_path: Path, target: FakeTarget) -> None:
    """What it was compiled with is not what is there, but it still fits."""
    make.write(tmp_path, named("a"))
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        make.write(tmp_path, named("b"))
        await s.core.load("pipe", {})
        double = target.models[0].signature
        wide = dataclasses.replace(double, max_batch_size=8)
        target.models[0] = target.models[0]._replace(signature=wide)
        await s.refresh(lambda: s.core.signature("double", "").max_batch_size == 8)
        await s.core.load("pipe", ROLLBACK)
        assert "a/1" == await answered_by(s.core)
        serving = s.core._graphs.find("pipe", "").serving
        assert {8} == {call.signature.max_batch_size for call in serving.calls}


async def test_an_unloaded_graph_has_nothing_to_go_back_to(tmp_path: Path, target: FakeTarget) -> None:
    """Unload lets everything go."""
    make.write(tmp_path, named("a"))
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        make.write(tmp_path, named("b"))
        await s.core.load("pipe", {})
        await s.core.unload("pipe", unload_dependents=False)
        with pytest.raises(InvalidArgumentError, match="nothing to roll back to"):
            await s.core.load("pipe", ROLLBACK)
