"""Loads, reloads, rolls back and unloads graphs; each version swaps one reference to the graph that serves it."""

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weft.base.core import ParameterValue
from weft.base.errors import InvalidArgumentError, NotFoundError, UnavailableError, UnsupportedError, WeftError
from weft.base.observing.logs import get_logger
from weft.base.repository.control import ClientControl
from weft.router.repository.files import GraphRepository, VersionFile
from weft.router.repository.loader import GraphLoader
from weft.router.repository.serving import why_not_ready
from weft.router.repository.table import Graph, GraphTable, GraphVersion, texts
from weft.router.runtime import Runtime
from weft.router.targets.catalog import TargetCatalog

Files = Mapping[str, Sequence[VersionFile]]

_log = get_logger("weft.router.graphs")


class GraphLifecycle:
    """Changes the graphs of a router, one change at a time.

    Attributes:
        files: The files that were loaded last, by graph; a graph that is gone has none.
    """

    def __init__(
        self, table: GraphTable, repository: GraphRepository, catalog: TargetCatalog, runtime: Runtime
    ) -> None:
        self.files: dict[str, Sequence[VersionFile]] = {}
        self._table = table
        self._graphs = table.graphs
        self._repository = repository
        self._catalog = catalog
        self.loader = GraphLoader(
            repository, catalog, runtime, table.served, lambda name: table.choose_defaults([name])
        )
        self.lock = asyncio.Lock()

    async def load_at_start(self, names: Sequence[str]) -> None:
        """Learn of every graph in the repository, and load those of ``names`` ("*" is all).

        Why a version cannot serve is in its ``reason``.

        Raises:
            UnavailableError: The repository cannot be read.
            NotFoundError: It has no graph of one of these names.
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
        """Try graphs that failed again, and compile those anew whose models have changed.

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
                        await self.loader.renew(entry)
                self._table.choose_defaults()
                for name in gone:
                    self._drop_gone(name)

    async def load(self, name: str) -> None:
        """Load or reload every version of a graph, and compile anew the graphs that contain it.

        What cannot be loaded does not replace what serves.

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

    def scan_readable(self) -> Files:
        """The files of every graph, for the watcher. Raises OSError.

        One that cannot be read, or whose ``config.pbtxt`` an edit has emptied or cut, is as in ``files``.
        """
        found = self._repository.scan()
        missing = self.files.keys() - found.keys()
        for name in self._repository.unreadable.union(filter(self._repository.is_unfinished, missing)):
            found.pop(name, None)
            if name in self.files:
                found[name] = self.files[name]
        return found

    async def take_over(self, changes: Mapping[str, Sequence[VersionFile] | None]) -> None:
        """Load these files, as ``load`` does; None: the graph is gone."""
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

    async def rollback(self, name: str) -> None:
        """Put back what served before the last change of the graph's files; a second rollback undoes the first.

        Compiles nothing, unless models or nested graphs have changed since. It holds until files are loaded again.

        Raises:
            NotFoundError: No graph has that name.
            InvalidArgumentError: There is nothing to go back to, or it does not fit the models any more.
            UnavailableError: A model that it needs is not ready; what serves goes on.
        """
        async with self.lock:
            graph = self._graphs.get(name) or self._known(name)
            if not graph.previous:
                raise InvalidArgumentError(
                    f"graph '{name}' has nothing to roll back to: its files have not changed since it was loaded first"
                )
            sources = {version: serving.source for version, serving in graph.previous.items()}
            restored = {
                version: await self.loader.current(serving, {name: sources})
                for version, serving in graph.previous.items()
            }
            latest = restored[max(restored, key=int)]
            if reason := why_not_ready(latest.plan, self._catalog):
                raise UnavailableError(f"graph '{name}' cannot be rolled back: {reason}")
            replaced = graph.serving
            for version in graph.versions.keys() - restored.keys():
                graph.versions[version].withdraw("rolled back")
            for version, serving in restored.items():
                entry = graph.versions.get(version) or graph.entry(
                    VersionFile(name, version, Path(serving.source.file))
                )
                entry.put(serving)
            graph.previous = replaced
            self._table.choose_defaults([name])
            _log.warning("graph '%s' is rolled back: versions %s serve", name, ", ".join(restored))
            await self._renew_around({name})

    async def scan(self) -> Mapping[str, Sequence[VersionFile]]:
        """The files of every graph. Raises UnavailableError."""
        try:
            return await asyncio.to_thread(self._repository.scan)
        except OSError as error:
            raise UnavailableError(f"the graph repository cannot be read: {error}") from error

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
        """Keep what these graphs serve before the block for a rollback, where they serve other files after it."""
        before = {name: self._graphs[name].serving for name in names}
        yield
        for name, serving in before.items():
            graph = self._graphs[name]
            has_changed = texts(serving) != texts(graph.serving)
            if serving and has_changed and (graph.serving or not graph.versions):
                graph.previous = serving

    def _drop_gone(self, name: str) -> None:
        """Remove versions whose file is gone, but not one that is ready while no other version is."""
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

    async def settle(self, entries: Collection[GraphVersion]) -> dict[GraphVersion, WeftError]:
        """Load candidates, again after others that they may contain; returns the failures."""
        pending = list(entries)
        failures: dict[GraphVersion, WeftError] = {}
        while pending:
            failures = {entry: failure for entry in pending if (failure := await self.loader.load(entry)) is not None}
            if len(failures) == len(pending):
                break
            pending = list(failures)
        for entry, failure in failures.items():
            self.loader.report(entry, failure)
        return failures

    async def _renew_around(self, names: Collection[str]) -> None:
        """Bring graphs that contain one of these up to what serves now."""
        for entry in list(self._table):
            serving = entry.serving
            if serving is not None and serving.contains(names):
                await self.loader.refresh(entry)


class GraphControl:
    """Changes which graphs serve, as far as the mode of the router allows it.

    Args:
        mode: ``"none"``, ``"poll"`` or ``"explicit"``.
    """

    def __init__(self, lifecycle: GraphLifecycle, mode: str) -> None:
        self._lifecycle = lifecycle
        self._control = ClientControl(mode, "router")

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
        if not (is_rollback and self._control.mode == "poll"):
            self._control.check()
        if unknown := sorted(set(parameters) - {"rollback"}):
            raise UnsupportedError(
                f"load parameters {unknown} are not supported for graphs; change the file and load it again"
            )
        await self._control.finish(self._lifecycle.rollback(name) if is_rollback else self._lifecycle.load(name))

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Unload a graph; requests in flight finish.

        Raises:
            UnavailableError: The mode does not allow it.
            UnsupportedError: ``unload_dependents``: the models belong to other services.
            NotFoundError: No graph has that name.
        """
        self._control.check()
        if unload_dependents:
            raise UnsupportedError(
                f"unload_dependents is not supported for graphs: the models of '{name}' are unloaded at the services "
                "that serve them"
            )
        await self._control.finish(self._lifecycle.unload(name))

    async def close(self) -> None:
        """Cancel changes in progress."""
        await self._control.close()
