"""Repositories whose models are loaded, replaced, polled, unloaded and asked: cases in ``timelines/cores.txt``."""

import asyncio
import re
import shutil
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.case_files import Case, cases, literals
from tests.unit.serving.core.conftest import Add, Gate, Repository

from weft.base.errors import WeftError
from weft.serving import core as serving_core
from weft.serving.lifecycle.warm_pool import WarmLimits

TIMEOUT_S = 10.0


class Timeline:
    """A repository with its core, and what goes on."""

    def __init__(self, repository: Repository, gate: Gate, case: Case) -> None:
        self.repository, self.gate = repository, gate
        options = literals(case.option("serve"))
        if any(name == "on_demand" for name, _ in case.options):
            options["on_demand"] = WarmLimits(**literals(case.option("on_demand")))
        options |= {"load_models": (), "repository_poll_s": 0.01} if options.get("model_control") == "poll" else {}
        backends: dict[str, type[Add]] = {"": Add, "none": gate.on_run(), "run": gate.on_run(), "load": gate.on_load()}
        self.core = repository.core(backends[case.option("gate")], **{"load_models": ["*"], **options})
        self.tasks: dict[str, asyncio.Task[Any]] = {}

    async def run(self, line: str) -> list[str]:
        """What the commands of a line say."""
        if line.startswith("write "):
            return [each async for each in self.write(line)]
        said: list[str] = []
        for command in line.split(", "):
            name, *words = command.split()
            async with asyncio.timeout(TIMEOUT_S):
                if name.startswith("&"):
                    self.tasks[name[1:]] = asyncio.create_task(self._all(name[1:].rstrip("2"), words))
                    await asyncio.sleep(0)
                else:
                    said += await self._all(name, words)
        said = [re.sub("UNLOADING$", "UNAVAILABLE", each) for each in said]  # which of them is a matter of time
        return [each.replace(f"{self.repository.root}/", "") for each in said]

    async def _all(self, name: str, words: list[str]) -> list[str]:
        try:
            said = getattr(self, name)(*words)
            return [each async for each in said] if hasattr(said, "__aiter__") else await said or []
        except WeftError as error:
            return [f"{name} {' '.join(words)}: {type(error).__name__}: {error.message.partition(chr(10))[0]}"]

    async def write(self, line: str) -> AsyncIterator[str]:
        head, _, config = line.partition(" | ")
        _, name, *versions = head.split()
        base = re.sub("backend: .*\n", "", self.repository.CONFIG) if "backend:" in config else self.repository.CONFIG
        values = dict(each.split("=") for each in versions)
        self.repository.write(name, {int(version): value for version, value in values.items()}, base + config)
        return
        yield

    async def remove(self, name: str) -> None:
        shutil.rmtree(self.repository.root / name)

    def serve(self) -> Coroutine[Any, Any, None]:
        return self.core.start()

    async def ask(self, name: str, version: str = "") -> AsyncIterator[str]:
        deadline_ns = None
        if version.startswith("deadline_ms="):
            deadline_ns, version = time.monotonic_ns() + int(version.partition("=")[2]) * 1_000_000, ""
        yield f"{name} says {await self.repository.infer(self.core, name, version, deadline_ns=deadline_ns):g}"

    async def describe(self, name: str, version: str = "") -> AsyncIterator[str]:
        place = f"{name} {version}".strip()
        for what in ("signature", "config", "is_model_ready"):
            try:
                found: Any = getattr(self.core, what)(name, version)
            except WeftError as error:
                yield f"{place} {what}: {type(error).__name__}: {error.message}"
                continue
            if what == "config":
                groups = ", ".join(f"{group.count} of {group.name}" for group in found.instance_group)
                found = f"{found.name}, {found.backend}, batches of {found.max_batch_size}, instances {groups}"
            yield f"{place} {what}: " + (f"version {found.version}" if what == "signature" else str(found))

    def load(self, name: str) -> Coroutine[Any, Any, None]:
        return self.core.load(name, {})

    def unload(self, name: str) -> Coroutine[Any, Any, None]:
        return self.core.unload(name, unload_dependents=False)

    def close(self, grace_s: str) -> Coroutine[Any, Any, None]:
        return self.core.close(grace_s=float(grace_s))

    async def entered(self) -> None:
        await self.gate.has_entered()

    async def open(self) -> None:
        self.gate.is_open.set()

    async def pending(self, name: str) -> AsyncIterator[str]:
        await asyncio.wait([self.tasks[name]], timeout=0.1)
        yield f"{name} " + ("is done" if self.tasks[name].done() else "goes on")

    async def done(self, name: str) -> AsyncIterator[str]:
        try:
            for each in await self.tasks[name] or [f"{name} is done"]:
                yield each
        except asyncio.CancelledError:
            yield f"{name} was cancelled"

    async def index(self) -> AsyncIterator[str]:
        for name, version, state, reason in self.core.index(ready_only=False):
            yield f"{name} {version or '-'} {state or '-'} {reason.partition(chr(10))[0]}".rstrip()

    async def ready(self) -> AsyncIterator[str]:
        yield "ready" if self.core.is_ready() else "not ready"

    async def counts(self, name: str = "", version: str = "") -> AsyncIterator[str]:
        for counts in self.core.statistics(name, version):
            yield f"{counts.name} {counts.version}: {counts.success.count} answered, {counts.fail.count} failed"

    async def warm(self) -> AsyncIterator[str]:
        for family in self.core.extension().collectors[-1].collect():
            for sample in family.samples:
                if sample.value and not sample.name.endswith(("_sum", "_bucket", "_created")):
                    yield f"{sample.name} {' '.join(sample.labels.values())} {sample.value:g}".replace("  ", " ")

    async def closed(self) -> AsyncIterator[str]:
        yield f"{self.gate.num_closed} closed"

    async def inside(self) -> AsyncIterator[str]:
        yield f"at most {self.gate.most_inside} at once"

    async def until(self, name: str, version: str, state: str) -> None:
        while not any(  # noqa: ASYNC110  # the index tells nobody
            (name, version) == entry[:2] and state in f"{entry.state} {entry.reason}"
            for entry in self.core.index(ready_only=False)
        ):
            await asyncio.sleep(0.005)

    async def becomes(self, name: str, value: str) -> None:
        while await self.repository.infer(self.core, name) != float(value):  # noqa: ASYNC110  # a reload tells nobody
            await asyncio.sleep(0.005)


@cases(Path(__file__).parents[1] / "timelines" / "cores.txt")
async def test_timeline(repository: Repository, gate: Gate, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Models are served, replaced, given up and described as the case says."""
    monkeypatch.setattr(serving_core, "SETTLE_S", 0.0)
    timeline = Timeline(repository, gate, case)
    if case.option("gate") == "none":
        gate.is_open.set()
    said = [await timeline.run(line) for line in case.text.split("\n")]
    gate.is_open.set()
    await asyncio.gather(*timeline.tasks.values(), return_exceptions=True)
    case.check_script(lambda line: said.pop(0))
