"""What a request did in a graph: the path that it took, and how long each step took.

Grammar of the path, the value of the trailing metadata ``x-graph-path``::

    path  = node body
    body  = "." steps           sequence that is the graph         root.lid;clf;post
          | "(" steps ")"       sequence inside a step             clf=pipeline(a;b)
          | "[" step "]"        switch or splitter: the branch     clf=by_language[de]
          | "{" steps "}"       ensemble                           votes={a;b;c}
    steps = step *( ";" step )  in the order in which they started
    step  = name [ "=" node body ] [ "!" | "~" ]                   "!" it failed, "~" it was cancelled

A whole example: ``root.lid;clf=by_language[de];post``. After an error the path ends where the request ended.
"""

import json
from collections.abc import Iterator
from typing import Any

from weft_router.graph.plan import NodeKind

#: Trailing metadata that carries the path.
PATH_HEADER = "x-graph-path"
#: Request parameter that asks for timings, and response parameter that carries them.
TRACE_PARAMETER = "graph_trace"
#: gRPC peers drop headers above 8 KiB, of which an error message may take half; a longer path is cut.
MAX_PATH_CHARS = 2000

_BRACKETS = {
    NodeKind.SEQUENCE: ("(", ")"),
    NodeKind.SWITCH: ("[", "]"),
    NodeKind.SPLITTER: ("[", "]"),
    NodeKind.ENSEMBLE: ("{", "}"),
}


class NodeRun:
    """One run of a node: the steps that it started, in that order."""

    __slots__ = ("kind", "name", "steps")

    def __init__(self, name: str, kind: NodeKind) -> None:
        self.name = name
        self.kind = kind
        self.steps: list[StepRun] = []


class StepRun:
    """One run of a step.

    Attributes:
        name, path: Of the step.
        target, model, version: Of a call; "" where the step is a node.
        start_ns, end_ns: On ``time.monotonic_ns``.
        status: "OK", "CANCELLED" or the error's gRPC status name.
        node: What ran in the step's place, if it is a node.
    """

    __slots__ = ("end_ns", "model", "name", "node", "path", "start_ns", "status", "target", "version")

    def __init__(
        self, name: str, path: str, start_ns: int, *, target: str = "", model: str = "", version: str = ""
    ) -> None:
        self.name = name
        self.path = path
        self.start_ns = self.end_ns = start_ns
        self.target = target
        self.model = model
        self.version = version
        self.status = "CANCELLED"
        self.node: NodeRun | None = None


def path_text(run: NodeRun) -> str:
    """The path of a graph's run, in printable ASCII."""
    parts: list[str] = [run.name]
    _write_body(run, parts, is_root=True)
    text = "".join(parts)
    if not (text.isascii() and text.isprintable()):
        text = "".join(character if " " <= character <= "~" else "?" for character in text)
    return text if len(text) <= MAX_PATH_CHARS else text[: MAX_PATH_CHARS - 3] + "..."


def trace_text(run: NodeRun, origin_ns: int) -> str:
    """Timings of every step as JSON, the value of the response parameter ``graph_trace``.

    Args:
        run: A finished run.
        origin_ns: When the graph started; ``start_ms`` counts from here.
    """
    entries: list[dict[str, Any]] = [
        {
            "path": step.path,
            "target": step.target,
            "model": step.model,
            "version": step.version,
            "start_ms": round((step.start_ns - origin_ns) / 1e6, 3),
            "ms": round((step.end_ns - step.start_ns) / 1e6, 3),
            "status": step.status,
        }
        for step in _walk(run)
    ]
    return json.dumps(entries, separators=(",", ":"))


def _walk(run: NodeRun) -> Iterator[StepRun]:
    for step in run.steps:
        yield step
        if step.node is not None:
            yield from _walk(step.node)


def _write_body(run: NodeRun, parts: list[str], *, is_root: bool) -> None:
    if not run.steps:
        return
    before, after = (".", "") if is_root and run.kind is NodeKind.SEQUENCE else _BRACKETS[run.kind]
    for step in run.steps:
        parts.append(before)
        parts.append(step.name)
        if step.node is not None:
            parts.append("=")
            parts.append(step.node.name)
            _write_body(step.node, parts, is_root=False)
        if step.status != "OK":
            parts.append("~" if step.status == "CANCELLED" else "!")
        before = ";"
    parts.append(after)
