"""A router's graphs as scripts: its files, its models, what clients ask for, and what they are told.

Each line of a case in scripts/*.txt is one of the following; a line that begins with ``late`` is for the router of
``beside``.

- ``models A B:3 C/8 D-``: the models that are there, from X to Y: with 3 elements, a batch size of 8, not ready,
  because ``(reason)``;
- ``start [explicit|poll] [NAME ...]``: the router starts, and loads these graphs; ``close``;
- ``file STEP [NAME] [VERSION] [double=B] [dims=3] [cut=0.3]``: the pipe with this first step and another model, or as
  much of it as was written; with lines behind it that are indented those are the nodes of the graph;
- ``remove [PATH]``: the folder of the pipe, or another path in the repository;
- ``load NAME [rollback] [PARAMETER=VALUE]``, ``unload NAME``, ``look`` (the watcher looks at the files);
- ``ask [NAME] [VERSION]``: the first step, or path, and the version that answers; ``hold``: calls of models hang from
  now on, ``begin`` asks, and ``release`` lets it go on;
- ``index [NAME]``: states and reasons, whether the router is ready, how many graphs are degraded, failures to load;
- ``compiled``: how many graphs were compiled since; ``beside``: another router starts and takes over.

What is written: what each line of these is told, and the warnings of the log.
"""

import asyncio
import json
import re
import shutil
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.case_files import Case, cases
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.pipes import named

from weft.base.core import CallContext, InferCall
from weft.base.errors import WeftError
from weft.router.core import RouterCore
from weft.router.repository import serving
from weft.router.worker import state_of, take_over

HEADER = make.PIPE.partition("node")[0]
VERSION = re.compile(r"v?\d+")


class LateCore(RouterCore):
    """A router that takes over the state of another one at its start."""

    state: Any = None

    async def _load_at_start(self) -> None:
        await take_over(self.state, self._graphs, self._lifecycle)


class Script:
    """A repository and a target, and what clients were told so far."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target = FakeTarget()
        self.cores: dict[str, Any] = {}
        self.num_compiled = 0
        self.held, self.released = asyncio.Event(), asyncio.Event()
        self.begun: asyncio.Task[str] | None = None
        self.lines: list[str] = []
        self.stack = AsyncExitStack()
        make.serve(self.target, "double")

    async def play(self, text: str) -> None:
        """Do what the lines say; lines that are indented belong to the one before."""
        async with self.stack:
            for line, nodes in re.findall(r"^(\S.*)\n?((?: .*\n?)*)", text, re.MULTILINE):
                words = line.split()
                core = self.cores.get("late" if words[0] == "late" else "")
                words = words[1:] if words[0] == "late" else words
                told = await getattr(self, words[0])(core, words[1:], nodes)
                self.lines += [f"{line}: {told}"] if told is not None else []

    async def models(self, core: Any, words: list[str], nodes: str) -> None:
        """Other models are there, and routers have seen that."""
        found = []
        for word, reason in re.findall(r"(\S+)(?: \(([^)]*)\))?", " ".join(words)):
            name, dims, batch, lacks = re.fullmatch(r"(\w+)(?::(\d))?(?:/(\d))?(-?)", word).groups()  # type: ignore[union-attr]
            make.serve(self.target, name, dims=int(dims or 2))
            (model,) = self.target.models
            signature = replace(model.signature, max_batch_size=int(batch or 4))
            found.append(model._replace(signature=signature, is_ready=not lacks, reason=reason))
        self.target.models = found
        for one in self.cores.values():
            await one.refresh("model")
            await one._lifecycle.recheck()

    async def start(self, core: Any, words: list[str], nodes: str) -> None:
        """A router."""
        mode = [word for word in words if word in ("explicit", "poll")]
        options: dict[str, Any] = {"model_control": mode[0], "repository_poll_s": 3600.0} if mode else {}
        options |= {"load_graphs": words[1:]} if words[1:] else {}
        started = await self.stack.enter_async_context(make.started(self.root, self.target, **options))
        self.cores[""] = started.core

    async def beside(self, core: Any, words: list[str], nodes: str) -> None:
        """A second router, with what the first has now, passed on as text."""
        late = LateCore(self.root, [self.target], poll_s=3600.0, model_control="explicit")
        late.state = json.loads(json.dumps(state_of(core._graphs, core._lifecycle)))
        await late.start()
        self.stack.push_async_callback(late.close, grace_s=0)
        self.cores["late"] = late

    async def file(self, core: Any, words: list[str], nodes: str) -> None:
        """A file, or the beginning of one."""
        options = {"dims": "2", "gives": "Z", "cut": "1", "double": "double"}
        options |= dict(word.split("=") for word in words if "=" in word)
        step, *rest = [word for word in words if "=" not in word]
        version = next((word for word in rest if VERSION.fullmatch(word)), "1")
        name = next((word for word in rest if not VERSION.fullmatch(word)), "pipe")
        text = HEADER.replace("Z", options["gives"]) + nodes if nodes else named(step, double=options["double"])
        text = text.replace("dims: [ 2 ]", f"dims: [ {options['dims']} ]").replace('"pipe"', f'"{name}"', 1)
        make.write(self.root, text[: int(len(text) * float(options["cut"]))], name, version)

    async def remove(self, core: Any, words: list[str], nodes: str) -> None:
        """A folder."""
        shutil.rmtree(self.root / (words or ["pipe"])[0])

    async def look(self, core: Any, words: list[str], nodes: str) -> None:
        """The watcher looks."""

        async def settled() -> None: ...

        core._watcher.settle = settled
        await core._watcher.look()

    async def load(self, core: Any, words: list[str], nodes: str) -> str:
        """Load or go back."""
        parameters: dict[str, Any] = dict((*word.split("="), True)[:2] for word in words[1:])
        try:
            await core.load(words[0].strip("'"), parameters)
        except WeftError as error:
            return f"{error.code} {error.message}"
        return "ok"

    async def unload(self, core: Any, words: list[str], nodes: str) -> str:
        """Let a graph go."""
        try:
            await core.unload(words[0], unload_dependents=False)
        except WeftError as error:
            return f"{error.code} {error.message}"
        return "ok"

    async def ask(self, core: Any, words: list[str], nodes: str) -> str:
        """A request."""
        name = next((word for word in words if not word.isdigit()), "pipe")
        version = next((word for word in words if word.isdigit()), "")
        dims = next((model.signature.inputs[0].dims[0] for model in self.target.models), 2)
        call = InferCall(name, version, inputs={"X": make.tensor(*range(dims), shape=(1, dims))})
        context = CallContext()
        try:
            result = await core.infer(call, context)
        except WeftError as error:
            return f"{error.code} {error.message}"
        path = dict(context.trailing_metadata)["x-graph-path"]
        return f"{path.removeprefix('root.').removesuffix(';two')}/{result.model_version}"

    async def hold(self, core: Any, words: list[str], nodes: str) -> None:
        """Models do not answer any more."""

        async def held(call: InferCall, context: CallContext) -> dict[str, Any]:
            self.held.set()
            await self.released.wait()
            return {"Y": call.inputs["X"]}

        self.target.answers["double"] = held

    async def begin(self, core: Any, words: list[str], nodes: str) -> None:
        """A request that is not answered now."""
        self.begun = asyncio.create_task(self.ask(core, words, nodes))
        async with asyncio.timeout(10):
            await self.held.wait()

    async def release(self, core: Any, words: list[str], nodes: str) -> str:
        """It goes on."""
        self.released.set()
        assert self.begun is not None
        return await self.begun

    async def index(self, core: Any, words: list[str], nodes: str) -> str:
        """What is there."""
        entries = [one for one in core.index(ready_only=False) if one.name == (words or [one.name])[0]]
        samples = [s for c in core.extension().collectors for f in c.collect() for s in f.samples]
        figures = {
            "degraded": sum(one.value for one in samples if one.name == "weft_graph_degraded"),
            "failures": sum(one.num_load_failures for one in core._graphs),
        }
        told = [f"{one.name}/{one.version} {one.state} {one.reason}" for one in entries]
        told += [] if core.is_ready() else ["the router is not ready"]
        told += [f"{name} {value:g}" for name, value in figures.items() if value]
        return "\n  ".join(["", *told])

    async def compiled(self, core: Any, words: list[str], nodes: str) -> str:
        """How many graphs were compiled."""
        count, self.num_compiled = self.num_compiled, 0
        return str(count)

    def told(self) -> str:
        """The lines, without paths, times, and what of a file is wrong."""
        text = "\n".join(self.lines).replace(str(self.root), "ROOT")
        text = re.sub(r"20\d\d-\d\d-\S+?\+00:00", "TIME", text)
        text = re.sub(r"\n    .*|\n   *(step|\^).*|\noutput .*|(?<=\S) +(?=\n|$)", "", text)
        return text


@cases(*(Path(__file__).parent / "scripts").glob("*.txt"))
async def test_a_script(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What each line of a script is told is what is written down."""
    script = Script(tmp_path)
    compile_with_warnings = serving.compile_with_warnings  # type: ignore[attr-defined]

    def counting(*arguments: Any) -> Any:
        script.num_compiled += 1
        return compile_with_warnings(*arguments)

    monkeypatch.setattr(serving, "compile_with_warnings", counting)
    await script.play(case.text)
    assert 0 == make.num_other_tasks()
    script.lines += [f"log {message.partition(chr(10))[0]}" for message in caplog.messages]
    case.check(script.told())
