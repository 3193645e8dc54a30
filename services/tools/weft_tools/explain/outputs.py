"""Which steps the outputs asked for need."""

from collections.abc import Sequence

from weft_common.core import RequestedOutput
from weft_common.errors import InvalidArgumentError
from weft_common.text.pbtxt import suggestion
from weft_router.graph.plan import GraphPlan
from weft_router.graph.pruning import live_steps
from weft_router.requests.intermediates import Intermediates


def live_root(plan: GraphPlan, wanted: Sequence[str]) -> list[int] | None:
    """Indexes of the root's steps that the outputs need; None where all run.

    Args:
        plan: The graph.
        wanted: Outputs of the graph, or ``<step>/<tensor>``; empty means all outputs.

    Raises:
        InvalidArgumentError: There is no such output.
    """
    root, graph = plan.root, plan.signature.name
    known = [spec.name for spec in plan.signature.outputs]
    intermediates = Intermediates(root, known)
    for name in intermediates.own_outputs(tuple(RequestedOutput(name, {}) for name in wanted), graph):
        if name.name not in known:
            raise InvalidArgumentError(f"graph '{graph}' has no output '{name.name}'{suggestion(name.name, known)}")
    if not wanted or root.kind != "sequence":
        return None
    also = {found.root_step for name in wanted if (found := intermediates.get(name)) is not None}
    return live_steps(root, wanted, also)
