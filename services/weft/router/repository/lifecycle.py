"""Loads, reloads, rolls back and unloads graphs; each version swaps one reference to its serving graph."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weft.base.core import ParameterValue
from weft.base.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    WeftError,
)
from weft.base.observing.logs import get_logger
from weft.base.repository.control import ClientControl
from weft.language.syntax.file import GraphError, GraphSource
from weft.router.compile import names_called
from weft.router.repository.files import GraphRepository, VersionFile
from weft.router.repository.serving import GraphSources, ServingGraph, compiled, why_not_ready
from weft.router.repository.table import ROLLED_BACK, Graph, GraphTable, GraphVersion, texts
from weft.router.runtime import Runtime
from weft.router.targets.catalog import TargetCatalog

Files = Mapping[str, Sequence[VersionFile]]
#: Code of an error that names what there is not.
_UNKNOWN_NAME = "G002"

_log = get_logger("weft.router.graphs")


class GraphLifecycle:
    """Changes the graphs of a router, one change at a time.

    Attributes:
        files: The files loaded last, by graph; none for a graph that is gone.
    """

    def __init__(
        self, table: GraphTable, repository: GraphRepository, catalog: TargetCatalog, runtime: Runtime
    ) -> None:
        self.files: dict[str, Sequence[VersionFile]] = {}
        self.lock = asyncio.Lock()
        self._table = table
        self._graphs = table.graphs
        self._repository = repository
        self._catalog = catalog
        self._runtime = runtime

    async def load_at_start(self, names: Sequence[str]) -> None:
        """Register every graph of the repository, and load those of ``names`` ("*" is all).

        Failures are recorded in the versions' ``reason``. Raises UnavailableError, or NotFoundError.
        """
        async with self.lock:
            files = await self.scan()
            for name in names:
                if name != "*" and name not in files:
                    raise self._not_found(name)
            is_all = "*" in names
            await self._take_over({name: given for name, given in files.items() if is_all or name in names})
            for name in files.keys() - self._graphs.keys():
                graph = self._graphs[name] = Graph()
                for file in files[name]:
                    graph.entry(file).is_wanted = False
                self._table.choose_defaults([name])

    async def recheck(self) -> None:
        """Retry failed graphs, and recompile those whose models have changed.

        A graph that no longer fits its models goes out of service.
        """
        async with self.lock:
            wanted = [entry for entry in self._table if entry.is_wanted]
            unfit = [entry for entry in wanted if entry.serving is not None and not entry.serving.fits(self._catalog)]
            pending = [entry for entry in wanted if entry.serving is None or entry.candidate is not None]
            gone = {entry.file.name for entry in self._table if entry.is_gone}
            with self._remembered({entry.file.name for entry in pending} | gone):
                await self.settle(pending)
                for entry in unfit:
                    if entry.serving is not None and not entry.serving.fits(self._catalog):
                        await self._renew(entry, entry.serving)
                self._table.choose_defaults()
                for name in gone:
                    self._drop_gone(name)

    async def load(self, name: str) -> None:
        """Load or reload every version of a graph, and recompile the graphs that contain it.

        A version that fails to load does not replace the one in service.

        Raises:
            NotFoundError: The repository has no graph of that name.
            UnavailableError: The repository, or the graph's folder, cannot be read; nothing has changed.
            WeftError: The highest version cannot be loaded; the message shows where and why.
        """
        async with self.lock:
            files = (await self.scan()).get(name)
            if name in self._repository.unreadable:
                raise UnavailableError(f"failed to load '{name}': {self._repository.faults[name]}")
            if not files:
                raise self._not_found(name)
            for entry in self._graphs.get(name, Graph()).versions.values():
                entry.logged = ""  # log the reason again for a new request
            failures = await self._take_over({name: files})
            failure = failures.get(self._graphs[name].versions[files[-1].version])
            if failure is not None:
                raise failure

    async def missing_models(self, name: str) -> list[str]:
        """Models that a graph, or a graph in it, names and no target serves. Raises UnavailableError."""
        files = await self.scan()
        pending, seen = [name], {name}
        while pending:
            for file in files.get(pending.pop(), ()):
                with contextlib.suppress(OSError):  # the load says so
                    called = await asyncio.to_thread(names_called, await asyncio.to_thread(file.read)) - seen
                    pending += called
                    seen |= called
        return sorted(other for other in seen - files.keys() if self._catalog.find(other, "") is None)

    def scan_readable(self) -> Files:
        """The files of every graph, for the watcher. Raises OSError.

        Unreadable graphs, and those whose ``config.pbtxt`` an edit has emptied or truncated, keep their entry of
        ``files``.
        """
        found = self._repository.scan()
        missing = self.files.keys() - found.keys()
        for name in self._repository.unreadable.union(filter(self._repository.is_unfinished, missing)):
            found.pop(name, None)
            if name in self.files:
                found[name] = self.files[name]
        return found

    async def take_over(self, changes: Mapping[str, Sequence[VersionFile] | None]) -> None:
        """Load these files, like ``load``; None: the graph is gone."""
        async with self.lock:
            await self._take_over({name: files or () for name, files in changes.items()})

    async def unload(self, name: str) -> None:
        """Take every version of the graph out of service; requests in flight finish. Raises NotFoundError."""
        async with self.lock:
            graph = self._known(name)
            graph.previous = None
            for entry in graph.versions.values():
                entry.withdraw("unloaded")
            self._table.choose_defaults([name])

    async def edit(self, name: str, version: str, change: Callable[[GraphSource], GraphSource]) -> None:
        """Serve a version with another text, until files are loaded again or it is rolled back.

        Raises NotFoundError, UnavailableError if it is not loaded, or WeftError as ``change`` and the compiler do.
        """
        async with self.lock:
            entry = self._table.find(name, version)
            if entry is None or entry.serving is None:
                self._known(name)
                raise UnavailableError(f"graph '{name}' is not loaded")
            entry.candidate = change(entry.serving.source)
            with self._remembered([name]):
                failures = await self.settle([entry])
            if failures:
                entry.candidate, entry.reason = None, ""
                raise failures[entry]
            await self._renew_around({name})

    async def rollback(self, name: str) -> None:
        """Restore what was in service before the last change of the graph's files; a second rollback undoes it.

        Nothing is compiled, unless models or nested graphs have changed since. It holds until files are loaded again.

        Raises:
            NotFoundError: No graph has that name.
            InvalidArgumentError: There is no earlier version, or it does not fit the models any more.
            UnavailableError: A model that it needs is not ready; the current version stays in service.
        """
        async with self.lock:
            graph = self._graphs.get(name) or self._known(name)
            if not graph.previous:
                raise InvalidArgumentError(
                    f"graph '{name}' has nothing to roll back to: its files have not changed since it was loaded first"
                )
            then = {version: serving.source for version, serving in graph.previous.items()}
            restored: dict[str, ServingGraph] = {}
            for version, serving in graph.previous.items():
                sources = GraphSources(
                    lambda other: then if other == name else self._table.served(other), self._repository
                )
                is_current = await self._is_current(serving, sources)
                restored[version] = serving if is_current else await self.made(serving.source, sources)
            if reason := why_not_ready(restored[max(restored, key=int)].plan, self._catalog):
                raise UnavailableError(f"graph '{name}' cannot be rolled back: {reason}")
            replaced = graph.serving
            for version in graph.versions.keys() - restored.keys():
                graph.versions[version].withdraw(ROLLED_BACK)
            for version, serving in restored.items():
                file = VersionFile(name, version, Path(serving.source.file))
                (graph.versions.get(version) or graph.entry(file)).put(serving)
            graph.previous = replaced
            for serving in replaced.values():
                self._runtime.step_counters.kept.extend(serving.step_counters)
            self._table.choose_defaults([name])
            _log.warning("graph '%s' is rolled back: versions %s serve", name, ", ".join(restored))
            await self._renew_around({name})

    async def scan(self) -> Files:
        """The files of every graph. Raises UnavailableError."""
        try:
            return await asyncio.to_thread(self._repository.scan)
        except OSError as error:
            raise UnavailableError(f"the graph repository cannot be read: {error}") from error

    async def settle(self, entries: Collection[GraphVersion]) -> dict[GraphVersion, WeftError]:
        """Load candidates, retrying those that may contain others of them; return the failures."""
        pending = list(entries)
        failures: dict[GraphVersion, WeftError] = {}
        while pending:
            failures = {entry: failure for entry in pending if (failure := await self._load(entry)) is not None}
            if len(failures) == len(pending):
                break
            pending = list(failures)
        for entry, failure in failures.items():
            self._report(entry, failure)
        return failures

    async def made(self, source: GraphSource, sources: GraphSources | None = None) -> ServingGraph:
        """Compile a graph from its source; nested graphs come from ``sources``, by default those in service.

        Raises WeftError if it cannot be compiled, or a file that is a part of it cannot be read.
        """
        sources = self._sources() if sources is None else sources
        try:
            plan, config = await asyncio.to_thread(compiled, source, self._catalog, sources)
            return ServingGraph(source, plan, config, sources.found, self._runtime)
        except OSError as error:
            raise UnavailableError(f"graph file {error.filename} cannot be read: {error.strerror}") from error
        except WeftError:
            raise
        except Exception as error:
            failure = InternalError("the graph compiler failed")
            _log.exception("%s", failure.message, extra={"error_id": failure.error_id, "file": source.file})
            raise failure from error

    def _sources(self) -> GraphSources:
        return GraphSources(self._table.served, self._repository)

    def _not_found(self, name: str) -> NotFoundError:
        fault = self._repository.faults.get(name, f"a graph is a file {name}/<version>/graph.pbtxt")
        return NotFoundError(
            f"failed to load '{name}', failed to poll from model repository: it has no graph of that name; {fault}"
        )

    def _known(self, name: str) -> Graph:
        graph = self._graphs.get(name)
        if graph is None or not graph.versions:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found; it is no graph of this router")
        return graph

    async def _take_over(self, files: Files) -> dict[GraphVersion, WeftError]:
        """Load these files; returns the versions that cannot be loaded, with errors."""
        entries: list[GraphVersion] = []
        for name, given in files.items():
            if given:
                self.files[name] = given
            graph = self._graphs.setdefault(name, Graph())
            for version in graph.versions.keys() - {file.version for file in given}:
                graph.versions[version].is_gone = True
            for file in given:
                entry = graph.entry(file)
                entry.candidate = None  # it is read again
                entries.append(entry)
        with self._remembered(files):
            failures = await self.settle(entries)
            for name in files:
                self._drop_gone(name)
        for entry in failures:
            if entry.candidate is None:  # it cannot be read: for the watcher it has changed until it can
                self.files[entry.file.name] = [replace(entry.file, stamp=(0, 0, 0))]
        await self._renew_around(files.keys())
        return failures

    @contextlib.contextmanager
    def _remembered(self, names: Iterable[str]) -> Iterator[None]:
        """Keep the previous definitions for a rollback if the block changes the files of these graphs."""
        before = {name: self._graphs[name].serving for name in names}
        yield
        for name, serving in before.items():
            graph = self._graphs[name]
            has_changed = texts(serving) != texts(graph.serving)
            if serving and has_changed and (graph.serving or not graph.versions):
                graph.previous = serving

    def _drop_gone(self, name: str) -> None:
        """Remove versions whose file is gone, except a ready one while no other version is ready."""
        graph = self._graphs[name]
        gone = [entry for entry in graph.versions.values() if entry.is_gone]
        left = [entry for entry in graph.versions.values() if not entry.is_gone]
        has_ready = any(not self._table.why_not_ready(entry) for entry in left)
        for entry in gone:
            if not left or has_ready or self._table.why_not_ready(entry):
                del graph.versions[entry.file.version]
                _log.info("%s is gone", entry.label)
            elif not entry.reason:
                entry.reason = "its file is gone; it goes on serving until another version is ready"
                _log.warning("%s: %s", entry.label, entry.reason)
        self._table.choose_defaults([name])

    async def _load(self, entry: GraphVersion) -> WeftError | None:
        """Put the candidate of a version, else its file, into service; on failure the served definition stays."""
        serving = entry.serving
        entry.is_loading = serving is None
        try:
            if entry.candidate is None:
                entry.candidate = await self._read(entry.file)
            source, sources = entry.candidate, self._sources()
            if serving is not None and serving.source == source and await self._is_current(serving, sources):
                entry.put(serving)
                return None
            graph = await self.made(source, sources)
            is_needed = serving is None or why_not_ready(serving.plan, self._catalog)
            if not is_needed and (reason := why_not_ready(graph.plan, self._catalog)):
                return UnavailableError(reason)
            entry.put(graph)
        except WeftError as failure:
            return failure
        finally:
            entry.is_loading = False
        self._table.choose_defaults([entry.file.name])
        _log.info("%s is loaded", entry.label)
        return None

    async def _read(self, file: VersionFile) -> GraphSource:
        try:
            return await asyncio.to_thread(file.read)
        except OSError as error:
            raise UnavailableError(f"graph file {file.path} cannot be read: {error.strerror}") from error

    async def _is_current(self, serving: ServingGraph, sources: GraphSources) -> bool:
        return serving.fits(self._catalog) and await asyncio.to_thread(serving.is_made_of, sources)

    async def _renew_around(self, names: Collection[str]) -> None:
        """Recompile graphs that contain one of these."""
        for entry in list(self._table):
            serving = entry.serving
            if serving is None or not serving.contains(names):
                continue
            if not await asyncio.to_thread(serving.is_made_of, self._sources()):
                await self._renew(entry, serving)

    async def _renew(self, entry: GraphVersion, serving: ServingGraph) -> None:
        """Recompile a served graph; on failure it goes out of service, unless it still fits its models."""
        try:
            entry.serving = await self.made(serving.source)
            _log.info("%s is compiled anew: a model or graph that it contains has changed", entry.label)
        except WeftError as failure:
            entry.candidate = entry.candidate or serving.source
            if misfit := serving.misfit(self._catalog):
                entry.serving, entry.misfit = None, misfit
            self._report(entry, failure)
        self._table.choose_defaults([entry.file.name])

    def _report(self, entry: GraphVersion, failure: WeftError) -> None:
        """Keep the error for the index; count and log it once."""
        reason = failure.message
        unreachable = self._catalog.unreachable
        entry.is_failing = not (unreachable and _is_of_unknown_names(failure))
        if unreachable:
            reason += f"\ntargets that do not answer yet: {', '.join(unreachable)}"
        entry.reason = reason
        if reason != entry.logged:
            entry.logged = reason
            entry.num_load_failures += 1
            kept = "; what was loaded before goes on serving" if entry.serving is not None else ""
            _log.warning("%s cannot be loaded%s:\n%s", entry.label, kept, reason)


def _is_of_unknown_names(failure: WeftError) -> bool:
    if not isinstance(failure, GraphError):
        return False
    return all(found.code == _UNKNOWN_NAME for found in failure.diagnostics if found.severity == "error")


class GraphControl(ClientControl):
    """Loads and unloads graphs for clients, as far as the model control mode allows."""

    def __init__(self, lifecycle: GraphLifecycle, mode: str) -> None:
        super().__init__(mode, "router")
        self._lifecycle = lifecycle

    async def load(self, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> None:
        """Load or reload a graph; a version that does not compile does not replace one that serves.

        With the parameter ``rollback: true`` it puts back what served before the last change, also in poll mode.

        Raises:
            UnavailableError: The mode does not allow it.
            UnsupportedError: Other parameters are given.
            WeftError: As ``GraphLifecycle.load`` or ``GraphLifecycle.rollback``.
        """
        is_rollback = parameters.get("rollback", False)
        if not isinstance(is_rollback, bool):
            raise InvalidArgumentError(f"load parameter 'rollback' must be true or false, got {is_rollback!r:.80}")
        if not (is_rollback and self.mode == "poll"):
            self.check()
        if unknown := sorted(set(parameters) - {"rollback"}):
            raise UnsupportedError(
                f"load parameters {unknown} are not supported for graphs; change the file and load it again"
            )
        await self.finish(self._lifecycle.rollback(name) if is_rollback else self._lifecycle.load(name))

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Unload a graph; requests in flight finish.

        Raises:
            UnavailableError: The mode does not allow it.
            UnsupportedError: ``unload_dependents``: the models belong to other services.
            NotFoundError: No graph has that name.
        """
        self.check()
        if unload_dependents:
            raise UnsupportedError(
                f"unload_dependents is not supported for graphs: the models of '{name}' are unloaded at the services "
                "that serve them"
            )
        await self.finish(self._lifecycle.unload(name))
