"""The kinds of node, each a room of its own; this table is the only place that lists them."""

from weft_router.graph.kind import NodeKind
from weft_router.kinds.cascade import CascadeKind
from weft_router.kinds.ensemble import EnsembleKind
from weft_router.kinds.map import MapKind
from weft_router.kinds.sequence import SequenceKind
from weft_router.kinds.splitter import SplitterKind
from weft_router.kinds.switch import SwitchKind

SEQUENCE, SWITCH, SPLITTER, ENSEMBLE, CASCADE, MAP = (
    SequenceKind(),
    SwitchKind(),
    SplitterKind(),
    EnsembleKind(),
    CascadeKind(),
    MapKind(),
)

#: By their field in the ``oneof kind`` of ``Node`` in ``graph.proto``.
KINDS: dict[str, NodeKind] = {kind.name: kind for kind in (SEQUENCE, SWITCH, SPLITTER, ENSEMBLE, CASCADE, MAP)}
