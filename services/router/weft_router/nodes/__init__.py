"""The kinds of node: what runs when, and which answer counts."""

from weft_router.nodes.cascade import CascadeNode
from weft_router.nodes.cascade_per_row import RowCascadeNode
from weft_router.nodes.ensemble import EnsembleNode
from weft_router.nodes.schedule import Schedule
from weft_router.nodes.sequence import LoopNode, SequenceNode
from weft_router.nodes.splitter import SplitterNode
from weft_router.nodes.switch import SwitchNode
from weft_router.nodes.switch_per_row import RowSwitchNode

__all__ = [
    "CascadeNode",
    "EnsembleNode",
    "LoopNode",
    "RowCascadeNode",
    "RowSwitchNode",
    "Schedule",
    "SequenceNode",
    "SplitterNode",
    "SwitchNode",
]
