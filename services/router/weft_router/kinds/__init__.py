"""The kinds of node, each a module of its own; this table is the only place that lists them."""

from weft_router.graph.description import Description
from weft_router.graph.plan import NodeKind, NodePlan
from weft_router.kinds.cascade import describe_cascade
from weft_router.kinds.ensemble import describe_ensemble
from weft_router.kinds.sequence import describe_sequence
from weft_router.kinds.splitter import describe_splitter
from weft_router.kinds.switch import describe_switch

_DESCRIPTIONS = {
    NodeKind.SEQUENCE: describe_sequence,
    NodeKind.SWITCH: describe_switch,
    NodeKind.SPLITTER: describe_splitter,
    NodeKind.ENSEMBLE: describe_ensemble,
    NodeKind.CASCADE: describe_cascade,
}


def describe(plan: NodePlan) -> Description:
    """What a node does, in words and edges."""
    return _DESCRIPTIONS[plan.kind](plan)
