"""Nodes and graphs in the place of a step: what keeps one from standing there, and the limits that it brings along."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from weft.language.compiler.resolve import NodeTarget
from weft.language.plan import NodePlan
from weft.language.syntax.file import GraphFile, GraphReport


def cycle_text(trail: Sequence[tuple[str, str]], target: NodeTarget) -> str:
    """Why a node that stands around the step cannot run in its place; it is one of ``trail``."""
    cycle = (*trail[trail.index(target.key) :], target.key)
    is_local = len({label for label, _ in cycle}) == 1
    shown = [name for _, name in cycle] if is_local else _without_repeats(label for label, _ in cycle)
    what = "node" if is_local else "graph"
    return f"cycle: {' -> '.join(shown)}; a {what} cannot run itself, a 'loop' in a sequence repeats its steps"


def check_nesting(file: GraphFile, outer: int, path: str, target: NodeTarget, report: GraphReport) -> None:
    """Report a graph whose batches are not those of ``file``, and a cache that has no effect within it.

    Args:
        file: Has the step.
        outer: Rows that the step gets at once; 0: its tensors have no batch dimension.
        path: Of the step's target.
        target: Stands in the step's place.
        report: Receives what does not fit.
    """
    message = target.file.message
    inner = message.max_batch_size
    if (inner > 0) != (outer > 0):
        text = (
            f"graph '{file.name}' has max_batch_size {outer} and graph '{target.file.name}' has {inner}; one with "
            "a batch dimension and one without are not supported together by this version of Weft"
        )
        report.error("G024", file, path, text)
    elif inner < outer:
        report.error("G009", file, path, too_small_text(file, outer, f"graph {target.file.name}", inner))
    if target.is_graph and (message.policy.HasField("cache") or message.response_cache.enable):
        text = (
            f"the cache of graph '{target.file.name}' has no effect where it is a step of another graph; give the "
            "step a 'cache'"
        )
        report.warning("G018", file, path, text)


def too_small_text(file: GraphFile, own: int, what: str, limit: int) -> str:
    """Why ``what``, which takes batches of ``limit`` rows, is not for a graph that takes ``own``."""
    return (
        f"{file.dialect.platform} {file.name} allows maximum batch size {own}, but it contains "
        f"{what} which only allows maximum batch size to be {limit}"
    )


def with_limits(plan: NodePlan, file: GraphFile) -> NodePlan:
    """The root of a nested graph, which has the limits of its graph as well."""
    policy = file.message.policy
    return replace(
        plan,
        graph=file.label,
        timeout_ms=_smaller(plan.timeout_ms, policy.timeout_ms),
        max_inflight=_smaller(plan.max_inflight, policy.max_inflight),
    )


def _smaller(one: int, other: int) -> int:
    """The smaller of two limits; 0 is none."""
    return min(one, other) or max(one, other)


def _without_repeats(names: Iterable[str]) -> list[str]:
    shown: list[str] = []
    for name in names:
        if not shown or shown[-1] != name:
            shown.append(name)
    return shown
