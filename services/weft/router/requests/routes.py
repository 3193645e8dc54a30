"""The header ``x-graph-route``: steps that a client chooses in place of splitters.

The header lists splitter nodes and steps: ``ab=B`` or ``ab=B,ranker=new``.
"""

from collections.abc import Iterator, Mapping

from weft.base.errors import InvalidArgumentError
from weft.language.plan import NodePlan, StepPlan

#: Request header that pins the path; read only where the router allows it.
ROUTE_HEADER = "x-graph-route"


class Routes:
    """The nodes of a graph whose step a request may choose, which messages call splitters.

    Args:
        root: The graph's root node.
    """

    def __init__(self, root: NodePlan) -> None:
        self._steps: dict[str, list[str]] = {}
        for node in _pinnable(root):
            known = self._steps.setdefault(node.name, [])
            known += [step.name for step in node.steps if step.name not in known]

    def parse(self, header: str) -> Mapping[str, str]:
        """Splitter node -> step, as the header says.

        Raises:
            InvalidArgumentError: It is no such list, or names a node or step that is not there, or a node twice.
        """
        pins: dict[str, str] = {}
        for entry in header.split(","):
            node, equals, step = (part.strip() for part in entry.partition("="))
            if not (node and equals and step):
                raise InvalidArgumentError(
                    f"header '{ROUTE_HEADER}' is {header[:200]!r}; write <splitter node>=<step>, several with commas"
                )
            steps = self._steps.get(node)
            if steps is None:
                known = ", ".join(f"'{name}'" for name in self._steps) or "none"
                raise InvalidArgumentError(
                    f"header '{ROUTE_HEADER}' names node {node[:200]!r}; the splitters of this graph are: {known}"
                )
            if step not in steps:
                known = ", ".join(f"'{name}'" for name in steps)
                raise InvalidArgumentError(
                    f"header '{ROUTE_HEADER}' names step {step[:200]!r} of splitter '{node}'; its steps are: {known}"
                )
            if node in pins:
                raise InvalidArgumentError(f"header '{ROUTE_HEADER}' names splitter '{node}' twice; give it one step")
            pins[node] = step
        return pins


def _pinnable(node: NodePlan) -> Iterator[NodePlan]:
    if node.can_be_pinned:
        yield node
    for step in (*node.steps, *node.shadows):
        yield from _inside(step)


def _inside(step: StepPlan) -> Iterator[NodePlan]:
    if isinstance(step.action, NodePlan):
        yield from _pinnable(step.action)
    if step.fallback is not None:
        yield from _inside(step.fallback)
