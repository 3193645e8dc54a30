"""Which models are loaded when they load on demand."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

from tests.case_files import Case, cases, literals

from weft.base.errors import UnavailableError
from weft.base.signature import ModelSignature
from weft.serving.lifecycle.warm_pool import WarmLimits, WarmPool


class Model:
    """A model whose loads and unloads a test can hold or let fail; it tells of them."""

    def __init__(self, name: str, size: int = 10, told: list[str] | None = None) -> None:
        self.signature = ModelSignature(name, "1", "p", 0, (), ())
        self.size, self.told = size, [] if told is None else told
        self.fails = self.is_loaded = self.is_held = False
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def num_bytes(self) -> int:
        """As made."""
        return self.size

    async def warm(self) -> None:
        """Load, or fail."""
        self.told.append(f"{self.signature.name} loads")
        await self.may_go_on.wait()
        if self.fails:
            raise UnavailableError("no file")
        self.is_loaded = True

    async def cool(self) -> None:
        """Unload."""
        self.told.append(f"{self.signature.name} unloads")
        await self.may_go_on.wait()
        self.is_loaded = False


class Scene:
    """A pool, and what happens to it."""

    def __init__(self, limits: str) -> None:
        self.now_s = 0.0
        self.pool = WarmPool(WarmLimits(**literals(limits)), lambda: self.now_s)
        self.told: list[str] = []
        sizes = {"a": 10, "b": 10, "c": 25, "g": 99}
        self.models = {name: Model(name, size, self.told) for name, size in sizes.items()}
        self.requests: dict[str, list[asyncio.Task[None]]] = {name: [] for name in self.models}
        self.tasks: list[asyncio.Task[None]] = []

    async def request(self, name: str) -> None:
        """A request that comes, up to where its model is loaded."""
        try:
            await self.pool.enter(self.models[name])
        except UnavailableError as error:
            self.told.append(f"refused: {error.message}")
        else:
            self.told.append(f"{name} is used" if self.models[name].is_loaded else f"{name} IS NOT LOADED")

    def start(self, verb: str, what: str) -> None:
        """Begin what a line says."""
        pool, model = self.pool, self.models.get(what, self.models["a"])
        if verb == "at":
            self.now_s = float(what)
        elif verb in ("enter", "use"):
            self.now_s += verb == "use"
            self.requests[what].append(asyncio.create_task(self.request(what)))
        elif verb == "leave":
            pool.leave(model)
        elif verb == "cancel":
            self.requests[what][0].cancel()
        elif verb in ("hold", "let"):
            model.may_go_on.set() if verb == "let" else model.may_go_on.clear()
        elif verb in ("fail", "mend"):
            model.fails = verb == "fail"
        elif verb in ("idle", "remove"):
            self.tasks.append(asyncio.create_task(pool.cool_idle() if verb == "idle" else pool.remove(model)))
        elif verb == "try":
            self.told.append("entered" if pool.try_enter(model) else "not loaded")
        else:
            assert verb == "counts", verb
            self.told.append(f"{pool.num_warm} loaded, {pool.num_warm_bytes} bytes")
            for (name, _), counted in pool.cold_starts.items():
                counts = SimpleNamespace(loads=sum(counted.seconds.counts), failed=counted.num_failed)
                counts.evicted, counts.idled = counted.num_evicted, counted.num_idled
                self.told.append(" ".join([name, *(f"{key}={value}" for key, value in vars(counts).items() if value)]))

    async def play(self, lines: list[str]) -> AsyncIterator[list[str]]:
        """What came of each line, when everything that can go on has."""
        for line in lines:
            verb, _, what = line.partition(" ")
            self.start(verb, what)
            for _ in range(20):
                await asyncio.sleep(0)
            if verb == "use":
                self.pool.leave(self.models[what])
            yield [", ".join(self.told)] if self.told else []
            self.told.clear()


@cases(Path(__file__).with_name("warm_pool.txt"))
async def test_pool(case: Case) -> None:
    """Models are loaded for requests, and unloaded for others, as the case says."""
    scene = Scene(case.option("limits"))
    results = [result async for result in scene.play(case.text.split("\n"))]
    case.check_script(lambda _: results.pop(0))


async def test_many_requests_never_exceed_the_limit() -> None:
    """Two hundred requests for ten models in a pool of three: each is served, never more than three are loaded."""
    pool = WarmPool(WarmLimits(num_models=3))
    models = [Model(str(i)) for i in range(10)]
    most = 0

    async def request(i: int) -> None:
        nonlocal most
        model = models[i * 7 % 10]
        await pool.enter(model)
        most = max(most, sum(m.is_loaded for m in models))
        await asyncio.sleep(0)
        assert model.is_loaded
        pool.leave(model)

    await asyncio.wait_for(asyncio.gather(*(request(i) for i in range(200))), 10)
    assert 3 == most == pool.num_warm
