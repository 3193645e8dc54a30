"""Load, reload and unload of graphs."""

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from weft_common.core import CallContext, InferCall
from weft_common.errors import (
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)


async def test_load_and_unload_need_explicit_control(tmp_path: Path, make: SimpleNamespace, target: object) -> None:
    """Otherwise both are refused with Triton's words."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target) as s:
        with pytest.raises(UnavailableError, match="explicit model load / unload is not allowed"):
            await s.core.load("pipe", {})
        with pytest.raises(UnavailableError, match="explicit model load / unload is not allowed"):
            await s.core.unload("pipe", unload_dependents=False)


async def test_explicit_control_loads_reloads_and_unloads(
    tmp_path: Path, make: SimpleNamespace, target: object
) -> None:
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


async def test_a_reload_that_fails_keeps_what_serves(tmp_path: Path, make: SimpleNamespace, target: object) -> None:
    """The caller gets the diagnostics; requests go on, those in flight too."""
    is_called, release = asyncio.Event(), asyncio.Event()

    async def hold(call: InferCall, context: CallContext) -> dict[str, object]:
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


async def test_a_removed_version_is_gone_after_a_reload(tmp_path: Path, make: SimpleNamespace, target: object) -> None:
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
