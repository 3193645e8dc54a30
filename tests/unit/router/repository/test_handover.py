"""A router that starts beside another one takes its graphs over."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.pipes import answered_by, index_of, named

from weft.base.errors import InvalidArgumentError, UnavailableError
from weft.router.core import RouterCore
from weft.router.repository.handover import state_of, take_over

ROLLBACK = {"rollback": True}


class LateCore(RouterCore):
    """A router that takes over the state of another one at its start."""

    state: Any = None

    async def _load_at_start(self) -> None:
        await take_over(self.state, self._graphs, self._lifecycle)


@asynccontextmanager
async def beside(core: RouterCore, root: Path, target: FakeTarget) -> AsyncIterator[RouterCore]:
    """A router with what another one has now, passed on as text."""
    late = LateCore(root, [target], poll_s=3_600.0, model_control="explicit")
    late.state = json.loads(json.dumps(state_of(core._graphs, core._lifecycle)))
    await late.start()
    try:
        yield late
    finally:
        await late.close(grace_s=0)


async def test_it_serves_what_the_other_serves(tmp_path: Path, target: FakeTarget) -> None:
    """Versions, states and reasons are the same, whatever the files say now; a rollback leads to the same graphs."""
    make.write(tmp_path, named("a"))
    make.write(tmp_path, named("b"), version="2")
    make.write(tmp_path, make.PIPE.replace('"pipe"', '"other"'), name="other")
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        make.write(tmp_path, named("c"))
        await s.core.load("pipe", {})
        await s.core.unload("other", unload_dependents=False)
        make.write(tmp_path, named("d"))
        shutil.rmtree(tmp_path / "pipe/2")
        async with beside(s.core, tmp_path, target) as late:
            assert ["c/1", "b/2"] == [await answered_by(late, version=version) for version in ("1", "2")]
            assert s.core.index(ready_only=False) == late.index(ready_only=False)
            assert late.is_ready()
            with pytest.raises(UnavailableError, match="unloaded"):
                await late.infer(make.request("other"), make.CallContext())
            await late.load("pipe", ROLLBACK)
            assert "a/1" == await answered_by(late, version="1")
            await late.load("pipe", {})
            assert "d/1" == await answered_by(late)


async def test_what_the_other_could_not_load_is_tried_again(tmp_path: Path, target: FakeTarget) -> None:
    """A change that waits for a model waits here too, while what was loaded before serves."""
    make.write(tmp_path, named("a"))
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        make.write(tmp_path, named("b", double="twice"))
        with pytest.raises(InvalidArgumentError, match="unknown model 'twice'"):
            await s.core.load("pipe", {})
        async with beside(s.core, tmp_path, target) as late:
            assert "a/1" == await answered_by(late)
            assert index_of(s.core) == index_of(late)
            make.serve(target, "double", "twice")
            await late.refresh(target.name)
            await late._lifecycle.recheck()
            assert "b/1" == await answered_by(late)


async def test_what_fits_no_longer_is_no_reason_to_fail(tmp_path: Path, target: FakeTarget) -> None:
    """A graph to go back to whose model is gone is left out; a graph that serves waits for its model."""
    make.serve(target, "double", "twice")
    make.write(tmp_path, named("a", double="twice"))
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        make.write(tmp_path, named("b"))
        await s.core.load("pipe", {})
        make.serve(target, "double")
        async with beside(s.core, tmp_path, target) as late:
            assert "b/1" == await answered_by(late)
            with pytest.raises(InvalidArgumentError, match="nothing to roll back to"):
                await late.load("pipe", ROLLBACK)
