"""What the router knows of its targets: found at the start, lost, found again.

Each line of a case in catalog.txt is one of

- ``NAME has m@3:8 n-``: its models, with a version and a maximum batch size, not ready; ``NAME is gone``, and
  ``NAME fails CODE``, which calls of it do from then on;
- ``start NAME ...``: the catalog of these targets, which polls once an hour;
- ``wake NAME``: it is asked now, within a second; ``later S``: so many seconds; ``call NAME MODEL[@VERSION] [rows=N]``;
- ``find MODEL [VERSION]``: its target and version; ``names``: those of all models, and of targets that do not answer;
  ``counters``: of each model version.
"""

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.case_files import Case, cases
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, failing
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext, InferCall
from weft.base.errors import RemoteError
from weft.language import GraphSource
from weft.router.compile import check_graph
from weft.router.target import Target, TargetModel
from weft.router.targets.catalog import FIRST_BACKOFF_S, TargetCatalog
from weft.router.targets.replicas import Health, MembershipSettings, OnHealth
from weft.router.targets.replicated import ReplicatedTarget
from weft.router.targets.specification import BalancingPolicy

FOR_EVER_S = 3_600.0
GONE = RemoteError("UNAVAILABLE", "cannot be reached")


@dataclass
class StartedCatalog:
    """A running catalog; `until` waits for a change after which a claim holds."""

    catalog: TargetCatalog
    until: Callable[[Callable[[], bool]], Awaitable[None]]


@asynccontextmanager
async def started(*targets: Any, poll_s: float = FOR_EVER_S) -> AsyncIterator[StartedCatalog]:
    """A catalog that polls once an hour."""
    changed = asyncio.Event()
    catalog = TargetCatalog(targets, poll_s=poll_s, on_change=changed.set)
    await catalog.start()

    async def until(claim: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not claim():
                changed.clear()
                await changed.wait()

    try:
        yield StartedCatalog(catalog, until)
    finally:
        await catalog.close()


def serving(target: FakeTarget, *models: str, version: str = "1", is_ready: bool = True) -> None:
    target.models = [TargetModel(make.signature(model, version=version), is_ready) for model in models]


class Script:
    """Targets by name, and what comes of lines."""

    def __init__(self) -> None:
        self.fakes: dict[str, FakeTarget] = defaultdict(FakeTarget)
        self.catalog: Any = None

    async def told(self, subject: str, *words: str) -> str:
        """What comes of a line."""
        if subject == "start":
            for name in words:
                self.fakes[name].name = name
            self.catalog = TargetCatalog([self.fakes[name] for name in words], poll_s=FOR_EVER_S)
            await self.catalog.start()
        elif subject == "wake":
            self.catalog.wake(words[0])
            await asyncio.sleep(1)
        elif subject == "later":
            await asyncio.sleep(float(words[0]))
        elif subject in ("find", "names", "counters", "call"):
            return str(await getattr(self, subject)(*words))
        elif words[0] == "has":
            self.fakes[subject].models = [self._model(word) for word in words[1:]]
        elif words[0] == "is":
            self.fakes[subject].models = GONE
        else:
            self.fakes[subject].answers = defaultdict(lambda: failing(words[1]), bad=failing(words[1]))
        return ""

    def _model(self, word: str) -> TargetModel:
        name, version, batch, lacks = re.fullmatch(r"(\w+)(?:@(-?[^:-]+))?(?::(\d))?(-?)", word).groups()  # type: ignore[union-attr]
        return TargetModel(make.signature(name, version=version or "1", max_batch_size=int(batch or 0)), not lacks)

    async def find(self, name: str, version: str = "") -> str:
        """Where a model is."""
        found = self.catalog.find(name, version)
        if found is None:
            return "nowhere"
        target, signature = found
        return (
            f"{target} {signature.version}{'' if self.catalog.entry(name, version).model.is_ready else ', not ready'}"
        )

    async def names(self) -> str:
        """Of all models."""
        return " ".join([*self.catalog.names(), *(f"({one} is gone)" for one in self.catalog.unreachable)])

    async def counters(self) -> str:
        """Of all model versions."""
        told = []
        for (name, version), one in self.catalog.statistics.items():
            counts = (one.success.count, one.queue.count, one.execution_count, one.inference_count, one.fail.count)
            told.append(f"{name}/{version} {' '.join(map(str, counts))} {one.failures_by_reason or ''}".rstrip())
            assert one.success.total_ns == one.compute_infer.total_ns
            assert (one.success.total_ns > 0) == (one.success.count > 0)
        return ", ".join(told)

    async def call(self, target: str, model: str, rows: str = "rows=1") -> str:
        """A call of a target, which is gone if that is what it is."""
        count = int(rows.removeprefix("rows="))
        if self.fakes[target].models is GONE:
            self.fakes[target].answers[model] = failing()
        name, _, version = model.partition("@")
        inputs = {"IN": make.tensor(*range(count), shape=(count, 1))}
        call = InferCall(name, version, inputs=inputs, num_rows=count)
        try:
            await self.catalog.targets[target].infer(call, CallContext())
        except RemoteError as error:
            return error.code
        finally:
            await asyncio.sleep(1)
        return "OK"


@cases(Path(__file__).with_name("catalog.txt"))
async def test_a_script(case: Case, virtual_clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    """What is known of targets, and counted, is what is written down."""
    script = Script()
    told = [(line, await script.told(*line.split())) for line in case.lines]
    await script.catalog.close()
    lines = [f"{line}: {text}" for line, text in told if text]
    case.check("\n".join([*lines, *(f"log {r.message}" for r in caplog.records if r.levelno == logging.WARNING)]))


async def test_a_replica_that_comes_back_ends_the_pause() -> None:
    """While all were lost the pause between two questions has grown; nobody waits for its end."""
    tells: list[OnHealth] = []

    async def watch(target: Target, tell: OnHealth) -> None:
        tells.append(tell)
        await asyncio.Event().wait()

    async def resolve() -> list[str]:
        return ["a:1"]

    fake = FakeTarget("a:1")
    target = ReplicatedTarget(
        "model", "a:1", BalancingPolicy(), MembershipSettings(resolve, True, lambda address: fake, watch)
    )
    fake.models = GONE
    async with started(target) as s:
        s.catalog.targets["model"].backoff_s = FOR_EVER_S
        await asyncio.sleep(2 * FIRST_BACKOFF_S)
        serving(fake, "m")
        for health in (Health.UNREACHABLE, Health.SERVING):
            tells[0](health)
        await s.until(lambda: s.catalog.find("m", "") is not None)


async def test_a_graph_over_a_model_that_could_not_be_loaded_says_why() -> None:
    """The target's own words stand where the file names the model; a model that nobody lists is unknown."""
    target = FakeTarget()
    target.models = [TargetModel.undescribed("broken", "1", "UNAVAILABLE", "model.onnx is no ONNX file")]
    text = """name: "g" platform: "graph" input { name: "X" data_type: TYPE_FP32 dims: 1 }
    node { name: "root" sequence { step { model_name: "broken" } step { model_name: "other" } } }"""
    async with started(target) as s:
        found = [d.message for d in check_graph(GraphSource(text, "g"), s.catalog) if d.code == "G002"]
    assert [
        "model 'broken' is not ready: model.onnx is no ONNX file",
        "unknown model 'other'; use one of: broken",
    ] == found


async def test_a_cancelled_call_is_counted_as_cancelled() -> None:
    """The counter is CANCELED, as Triton Inference Server spells it."""
    is_called = asyncio.Event()

    async def never(call: InferCall, context: CallContext) -> dict[str, Any]:
        is_called.set()
        await asyncio.Event().wait()
        return {}

    target = FakeTarget(m=never)
    serving(target, "m")
    async with started(target) as s:
        call = asyncio.create_task(s.catalog.targets["model"].infer(InferCall("m"), CallContext()))
        await is_called.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert {"CANCELED": 1} == s.catalog.statistics["m", "1"].failures_by_reason


async def test_closing_leaves_no_task_and_closes_the_targets() -> None:
    """Pollers end with the catalog."""
    target = FakeTarget()
    async with started(target):
        assert 1 == make.num_other_tasks()
    assert 0 == make.num_other_tasks()
    assert target.is_closed
