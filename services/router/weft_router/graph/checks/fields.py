"""Fields that would have no effect where they stand (G018): each is an error that says where it would have one."""

from collections.abc import Callable, Iterable

from weft_protos import graph_pb2 as pb
from weft_router.bandit_algorithms import ALGORITHMS
from weft_router.combine import METHODS, CombineMethod
from weft_router.graph.plan import NodeKind
from weft_router.graph.syntax.parse import GraphFile, NodeDefinition, StepDefinition, is_race, method_of
from weft_router.graph.syntax.report import GraphReport
from weft_router.graph.types.expression import read_expression

_STEP_FIELDS = {
    "case": {NodeKind.SWITCH},
    "otherwise": {NodeKind.SWITCH},
    "weight": {NodeKind.SPLITTER, NodeKind.ENSEMBLE},
    "accept": {NodeKind.CASCADE},
}
#: Of a fallback, a shadow and the step of a CUSTOM: fields that belong elsewhere.
_OF_THE_STEP = ("when", "case", "otherwise", "accept", "weight", "dependency", "default", "shadow")
_OF_AN_ANSWER = ("output_map", "case", "otherwise", "accept", "weight", "dependency", "default", "fallback")
_ANSWER_LIMITS = ("retry", "hedge", "cache", "min_remaining_ms", "max_inflight")


def check_fields(file: GraphFile, report: GraphReport) -> None:
    """Report every field without effect in a graph file; an ensemble of Triton Inference Server has none of them."""
    message = file.message
    _Place(file, "", report).refuse(
        [("version_policy", message.HasField("version_policy"))], "in a graph file; each version has a file of its own"
    )
    root = file.nodes.get(file.root)
    if message.model_transaction_policy.decoupled and root is not None and root.kind is not NodeKind.SEQUENCE:
        text = "'decoupled' has no effect: only a step of a root that is a sequence can call a decoupled model"
        report.error("G018", file, "model_transaction_policy.decoupled", text, is_name=True)
    if message.response_cache.enable and message.policy.HasField("cache"):
        text = "'response_cache' has no effect beside 'policy { cache { } }', which says more; leave it out"
        report.error("G018", file, "response_cache", text, is_name=True)
    for node in file.all_nodes:
        _check_node(file, node, report)


class _Place:
    """A message of the file, to report its fields."""

    def __init__(self, file: GraphFile, path: str, report: GraphReport) -> None:
        self._file = file
        self._prefix = f"{path}." if path else ""
        self._report = report

    def refuse(self, fields: Iterable[tuple[str, bool]], why: str) -> None:
        """Report those (name, is given) that are given."""
        for name, is_given in fields:
            if is_given:
                path = self._prefix + name
                self._report.error("G018", self._file, path, f"'{name}' has no effect {why}", is_name=True)


def _given(message: pb.Step | pb.Policy, names: Iterable[str]) -> list[tuple[str, bool]]:
    present = {field.name for field, _ in message.ListFields()}
    return [(name, name in present) for name in names]


def _check_node(file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
    kind = _Place(file, node.kind_path, report)
    is_root = node.name == file.root
    sequence, splitter = node.message.sequence, node.message.splitter
    if not is_root:
        kind.refuse([("max_inflight_responses", sequence.max_inflight_responses > 0)], "in a node that is not the root")
    if node.message.policy.HasField("cache"):
        hint = f"on a node; give it to {'the graph' if is_root else 'the steps'}, where answers are kept"
        _Place(file, f"{node.path}.policy", report).refuse([("cache", True)], hint)
    steps = list(node.every_step())
    if steps and not any(step.message.model_name for step in steps):
        why = "on a node none of whose steps calls a model; give it to the steps"
        fields = _given(node.message.policy, ("retry", "hedge", "min_remaining_ms"))
        _Place(file, f"{node.path}.policy", report).refuse(fields, why)
    if len(node.steps) == 1:
        choices = {
            "ordered": sequence.ordered,
            "sticky_by": splitter.sticky_by,
            "bandit": splitter.HasField("bandit"),
            "per_row": node.message.cascade.per_row,
        }
        for name in (name for name, is_given in choices.items() if is_given):
            text = f"'{name}' has no effect where there is only one step to take"
            report.warning("G018", file, f"{node.kind_path}.{name}", text)
    kind.refuse([("salt", bool(splitter.salt) and not splitter.sticky_by)], "without 'sticky_by'")
    if splitter.HasField("bandit"):
        _check_bandit(file, node, report)
    if node.kind is NodeKind.ENSEMBLE:
        _check_ensemble(file, node, report)
    if node.kind is not None:
        for step in (*node.steps, *node.shadows):
            _check_step(file, node.kind, step, report)


def _check_bandit(file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
    splitter = node.message.splitter
    kind = _Place(file, node.kind_path, report)
    kind.refuse([("sticky_by", bool(splitter.sticky_by))], "with 'bandit', which draws anew for each request; keep one")
    algorithm = ALGORITHMS[pb.Bandit.Algorithm.Name(splitter.bandit.algorithm)]
    exploring = sorted(one.name for one in ALGORITHMS.values() if one.takes_epsilon)
    _Place(file, f"{node.kind_path}.bandit", report).refuse(
        [("epsilon", bool(splitter.bandit.epsilon) and not algorithm.takes_epsilon)],
        f"with {algorithm.name}; it belongs to {' and '.join(exploring)}",
    )


def _check_step(file: GraphFile, kind: NodeKind, step: StepDefinition, report: GraphReport) -> None:
    message = step.message
    place = _Place(file, step.path, report)
    is_shadow = message.HasField("shadow")
    if is_shadow:
        place.refuse(_given(message, _OF_AN_ANSWER), "on a shadow, whose answer is dropped")
        why = "on a shadow, which is called once and never waited for"
        hint = f"{why}; to limit it, use 'shadow {{ max_inflight: ... }}' and 'timeout_ms'"
        _Place(file, f"{step.path}.policy", report).refuse(_given(message.policy, _ANSWER_LIMITS), hint)
    else:
        for name, is_given in _given(message, _STEP_FIELDS):
            if is_given and kind not in _STEP_FIELDS[name]:
                useful = " or ".join(sorted(one.value for one in _STEP_FIELDS[name]))
                place.refuse([(name, True)], f"in this {kind.value}; it belongs to: {useful}")
        _check_default(kind, step, place)
    if kind is not NodeKind.SWITCH and message.when and read_expression(message.when).constant:
        report.warning("G018", file, f"{step.path}.when", "'when' has no effect: it is always true; leave it out")
    _check_target(file, step, report)
    before, fallback = message, step.fallback
    while fallback is not None:
        why = "on a fallback, which stands in for its step and runs when that has failed; give it to the step"
        _Place(file, fallback.path, report).refuse(_given(fallback.message, _OF_THE_STEP), why)
        _check_target(file, fallback, report)
        other = fallback.message
        if other.model_name and _call_of(other) == _call_of(before):
            text = "the fallback repeats the call that has just failed; to call again, give the step a 'retry'"
            report.warning("G018", file, f"{fallback.path}.model_name", text)
        before, fallback = other, fallback.fallback


def _call_of(message: pb.Step) -> tuple[str, int, dict[str, str]]:
    return message.model_name, max(message.model_version, 0), dict(message.input_map)


def _check_default(kind: NodeKind, step: StepDefinition, place: _Place) -> None:
    message = step.message
    if kind is NodeKind.CASCADE:
        why = "in a cascade, where a step without an answer is passed over; give it to the step that runs this node"
    elif message.dependency == pb.Step.SOFT or (message.when and kind is not NodeKind.SWITCH):
        return
    elif kind is NodeKind.SWITCH:
        why = "on a HARD step of a switch, whose failure fails the node; make it 'dependency: SOFT'"
    else:
        why = "on a HARD step without 'when', which always gives its outputs; make it 'dependency: SOFT'"
    place.refuse([("default", len(message.default) > 0)], why)


def _check_target(file: GraphFile, step: StepDefinition, report: GraphReport) -> None:
    """``model_version`` where the target has none, or another one."""
    message = step.message
    place = _Place(file, step.path, report)
    place.refuse([("model_version", bool(message.node and message.model_version))], "on a node of this file")
    for entry in getattr(file.message, "import"):  # a Python keyword
        is_imported = message.graph == (getattr(entry, "as") or entry.graph) != ""
        why = f"here: the import of '{entry.graph}' gives version {entry.version}"
        place.refuse([("model_version", is_imported and entry.version > 0 and message.model_version != 0)], why)


def _check_ensemble(file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
    ensemble = node.message.ensemble
    place = _Place(file, node.kind_path, report)
    if is_race(node):
        why = "where every 'combine' is FIRST: one answer is enough, and the others are cancelled"
        place.refuse([("quorum", ensemble.quorum > 0), ("straggler_ms", ensemble.straggler_ms > 0)], why)
        for step in node.steps:
            _Place(file, step.path, report).refuse(_given(step.message, ("dependency",)), why)
    elif node.steps and not any(step.message.dependency == pb.Step.SOFT for step in node.steps):
        why = "without a SOFT step: HARD ones are always waited for; make those that may be missing 'dependency: SOFT'"
        is_sure = ensemble.quorum == len(node.steps) and not any(step.message.when for step in node.steps)
        place.refuse([("straggler_ms", ensemble.straggler_ms > 0), ("quorum", is_sure)], why)
    elif ensemble.quorum == len(node.steps):
        why = f"with a quorum of all {ensemble.quorum} steps: when they have answered nobody is late; lower the quorum"
        place.refuse([("straggler_ms", ensemble.straggler_ms > 0)], why)
    for i, combine in enumerate(ensemble.combine):
        _check_combine(file, combine, f"{node.kind_path}.combine[{i}]", report)
    weighty = [step for step in node.steps if step.message.weight]
    weighted = [
        i for i, combine in enumerate(ensemble.combine) if combine.weighted and method_of(combine).takes_weights
    ]
    if not any(combine.weighted for combine in ensemble.combine):
        for step in weighty:
            text = "'weight' has no effect: no 'combine' of the ensemble is 'weighted'"
            report.error("G018", file, f"{step.path}.weight", text, is_name=True)
    elif weighted and not weighty and node.steps:
        text = "'weighted' has no effect: no step of the ensemble has a 'weight'"
        report.warning("G018", file, f"{node.kind_path}.combine[{weighted[0]}].weighted", text)


def _check_combine(file: GraphFile, combine: pb.Combine, path: str, report: GraphReport) -> None:
    method = method_of(combine)
    given: dict[str, tuple[bool, Callable[[CombineMethod], bool]]] = {
        "weighted": (combine.weighted, lambda one: one.takes_weights),
        "axis": (combine.axis != 0, lambda one: one.takes_axis),
        "output": (bool(combine.output), lambda one: not one.is_keyed),
        "custom": (combine.HasField("custom"), lambda one: one.calls_model),
    }
    for name, (is_given, is_of) in given.items():
        if method.is_keyed:
            hint = ", the method where none is given: its outputs are named STEP.TENSOR; give a 'method'"
        else:
            hint = f"; it belongs to: {' or '.join(sorted(one.name for one in METHODS.values() if is_of(one)))}"
        _Place(file, path, report).refuse([(name, is_given and not is_of(method))], f"with {method.name}{hint}")
    if method.calls_model and combine.HasField("custom"):
        place = _Place(file, f"{path}.custom", report)
        why = "on the model that combines; give it to the steps"
        place.refuse(_given(combine.custom, (*_OF_THE_STEP, "fallback")), why)
        limits = _given(combine.custom.policy, ("cache",))
        _Place(file, f"{path}.custom.policy", report).refuse(limits, why)
