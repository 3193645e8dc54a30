"""Converts ``InferenceGraph`` of KServe (serving.kserve.io/v1alpha1) to a draft.

The comments in a draft say where KServe differs. A Switch that matches nothing is an error in both.

Source:
    https://github.com/kserve/kserve/blob/master/cmd/router/main.go
    https://github.com/kserve/kserve/blob/master/pkg/apis/serving/v1alpha1/inference_graph.go
"""

import re
from urllib.parse import urlsplit

from weft.base.text.pbtxt import suggestion
from weft.language.compiler.names import MAX_DEPTH
from weft.language.compiler.resolve import MAX_ENTRIES
from weft.router.operators import CASCADE, ENSEMBLE, SEQUENCE, SPLITTER, SWITCH
from weft.tools.convert.draft import (
    NODE_INPUT,
    Draft,
    DraftCondition,
    DraftNode,
    DraftStep,
    check,
    legal_name,
)
from weft.tools.convert.wiring import unused
from weft.tools.convert.yaml_tree import Source, YamlValue, shortened

_ENDS_EARLY = (
    "KServe asks a step's condition of the answer before it: the first answer that does not meet it is the node's, and "
    "the steps behind it are not called"
)
_SOFT = (
    "steps here are Soft, KServe's default: it hands the error body of a failed step to the next one as its input. No "
    "tensor holds an error, so a failed step fails the node here"
)
_EVERY_ANSWER = (
    "where the condition does not hold KServe answers with what the step before gave. Here an answer has that in any "
    "case, and this step's outputs where it holds"
)
_KEYED = "KServe keys the answers by step; here an output is called step.tensor"

API_GROUP = "serving.kserve.io"
KIND = "InferenceGraph"
_KINDS = {"Sequence": SEQUENCE, "Switch": SWITCH, "Splitter": SPLITTER, "Ensemble": ENSEMBLE}
#: What says how many replicas run where is no part of a graph.
_SPEC_FIELDS = frozenset(
    {"nodes", "timeout", "routerTimeouts", "resources", "affinity", "tolerations", "nodeSelector", "nodeName"}
    | {"serviceAccountName", "minReplicas", "maxReplicas", "scaleTarget", "scaleMetric"}
)
_NODE_FIELDS = frozenset({"routerType", "steps"})
_TARGETS = ("serviceName", "serviceUrl", "nodeName")
_STEP_FIELDS = frozenset({*_TARGETS, "name", "data", "weight", "condition", "dependency", "mapPredictionsToInstances"})
_RESPONSE, _REQUEST = "$response", "$request"
_URL_MODEL = re.compile(r"/v(?:1|2)/models/(?P<name>[^/:]+)(?:/versions/\d+)?(?:[:/](?:predict|infer))?/?")


def draft_kserve(source: Source, document: YamlValue, name: str) -> Draft | None:
    """Convert one document; None after a reported error."""
    draft = Draft.named(source, document, name)
    spec_value = document.entries.get("spec")
    if spec_value is None:
        source.error(document, "the InferenceGraph has no 'spec'")
        return None
    spec = source.mapping(spec_value, "spec")
    nodes_value = spec.get("nodes")
    if nodes_value is None:
        source.error(spec_value, "the spec has no 'nodes'")
        return None
    nodes = source.mapping(nodes_value, "nodes")
    draft.timeout_ms = round(1000 * (source.number(spec.get("timeout"), "timeout") or 0))
    timeouts = source.mapping(spec.get("routerTimeouts"), "routerTimeouts")
    call_timeout_ms = round(1000 * (source.number(timeouts.get("serviceClient"), "serviceClient") or 0))
    if len(nodes) > MAX_ENTRIES:
        source.error(nodes_value, f"{len(nodes)} nodes; the limit of Weft is {MAX_ENTRIES}")
        return None
    if "root" not in nodes:
        hint = suggestion("root", nodes)
        source.error(nodes_value, f"there is no node 'root', which is where KServe begins{hint}")
        return None
    source.unknown(spec, _SPEC_FIELDS, "the spec")
    _KserveConversion(source, draft, nodes, call_timeout_ms).run()
    return draft


class _KserveConversion:
    def __init__(self, source: Source, draft: Draft, specs: dict[str, YamlValue], call_timeout_ms: int) -> None:
        self._source = source
        self._draft = draft
        self._specs = specs
        self._call_timeout_ms = call_timeout_ms
        self._names: dict[str, str] = {}
        self._fed_by_answers: set[str] = set()

    def run(self) -> None:
        reached = self._reach()
        remarks: dict[str, list[str]] = {name: [] for name in reached}
        for name in reached:
            self._names[name] = legal_name(self._source, self._specs[name], name, self._names.values(), remarks[name])
        for name in reached:
            self._node(name, remarks[name])
        for name, value in self._specs.items():
            if name not in reached:
                text = f"no step reaches node '{name}'; it was left out"
                check(self._source, value, self._draft.remarks, text)

    def _reach(self) -> list[str]:
        """Names of nodes that requests reach, root first; reports cycles and unknown names."""
        reached: dict[str, None] = {}
        trail: list[str] = []

        def visit(name: str) -> None:
            reached.setdefault(name)
            trail.append(name)
            steps = self._specs[name].entries.get("steps")
            for index, step in enumerate(one for one in (steps.items if steps else []) if one.kind == "mapping"):
                value = step.entries.get("nodeName", step)
                target = value.text if value.kind in ("text", "plain") else ""
                if not target:
                    continue
                if self._feeds_answer(name, index, step):
                    self._fed_by_answers.add(target)
                if target in trail:
                    shown = " -> ".join([*trail[trail.index(target) :], target])
                    self._source.error(value, f"cycle: {shortened(shown)}; KServe would call it without end")
                elif target not in self._specs:
                    hint = suggestion(target, self._specs)
                    self._source.error(value, f"unknown node '{shortened(target)}'{hint}")
                elif len(trail) >= MAX_DEPTH:
                    self._source.error(value, f"nodes are nested deeper than {MAX_DEPTH}, the limit of Weft")
                elif target not in reached:
                    visit(target)
            trail.pop()

        visit("root")
        return list(reached)

    def _feeds_answer(self, node: str, index: int, step: YamlValue) -> bool:
        """Whether the step's node reads the answer of another step, not the client's request."""
        data, kind = step.entries.get("data"), self._specs[node].entries.get("routerType")
        is_answer = data is not None and data.text == _RESPONSE and index > 0
        return (is_answer and kind is not None and kind.text == "Sequence") or node in self._fed_by_answers

    def _node(self, name: str, remarks: list[str]) -> None:
        source, value = self._source, self._specs[name]
        entries = source.mapping(value, f"node '{name}'")
        source.unknown(entries, _NODE_FIELDS, f"node '{shortened(name)}'")
        if "routerType" not in entries:
            source.error(value, f"node '{shortened(name)}' has no 'routerType'")
            return
        kind = source.choice(entries["routerType"], "routerType", tuple(_KINDS))
        given = source.sequence(entries.get("steps"), "steps")
        if not 0 < len(given) <= MAX_ENTRIES:
            text = f"has {len(given)} steps, the limit of Weft is {MAX_ENTRIES}" if given else "has no 'steps'"
            source.error(value, f"node '{shortened(name)}' {text}")
            return
        # Of an unknown kind what is wrong with its steps is found all the same.
        node = DraftNode(self._names[name], _KINDS.get(kind, SPLITTER), value, remarks=remarks)
        self._draft.nodes[node.name] = node
        for index, step_value in enumerate(given):
            self._step(node, index, step_value, is_request=name not in self._fed_by_answers)
        if node.kind is SEQUENCE:
            self._shape_sequence(node)
        elif node.kind is ENSEMBLE:
            node.remarks.append(_KEYED)
        elif kind and node.kind is SPLITTER:
            self._splitter(node)

    def _step(self, node: DraftNode, index: int, value: YamlValue, *, is_request: bool) -> None:
        source = self._source
        entries = source.mapping(value, "a step")
        source.unknown(entries, _STEP_FIELDS, "the step")
        targets = [name for name in _TARGETS if source.string(entries.get(name), name)]
        if len(targets) != 1:
            have = " and ".join(targets) or "none"
            hint = "; 'service' and 'routes' are the spelling of KServe before 0.9" if "service" in entries else ""
            source.error(value, f"a step has one of {', '.join(_TARGETS)}; this one has {have}{hint}")
            return
        target = entries[targets[0]]
        step = DraftStep("", value)
        if targets[0] == "nodeName":
            step.node = self._names.get(target.text, target.text)
        else:
            step.model = target.text if targets[0] == "serviceName" else self._model_at(step, target)
            step.timeout_ms = self._call_timeout_ms
        taken = [other.name for other in node.steps]
        name = source.string(entries.get("name"), "name")
        if not name:
            base = step.model or step.node
            name = next(one for one in (base, *(f"{base}-{i}" for i in range(2, len(taken) + 3))) if one not in taken)
        step.name = legal_name(source, entries.get("name", value), name, taken, step.remarks)
        self._read_fields(node, index, step, entries, is_request=is_request)
        node.steps.append(step)

    def _model_at(self, step: DraftStep, value: YamlValue) -> str:
        url = value.text
        parts = urlsplit(url) if "[" not in url else urlsplit("")
        found = _URL_MODEL.fullmatch(parts.path)
        if found:
            step.remarks.append(f"KServe called {url}; here the router finds the model on one of its targets")
            return found["name"]
        name = (parts.hostname or "").partition(".")[0] or "unknown"
        check(self._source, value, step.remarks, f"which model answers at {url} is not known; '{name}' is a guess")
        return name

    def _read_fields(
        self, node: DraftNode, index: int, step: DraftStep, entries: dict[str, YamlValue], *, is_request: bool
    ) -> None:
        source = self._source
        data = source.string(entries.get("data"), "data")
        is_hard = source.choice(entries.get("dependency"), "dependency", ("Soft", "Hard")) == "Hard"
        condition = source.string(entries.get("condition"), "condition")
        weight = source.number(entries.get("weight"), "weight")
        if node.kind in (SEQUENCE, ENSEMBLE):
            step.is_soft = not is_hard
        if node.kind is SEQUENCE:
            if data == _RESPONSE and index > 0:
                step.reads = (index - 1,)
            elif data not in ("", _REQUEST, _RESPONSE):
                text = f"KServe knows no data '{data}' and hands the step what the node got"
                check(source, entries["data"], step.remarks, text)
            if condition and index == 0:
                text = "KServe fails every request here: the first step has no answer before it to ask the condition of"
                check(source, entries["condition"], step.remarks, text)
            if condition:
                step.proceed = DraftCondition(condition, entries["condition"], is_request=False)
            return
        if node.kind is SWITCH:
            step.proceed = DraftCondition(condition, entries.get("condition", step.value), is_request=is_request)
        elif condition:
            step.remarks.append(f"KServe ignores the condition {condition} of a step of this kind")
        if node.kind is SPLITTER:
            step.weight = weight
        elif weight is not None:
            step.remarks.append(f"KServe ignores the weight {weight:g} of a step of this kind")

    def _splitter(self, node: DraftNode) -> None:
        for step in list(node.steps):
            if step.weight is None:
                self._source.error(step.value, f"step '{step.name}' of a Splitter has no weight")
            elif step.weight < 0:
                self._source.error(step.value.entries["weight"], f"weight {step.weight:g} is below 0")
            elif step.weight == 0:
                text = f"step '{step.name}' has weight 0: nothing is sent to it, and it was left out"
                check(self._source, step.value.entries["weight"], node.remarks, text)
                node.steps.remove(step)
        total = sum(step.weight or 0.0 for step in node.steps)
        if total != 100 and not self._source.has_errors:
            text = f"the weights add up to {total:g}; KServe wants 100, here a share is the weight divided by the sum"
            check(self._source, node.value, node.remarks, text)

    def _shape_sequence(self, node: DraftNode) -> None:
        """Give the steps of a Sequence their order and what ends it early.

        A Sequence of KServe ends early where a Hard step fails or where a condition does not hold. Its steps run one
        after another, whatever they read. So a step that does not read the answer before it is ``after`` that step: a
        Hard one that fails stops the request, though nobody reads it, and a Soft one that fails does not. A step that
        reads the error body of a Soft step has no counterpart, because no tensor holds an error: there the failure is
        the node's. A ``condition`` makes a cascade of steps that read the request, and ``when`` of steps that read an
        answer.
        """
        # Whether a step reads the answer before it, as data or in its condition.
        reads = [step.reads == (i - 1,) or step.proceed is not None for i, step in enumerate(node.steps)]
        if any(step.is_soft and next_reads for step, next_reads in zip(node.steps, reads[1:], strict=False)):
            node.remarks.append(_SOFT)
        for i, step in enumerate(node.steps):
            step.is_soft = step.is_soft and i < len(node.steps) - 1 and not reads[i + 1]
            if i and step.reads == (NODE_INPUT,) and not step.proceed:
                step.after = [node.steps[i - 1].name]
        starts = [0, *(i for i, step in enumerate(node.steps) if i > 0 and step.proceed)]
        if len(starts) == 1:
            return
        node.remarks.append(_ENDS_EARLY)
        if all(node.steps[i].reads == (NODE_INPUT,) for i in starts[1:]):
            self._make_cascade(node, starts)
            return
        # A condition that does not hold skips its step and all behind it.
        for i, step in enumerate(node.steps):
            if i >= starts[1]:
                step.is_soft, step.after = False, []
                step.needs = i - 1 if i > starts[1] else None
            if i in starts[1:]:
                step.remarks.append(_EVERY_ANSWER)
                node.answers.append(i - 1)

    def _make_cascade(self, node: DraftNode, starts: list[int]) -> None:
        conditions = [node.steps[i].proceed for i in starts[1:]]
        ends = [*starts[1:], len(node.steps)]
        node.kind = CASCADE
        node.steps = [self._part(node, node.steps[i:j], i) for i, j in zip(starts, ends, strict=True)]
        for step, condition in zip(node.steps, [*conditions, None], strict=True):
            step.stop, step.after, step.is_soft = condition, [], False
            step.proceed = step.proceed if step is node.steps[0] else None

    def _part(self, node: DraftNode, part: list[DraftStep], start: int) -> DraftStep:
        if len(part) == 1:
            return part[0]
        for step in part:
            step.reads = tuple(i - start for i in step.reads if i >= start) or (NODE_INPUT,)
        name = unused(f"{node.name}_{part[-1].name}", {*self._draft.nodes, *self._names.values()})
        part[0].after = []
        part[0].proceed = None if start else part[0].proceed
        self._draft.nodes[name] = DraftNode(name, SEQUENCE, part[0].value, part)
        return DraftStep(part[-1].name, part[0].value, node=name)
