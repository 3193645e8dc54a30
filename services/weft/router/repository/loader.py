"""Puts a graph's file into service: reads, compiles, checks that the models are ready, swaps one reference."""

import asyncio
from collections.abc import Callable, Mapping

from weft.base.errors import InternalError, UnavailableError, WeftError
from weft.base.observing.logs import get_logger
from weft.language.syntax.source import GraphError, GraphSource
from weft.router.repository.files import GraphRepository, VersionFile
from weft.router.repository.serving import GraphSources, ServedSources, ServingGraph, compiled, why_not_ready
from weft.router.repository.table import GraphVersion
from weft.router.runtime import Runtime
from weft.router.targets.catalog import TargetCatalog

#: Code of an error that names what there is not.
_UNKNOWN_NAME = "G002"

_log = get_logger("weft.router.graphs")


class GraphLoader:
    """Loads one version at a time, which its owner ensures.

    Args:
        served: What serves, for graphs that contain others; called on other threads, only while a method runs.
        on_swap: Called with the graph's name when one of its versions has another graph, or none, in service.
    """

    def __init__(
        self,
        repository: GraphRepository,
        catalog: TargetCatalog,
        runtime: Runtime,
        served: ServedSources,
        on_swap: Callable[[str], None],
    ) -> None:
        self._repository = repository
        self._catalog = catalog
        self._runtime = runtime
        self._served = served
        self._on_swap = on_swap

    async def load(self, entry: GraphVersion) -> WeftError | None:
        """Put the candidate of a version, or else its file, into service; on failure what serves goes on."""
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
        self._on_swap(entry.file.name)
        _log.info("%s is loaded", entry.label)
        return None

    async def renew(self, entry: GraphVersion) -> None:
        """Compile what serves anew; on failure it goes out of service, unless it still fits its models."""
        serving = entry.serving
        if serving is None:
            return
        try:
            graph = await self.made(serving.source, self._sources())
        except WeftError as failure:
            entry.candidate = entry.candidate or serving.source
            if misfit := serving.misfit(self._catalog):
                entry.serving, entry.misfit = None, misfit
            self.report(entry, failure)
        else:
            entry.serving = graph
            _log.info("%s is compiled anew: a model or graph that it contains has changed", entry.label)
        self._on_swap(entry.file.name)

    async def refresh(self, entry: GraphVersion) -> None:
        """Compile what serves anew if a graph that it contains has changed."""
        if entry.serving is not None and not await asyncio.to_thread(entry.serving.is_made_of, self._sources()):
            await self.renew(entry)

    async def current(self, serving: ServingGraph, instead: Mapping[str, Mapping[str, GraphSource]]) -> ServingGraph:
        """The graph itself, if models and nested graphs are what they were; else the same compiled anew.

        Args:
            serving: What once served.
            instead: What counts as served in place of what is, by graph and version.
        """
        sources = GraphSources(lambda name: instead.get(name) or self._served(name), self._repository)
        if await self._is_current(serving, sources):
            return serving
        return await self.made(serving.source, sources)

    def report(self, entry: GraphVersion, failure: WeftError) -> None:
        """Keep the reason for the index; count it and log it once."""
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

    async def _is_current(self, serving: ServingGraph, sources: GraphSources) -> bool:
        return serving.fits(self._catalog) and await asyncio.to_thread(serving.is_made_of, sources)

    async def _read(self, file: VersionFile) -> GraphSource:
        try:
            return await asyncio.to_thread(file.read)
        except OSError as error:
            raise UnavailableError(f"graph file {file.path} cannot be read: {error.strerror}") from error

    async def made(self, source: GraphSource, sources: GraphSources | None = None) -> ServingGraph:
        """A graph from its source; graphs that it may contain are ``sources``, by default as they serve now.

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
        return GraphSources(self._served, self._repository)


def _is_of_unknown_names(failure: WeftError) -> bool:
    if not isinstance(failure, GraphError):
        return False
    return all(found.code == _UNKNOWN_NAME for found in failure.diagnostics if found.severity == "error")
