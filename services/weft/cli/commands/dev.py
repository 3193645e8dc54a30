"""``weft dev``: serves what a Python file defines, and again when a file changes.

This module as a program runs the file and writes its graphs and models to a folder. What differs from the folder that
is served is put there, and loaded. The mesh keeps what it served if a load fails.
"""

import argparse
import asyncio
import contextlib
import os
import runpy
import shutil
import sys
import tempfile
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from weft.authoring.graph import Graph
from weft.authoring.model import Model
from weft.authoring.serving import write_reached
from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.observing import logs
from weft.base.repository.control import RepositoryWatcher
from weft.base.repository.layout import folders_of_models
from weft.base.text.argument_types import add
from weft.base.text.pbtxt import PbtxtError, render
from weft.cli.arguments import ROUTER_PORT, port
from weft.cli.foreground import stop_event, until
from weft.language.syntax.file import GraphError
from weft.mesh.mesh import Mesh, MeshOptions
from weft.mesh.preflight import MeshError
from weft.mesh.readiness import dialable
from weft.mesh.service_names import GRAPHS, MODEL_SERVICES, PAGE, ROUTER
from weft.router.repository.files import GraphRepository
from weft.serving.lifecycle.repository import ModelRepository
from weft.tools.check import check, find_files
from weft.v2.client.v2_client import V2Client

_MODELS = Path("model_repository")
#: Interval between two looks at the files, and the pause in which a file that is being written changes, in seconds.
_POLL_S, _SETTLE_S = 0.3, 0.1
_LOAD_TIMEOUT_S = 180.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft dev``."""
    option = partial(add, parser)
    parser.description = (
        "Write, check and serve the graphs and models that a Python file defines, and what they reach; again when the "
        "file, one beside it or a model changes. What was served stays until the next is without errors."
    )
    parser.epilog = "example: weft dev readings.py --models model_repository"
    option("file FILE", "defines them with @weft.graph and @weft.model", Path)
    option("--models DIR", "repository of the models; default: that of the graphs, else ./model_repository", Path)
    option("--port N", "gRPC; 0 is any free port", port, ROUTER_PORT)
    option("--http-port N", "serve V2 over HTTP and OpenAI's interface there (default: do not)", port)
    option("--ui-port N (0)", "serve the page that shows graphs there, on this machine alone; 0: any free port", port)
    option("--no-ui", "do not serve the page")


def run(options: argparse.Namespace) -> int:
    """Serve until a signal; 0, 1 if the mesh cannot be started, or 2 if there is no such file."""
    if not options.file.is_file() or not (options.models is None or options.models.is_dir()):
        missing = options.models if options.file.is_file() else options.file
        print(f"weft dev: there is no '{missing}'", file=sys.stderr)
        return 2
    return asyncio.run(_serve(options))


async def _serve(options: argparse.Namespace) -> int:
    logs.configure("warning", "weft", is_json=False)
    with tempfile.TemporaryDirectory(prefix="weft-dev-") as folder:
        dev = Development(options, Path(folder))
        stop = stop_event(on_second_signal=dev.mesh.kill, watch_stdin=False)
        try:
            await until(stop, dev.follow())
        except MeshError as error:
            print(error, file=sys.__stderr__)
            return 1
        finally:
            await dev.mesh.stop()
    return 0


class Development:
    """The file, and a mesh that serves the last good version of it.

    Args:
        folder: Where versions are written.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._file: Path = options.file
        self._models: Path = options.models or _MODELS
        self._given = str(options.models or "")
        self._known: dict[str, object] = {}
        self._next, self._served = folder / "next", folder / "served"
        for name in (GRAPHS, *MODEL_SERVICES):  # each service runs, whatever is reached later
            (self._served / name).mkdir(parents=True)
        control = ["--model-control-mode=explicit", "--load-model=*"]
        self.mesh = Mesh(
            MeshOptions(
                repository=self._served,
                router_port=options.port,
                metrics_port=0,
                http_port=options.http_port,
                ui_port=None if options.no_ui else options.ui_port,
                in_process=MODEL_SERVICES,
                router_arguments=[*control, "--log-level=warning"],
                service_arguments={name: [*control, "--dev"] for name in MODEL_SERVICES},
            ),
            log=lambda service, pid, line: logs.forward(line, service, pid),
        )
        self._pending: set[Path] = set()
        self._building: asyncio.Task[None] | None = None

    async def follow(self) -> None:
        """Serve, and follow changes for ever. Raises MeshError: the mesh cannot be started."""
        endpoints = await self.mesh.start()
        if PAGE in endpoints:
            print(f"weft dev: the page is http://{endpoints[PAGE].http}/ui/", file=sys.__stdout__, flush=True)
        address = dialable(endpoints[ROUTER].grpc)
        async with V2Client(address) as client, asyncio.TaskGroup() as tasks:

            async def take_over(changes: Mapping[str, object]) -> None:
                if self._building is not None:
                    self._building.cancel()  # an older version, perhaps one that never ends
                    await asyncio.wait([self._building])
                self._building = tasks.create_task(self._build(set(changes), client, address))

            self._known.update(await asyncio.to_thread(self._scan))
            watcher = RepositoryWatcher("files", self._scan, self._known, take_over, _SETTLE_S)
            await take_over({})
            tasks.create_task(watcher.run(_POLL_S))
            tasks.create_task(self.mesh.watch())

    def _scan(self) -> dict[str, object]:
        """What changes when a Python file, a model or a graph does, by name; "" is for the Python files."""
        around = sorted(self._file.resolve().parent.glob("*.py"))
        files = [file for file in around if file.is_file()]  # an editor's lock is a link to nothing
        found: dict[str, object] = {"": [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]}
        folders = folders_of_models(self._models, (*MODEL_SERVICES, GRAPHS)).values()
        linked = [path.readlink().parent for path in self._served.glob("*/*") if path.is_symlink()]
        for folder in dict.fromkeys([*folders, *linked]):
            found |= {**ModelRepository(folder).fingerprints(), **GraphRepository(folder).scan()}
        return found

    async def _build(self, changed: set[str], client: V2Client, address: str) -> None:
        """Run the file, and serve what it defines if that is without errors."""
        shutil.rmtree(self._next, ignore_errors=True)
        self._next.mkdir()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "weft.cli.commands.dev", self._file, self._next, self._given),
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},  # a module that changes twice in a second is another
        )
        try:
            status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if status:
            print(f"weft dev: {self._file} has errors; what was served before goes on", file=sys.__stderr__)
            return
        new, old = await asyncio.to_thread(lambda: (_contents(self._next), _contents(self._served)))
        self._pending |= {place for place in new.keys() | old.keys() if new.get(place) != old.get(place)}
        self._pending |= {place for place in new if place.name in changed}
        for place in self._pending - new.keys():
            with contextlib.suppress(WeftError):  # it was never loaded
                await client.unload(place.name, unload_dependents=False, timeout_s=_LOAD_TIMEOUT_S)
        for place in self._pending:
            served = self._served / place
            if served.is_symlink():
                served.unlink()
            else:
                shutil.rmtree(served, ignore_errors=True)
            if place in new:
                (self._next / place).rename(served)
        self._pending &= new.keys()
        for place in sorted(self._pending, key=lambda place: place.parts[0] == GRAPHS):  # models first
            try:
                await client.load(place.name, {}, timeout_s=_LOAD_TIMEOUT_S)
                self._pending.discard(place)
            except WeftError as error:
                print(error.message, file=sys.__stderr__)
        for name, state in (await asyncio.to_thread(self._scan)).items():
            self._known.setdefault(name, state)  # of models that are linked to since now
        names = ", ".join(sorted(place.name for place in new if not (self._served / place).is_symlink()))
        state = "has errors" if self._pending else "served"
        print(f"weft dev: {names} at {address}: {state}", file=sys.__stdout__, flush=True)


def _contents(repository: Path) -> dict[Path, object]:
    """Where each link to a model or graph leads, or the files of its folder; by their place in the repository."""
    return {
        path.relative_to(repository): path.readlink()
        if path.is_symlink()
        else {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}
        for path in repository.glob("*/*")
    }


def write(file: Path, folder: Path, models: str) -> int:
    """Write the graphs and models that a file defines into an empty folder, and check them; 1 if there is an error."""
    home = str(file.resolve().parent)
    sys.path.insert(0, home)
    try:
        names = runpy.run_path(str(file.resolve()), run_name="weft_dev")
        things = {id(value): value for value in names.values() if isinstance(value, Graph | Model)}
        if not things:
            raise InvalidArgumentError(
                f"{file} defines no graph and no model; decorate functions with @weft.graph or @weft.model"
            )
        write_reached(list(things.values()), models or None, folder)
        found = check(find_files([folder]), folder)
    except (GraphError, PbtxtError) as error:
        print(error, file=sys.stderr)
        return 1
    except BaseException as error:
        place = error.__traceback__
        while place is not None and not place.tb_frame.f_code.co_filename.startswith(home):
            place = place.tb_next  # to the user's first line
        traceback.print_exception(error.with_traceback(place), chain=False)
        return 1
    if found:
        print(render(found), file=sys.stderr)
    return int(any(one.severity == "error" for one in found))


if __name__ == "__main__":
    sys.exit(write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
