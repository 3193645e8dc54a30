"""A mesh of a staged repository: started, loaded with other configurations, its CPU time, its end."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from weft.base.errors import WeftError
from weft.capacity.tuning.contest import TrialError
from weft.capacity.tuning.graph_models import TunedGraph
from weft.capacity.tuning.repository_files import restage, stage_graph
from weft.mesh.preflight import MeshError
from weft.mesh.running import last_error, running_mesh
from weft.v2.client.v2_client import V2Client

#: Most of an error's text that a trial keeps, in characters.
MAX_REASON = 400
_START_TIMEOUT_S = 120


class StagedMesh:
    """A mesh of a staged repository, whose models can be loaded with other configurations.

    Args:
        graph: What is served.
        place: Folder of the repository, which is made; the log beside it has its name.
        texts: Content of the ``config.pbtxt`` of each model that differs, by model.
        arguments: Of ``weft up``.

    Attributes:
        endpoints: By service.
        is_sound: Nothing went wrong in it so far.

    Raises:
        TrialError: It does not start.
        OSError: The repository cannot be staged.
    """

    def __init__(self, graph: TunedGraph, place: Path, texts: Mapping[str, str], arguments: Sequence[str]) -> None:
        self._graph = graph
        self._texts = dict(texts)
        self._repository = stage_graph(graph, texts, place)
        self._log = place.with_name(f"{place.name}.log")
        self.arguments = tuple(arguments)
        self.is_sound = True
        started = [*arguments, "--no-restart", "--exit-on-error", "--start-timeout-s", str(_START_TIMEOUT_S)]
        started += ["--model-control-mode", "explicit", "--load-model", "*"]
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, place, ignore_errors=True)
            try:
                log = stack.enter_context(self._log.open("w"))
                self.endpoints = stack.enter_context(running_mesh(self._repository, started, log=log))
            except MeshError:
                raise TrialError(f"the mesh does not start: {last_error(self._log)}") from None
            self._stack = stack.pop_all()
        router = self.endpoints["router"].pid
        self._supervisor = int(Path(f"/proc/{router}/stat").read_text().rpartition(")")[2].split()[1])

    def load(self, texts: Mapping[str, str]) -> None:
        """Serve other configurations: the models whose own differs are loaded again.

        Raises:
            TrialError: One cannot be loaded.
        """
        changed = [name for name in {**self._texts, **texts} if self._texts.get(name) != texts.get(name)]
        self._texts = dict(texts)
        try:
            for name in changed:
                restage(self._graph, name, texts.get(name), self._repository)
            asyncio.run(self._load_models(changed))
        except WeftError as error:
            self.is_sound = False
            raise TrialError(f"a model does not load: {error.message[:MAX_REASON]}") from None

    async def _load_models(self, names: Sequence[str]) -> None:
        for name in names:
            async with V2Client(self.endpoints[self._graph.models[name].service].grpc) as client:
                await client.load(name, {}, timeout_s=_START_TIMEOUT_S)

    def cpu_s(self) -> float:
        """CPU time that its processes have used, ``weft up`` too, seconds. Raises TrialError."""
        try:
            return sum(_process_cpu_s(pid) for pid in _process_tree(self._supervisor))
        except OSError:
            self.is_sound = False
            raise TrialError("the mesh has ended") from None

    def stop(self) -> None:
        """End it; the log stays if something went wrong."""
        self._stack.close()
        if self.is_sound:
            self._log.unlink(missing_ok=True)


def _process_cpu_s(pid: int) -> float:
    """CPU time of a process, in nanoseconds' resolution.

    Source:
        clock_getcpuclockid(3): the clock of a process is made of its id as the C library makes it.
    """
    return time.clock_gettime((~pid << 3) | 2)


def _process_tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        for thread in Path(f"/proc/{parent}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the thread has ended
                found += [int(child) for child in (thread / "children").read_text().split()]
    return found
