"""The node kinds, a module or folder each; this table is the only list of them."""

from weft.language.compiler.nodes import NodeKind
from weft.router.operators.cascade import CascadeKind
from weft.router.operators.collector import CollectorKind
from weft.router.operators.ensemble import EnsembleKind
from weft.router.operators.map import MapKind
from weft.router.operators.sequence import SequenceKind
from weft.router.operators.splitter import SplitterKind
from weft.router.operators.switch import SwitchKind

SEQUENCE, SWITCH, SPLITTER, ENSEMBLE, CASCADE, MAP, COLLECTOR = (
    SequenceKind(),
    SwitchKind(),
    SplitterKind(),
    EnsembleKind(),
    CascadeKind(),
    MapKind(),
    CollectorKind(),
)

#: By their field in the ``oneof kind`` of ``Node`` in ``graph.proto``.
KINDS: dict[str, NodeKind] = {
    kind.name: kind for kind in (SEQUENCE, SWITCH, SPLITTER, ENSEMBLE, CASCADE, MAP, COLLECTOR)
}
