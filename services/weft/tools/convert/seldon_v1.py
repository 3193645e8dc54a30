"""Converts ``SeldonDeployment`` of Seldon Core 1 (machinelearning.seldon.io) to a draft.

A unit of the tree runs in this order: its own ``transform_input`` or ``predict``; the child that a router chose, or
every child; ``aggregate`` of a combiner, else the first child's answer; its ``transform_output``. So a unit becomes a
part of a sequence, and a chain of units one sequence.

Source:
    https://github.com/SeldonIO/seldon-core/blob/v1.18.2/executor/predictor/predictor_process.go
    https://github.com/SeldonIO/seldon-core/blob/v1.18.2/operator/apis/machinelearning.seldon.io/v1/seldondeployment_types.go
"""

import re
from dataclasses import replace

from weft.language.compiler.nodes import NodeKind
from weft.language.compiler.resolve import MAX_ENTRIES
from weft.router.operators import ENSEMBLE, SEQUENCE, SPLITTER, SWITCH
from weft.tools.convert.draft import NODE_INPUT, Draft, DraftNode, DraftStep, check, differs, legal_name
from weft.tools.convert.yaml_tree import Source, YamlValue, shortened
from weft_protos import graph_pb2 as pb

API_GROUP = "machinelearning.seldon.io"
KIND = "SeldonDeployment"
_TYPES = ("UNKNOWN_TYPE", "MODEL", "TRANSFORMER", "OUTPUT_TRANSFORMER", "ROUTER", "COMBINER")
_FRAMEWORKS = ("SKLEARN", "XGBOOST", "TENSORFLOW", "MLFLOW", "TRITON", "HUGGINGFACE", "TEMPO")
_SERVERS = (*(f"{name}_SERVER" for name in _FRAMEWORKS), "SIMPLE_MODEL")
#: Methods of a unit in the order of their calls, and those that its type implies.
_ORDER = ("TRANSFORM_INPUT", "ROUTE", "AGGREGATE", "TRANSFORM_OUTPUT")
_METHODS_OF_TYPES = {
    "MODEL": ("TRANSFORM_INPUT",),
    "TRANSFORMER": ("TRANSFORM_INPUT",),
    "OUTPUT_TRANSFORMER": ("TRANSFORM_OUTPUT",),
    "ROUTER": ("ROUTE",),
    "COMBINER": ("AGGREGATE",),
}
_ROUTERS = ("RANDOM_ABTEST", "SIMPLE_ROUTER")
#: Routers that learn, by the images that Seldon publishes.
_BANDITS = {"mab_epsilon_greedy": "EPSILON_GREEDY", "mab_thompson_sampling": "THOMPSON"}
_IMPLEMENTATIONS = (*_SERVERS, *_ROUTERS, "AVERAGE_COMBINER", "UNKNOWN_IMPLEMENTATION")
_SPEC_FIELDS = frozenset(
    {"name", "predictors", "annotations", "protocol", "transport", "replicas", "serverType", "oauth_key"}
    | {"oauth_secret"}
)
_PREDICTOR_FIELDS = frozenset(
    {"name", "graph", "traffic", "shadow", "componentSpecs", "replicas", "annotations", "labels", "engineResources"}
    | {"svcOrchSpec", "explainer", "ssl", "progressDeadlineSeconds"}
)
_UNIT_FIELDS = frozenset(
    {"name", "type", "implementation", "methods", "children", "parameters", "endpoint", "modelUri", "logger"}
    | {"serviceAccountName", "envSecretRefName", "storageInitializerImage"}
)
_TIMEOUTS = ("seldon.io/grpc-timeout", "seldon.io/rest-timeout")

_FIRST_CHILD = "Seldon calls every child, fails where one fails, and answers with the first one's"
_EXPLAINER = "its explainer answers at an address of its own, which no graph has; it was left out"
_PARAMETERS = "parameters that Seldon gives the service, {names}, belong in the model's own config.pbtxt here"
_NO_TRAFFIC = "no predictor says its traffic, which Seldon refuses today; here shares are the numbers of replicas"
_ONE_NAME = (
    "predictors '{first}' and '{second}' both call '{name}', which may be two models; here the name is that of one. "
    "Give each a model of its own"
)
_METHODS = (
    "Seldon calls several methods of '{name}', {methods}; here each is a call of the model '{name}' with its inputs"
)
_NO_SERVICE = "SIMPLE_MODEL is part of Seldon's engine and no service is behind it; name a model that there is"
_COMBINER = (
    "Seldon hands '{name}' a list of the children's messages. Here it gets one tensor with all of them stacked along a "
    "new axis behind the batch dimension, and if it has an input MASK (BOOL), which of them are there"
)
_ROUTER = (
    "Seldon's router may also answer -2 for no child, and then the request itself is the answer; here that, and any "
    "number without a child, is an error. For -1, every child, the first one answers here without a call of the others"
)
_LEARNS = "rewards come by the RPC GraphFeedback, or `weft feedback`; what Seldon's router has learnt is left behind"
_BANDIT = "a router that learns: a splitter with a 'bandit', and feedback to the router, does it without a service"


def draft_seldon(source: Source, document: YamlValue, name: str) -> Draft | None:
    """Convert one document; None after a reported error."""
    return _SeldonConversion(source, Draft.named(source, document, name)).run()


class _SeldonConversion:
    def __init__(self, source: Source, draft: Draft) -> None:
        self._source = source
        self._draft = draft
        self._num_units = 0
        self._timeout_ms = 0
        self._images: dict[str, str] = {}
        self._predictor_name = ""
        #: By the name of a unit: the predictor that has it, and where its model comes from.
        self._origins: dict[str, tuple[str, str]] = {}

    def run(self) -> Draft | None:
        source, draft = self._source, self._draft
        spec_value = draft.value.entries.get("spec")
        spec = source.mapping(spec_value, "spec")
        predictors = [one for one in source.sequence(spec.get("predictors"), "predictors") if one.kind == "mapping"]
        if not predictors:
            source.error(spec_value or draft.value, "the SeldonDeployment has no 'predictors'")
            return None
        source.unknown(spec, _SPEC_FIELDS, "the spec")
        annotations = source.mapping(spec.get("annotations"), "annotations")
        for name in _TIMEOUTS:
            self._timeout_ms = self._timeout_ms or round(source.number(annotations.get(name), name) or 0)
        chain = self._predictor(predictors[0]) if len(predictors) == 1 else [self._predictors(predictors)]
        if source.has_errors:
            return None
        nodes = draft.nodes
        only = nodes.pop(chain[0].node, None) if len(chain) == 1 and not chain[0].remarks else None
        root = only or DraftNode("root", SEQUENCE, draft.value, chain)
        root.name = "root"
        draft.nodes = {"root": root, **nodes}
        return draft

    def _predictors(self, predictors: list[YamlValue]) -> DraftStep:
        """Convert several predictors to a splitter by traffic, or to shadows beside the one that answers."""
        source = self._source
        shares: list[tuple[YamlValue, float, bool]] = []
        for value in predictors:
            traffic = source.number(value.entries.get("traffic"), "traffic")
            shares.append((value, traffic or 0.0, source.boolean(value.entries.get("shadow"), "shadow")))
        live = [share for share in shares if not share[2]]
        node = self._new_node("predictors", SPLITTER, self._draft.value)
        if not live:
            source.error(predictors[0], "every predictor is a shadow; one has to answer")
        total = sum(share for _, share, _ in live)
        if len(live) > 1 and total <= 0:
            replicas = [source.number(value.entries.get("replicas"), "replicas") or 1 for value, *_ in live]
            check(source, predictors[0], node.remarks, _NO_TRAFFIC)
            shares = [share for share in shares if share[2]]
            shares += [(value, given, False) for (value, *_), given in zip(live, replicas, strict=True)]
        elif len(live) > 1 and total != 100:
            text = f"the traffic of the predictors adds up to {total:g}, not 100; a share here is traffic / sum"
            check(source, self._draft.value, node.remarks, text)
        for value, share, is_shadow in shares:
            name = source.string(value.entries.get("name"), "name") or "predictor"
            if len(live) > 1 and not is_shadow and share <= 0:
                text = f"predictor '{name}' has no traffic: nothing is sent to it, and it was left out"
                check(source, value, node.remarks, text)
                continue
            step = self._add_branch(node, self._predictor(value), name, value, rename=name)
            if is_shadow:
                step.shadow_percent = share or 100.0
            else:
                step.weight = share or 100.0
        return DraftStep(node.name, self._draft.value, node=node.name)

    def _predictor(self, value: YamlValue) -> list[DraftStep]:
        self._source.unknown(value.entries, _PREDICTOR_FIELDS, "the predictor")
        self._images = {}
        self._predictor_name = value.entries.get("name", value).text
        for spec in self._source.sequence(value.entries.get("componentSpecs"), "componentSpecs"):
            pod = spec.entries.get("spec", spec)
            for container in self._source.sequence(pod.entries.get("containers"), "containers"):
                name, image = (container.entries.get(key, container).text for key in ("name", "image"))
                self._images[name] = image
        if "explainer" in value.entries:
            check(self._source, value.entries["explainer"], self._draft.remarks, _EXPLAINER)
        graph = value.entries.get("graph")
        if graph is None:
            self._source.error(value, "the predictor has no 'graph'")
            return []
        return self._chain(graph, NODE_INPUT, 0)

    def _chain(self, value: YamlValue, reads: int, start: int) -> list[DraftStep]:
        """Steps of a unit and all below it, in order.

        Args:
            reads: Step that its input comes from.
            start: Index of the first step in its sequence.
        """
        source = self._source
        self._num_units += 1
        if self._num_units > MAX_ENTRIES:
            if self._num_units == MAX_ENTRIES + 1:
                source.error(value, f"more than {MAX_ENTRIES} units; the limit of Weft is {MAX_ENTRIES}")
            return []
        entries = source.mapping(value, "a unit of the graph")
        source.unknown(entries, _UNIT_FIELDS, "the unit")
        name = source.string(entries.get("name"), "name")
        if not name:
            source.error(value, "the unit has no 'name'")
            name = "unit"
        children = [one for one in source.sequence(entries.get("children"), "children") if not one.is_null]
        calls, implementation = self._calls(value, entries, has_children=bool(children))
        own = DraftStep(name, value, model=name, reads=(reads,), timeout_ms=self._timeout_ms)
        self._say_about(own, entries, calls, implementation)
        steps: list[DraftStep] = []
        if "TRANSFORM_INPUT" in calls:
            steps.append(own)
            reads = start
        if "ROUTE" in calls:
            steps += self._router(own, entries, children, implementation, reads, start + len(steps))
        elif "AGGREGATE" in calls:
            steps.append(self._combiner(own, children, implementation, reads))
        elif children:
            steps += self._children(children, reads, start + len(steps))
        if "TRANSFORM_OUTPUT" in calls:
            last = replace(own, remarks=[], input_map={}, output_map={}) if own in steps else own
            last.reads = (start + len(steps) - 1 if steps else reads,)
            steps.append(last)
        taken: list[str] = []
        for step in sorted(steps, key=lambda step: step.is_guard):  # a guard gives way
            step.name = legal_name(source, step.value, step.name, taken, step.remarks)
            taken.append(step.name)
        return steps

    def _say_about(self, own: DraftStep, entries: dict[str, YamlValue], calls: list[str], implementation: str) -> None:
        source, name = self._source, own.name
        origin = self._images.get(name, "") + source.string(entries.get("modelUri"), "modelUri")
        first, of_first = self._origins.setdefault(name, (self._predictor_name, origin))
        if first != self._predictor_name and not (origin and of_first == origin):
            text = _ONE_NAME.format(first=first, second=self._predictor_name, name=shortened(name))
            differs(source, own.value, own.remarks, text)
        if implementation == "SIMPLE_MODEL":
            check(source, own.value, own.remarks, _NO_SERVICE)
        if len(calls) > 1:
            text = _METHODS.format(name=shortened(name), methods=", ".join(calls))
            differs(source, own.value, own.remarks, text)
        names = [shortened(key) for key in self._parameters(entries)]
        if names and "ROUTE" not in calls:  # those of a router are read
            own.remarks.append(_PARAMETERS.format(names=", ".join(names)))

    def _parameters(self, entries: dict[str, YamlValue]) -> dict[str, YamlValue]:
        """Values of a unit's parameters by name; the first of duplicates."""
        found: dict[str, YamlValue] = {}
        for one in self._source.sequence(entries.get("parameters"), "parameters"):
            if "name" in one.entries:
                found.setdefault(one.entries["name"].text, one.entries.get("value", one))
        return found

    def _calls(self, value: YamlValue, entries: dict[str, YamlValue], *, has_children: bool) -> tuple[list[str], str]:
        """Methods of a unit that Seldon calls, in order: those of its type and those that it lists; implementation."""
        source = self._source
        implementation = ""
        if "implementation" in entries:
            implementation = source.string(entries["implementation"], "implementation")
            if implementation not in _IMPLEMENTATIONS:
                text = f"implementation '{shortened(implementation)}' is not one of Seldon's own; a service is called"
                source.warning(entries["implementation"], text)
        kind = source.choice(entries.get("type"), "type", _TYPES)
        listed = {source.string(method, "a method") for method in source.sequence(entries.get("methods"), "methods")}
        methods = {*_METHODS_OF_TYPES.get(kind, ()), *listed}
        if implementation in _ROUTERS:
            methods |= {"ROUTE"}
        elif implementation == "AVERAGE_COMBINER":
            methods |= {"AGGREGATE"}
        calls = [method for method in _ORDER if method in methods]
        is_untyped = "type" not in entries and not listed and not implementation
        if not calls and (implementation in _SERVERS or is_untyped or not has_children):
            if implementation not in _SERVERS:
                source.warning(value, "the unit has neither type nor implementation; it is taken for a MODEL")
            calls = ["TRANSFORM_INPUT"]
        return calls, implementation

    def _children(self, children: list[YamlValue], reads: int, start: int) -> list[DraftStep]:
        """The first child's chain; the other children in front, so that the last step is the one that answers."""
        guards = [self._as_step(self._chain(child, NODE_INPUT, 0), _name_of(child), child) for child in children[1:]]
        for guard in guards:
            guard.reads, guard.is_guard = (reads,), True
        if guards:
            guards[0].remarks.append(_FIRST_CHILD)
        return [*guards, *self._chain(children[0], reads, start + len(guards))]

    def _router(
        self,
        own: DraftStep,
        entries: dict[str, YamlValue],
        children: list[YamlValue],
        implementation: str,
        reads: int,
        start: int,
    ) -> list[DraftStep]:
        source, value = self._source, own.value
        if not children:
            source.error(value, f"router '{shortened(own.name)}' has no 'children'")
            return []
        if implementation == "SIMPLE_ROUTER":
            steps = self._chain(children[0], reads, start)
            for step in steps[:1]:
                check(source, value, step.remarks, f"router '{own.name}' always takes its first child")
            return steps
        parameters = self._parameters(entries)
        algorithm = _BANDITS.get(re.split("[:@]", self._images.get(own.name, "").rpartition("/")[2])[0], "")
        if implementation == "RANDOM_ABTEST" or algorithm:
            node = self._new_node(own.name, SPLITTER, value)
            if implementation == "RANDOM_ABTEST":
                share = self._ratio_of_first(value, parameters, len(children))
                for child, weight in zip(children, (share, 1 - share), strict=False):
                    self._branch(node, child).weight = round(100 * weight, 6)
            else:
                node.bandit = pb.Bandit(algorithm=pb.Bandit.Algorithm.Value(algorithm))
                if algorithm == "EPSILON_GREEDY" and "epsilon" in parameters:
                    node.bandit.epsilon = self._epsilon(parameters["epsilon"])
                node.remarks.append(_LEARNS)
                for child in children:
                    self._branch(node, child)
            return [DraftStep(own.name, value, node=node.name, reads=(reads,))]
        node = self._new_node(f"{own.name}_branch", SWITCH, value)
        own = replace(own, reads=(reads,), remarks=list(own.remarks), input_map={}, output_map={})
        node.routed_by = own
        differs(source, value, node.remarks, _ROUTER)
        if parameters.keys() & {"epsilon", "n_branches"}:
            node.remarks.append(_BANDIT)
        for index, child in enumerate(children):
            self._branch(node, child).cases = (str(index),) if index else ("0", "-1")
        return [own, DraftStep(node.name, value, node=node.name, reads=(reads, start))]

    def _epsilon(self, given: YamlValue) -> float:
        epsilon = self._source.number(given, "epsilon")
        if epsilon is not None and not 0 < epsilon <= 1:
            self._source.error(given, f"epsilon is {epsilon:g}; it must be above 0 and at most 1")
        return epsilon or 0.0

    def _ratio_of_first(self, value: YamlValue, parameters: dict[str, YamlValue], num_children: int) -> float:
        if num_children != 2:
            self._source.error(value, f"RANDOM_ABTEST has 2 children, this one has {num_children}")
        if "ratioA" not in parameters:
            self._source.error(value, "RANDOM_ABTEST has no parameter 'ratioA'")
            return 0.5
        ratio = self._source.number(parameters["ratioA"], "ratioA")
        if ratio is not None and not 0 < ratio < 1:
            self._source.error(parameters["ratioA"], f"ratioA is {ratio:g}; it must be above 0 and below 1")
        return 0.5 if ratio is None else ratio

    def _combiner(self, own: DraftStep, children: list[YamlValue], implementation: str, reads: int) -> DraftStep:
        source, value = self._source, own.value
        if not children:
            source.error(value, f"combiner '{shortened(own.name)}' has no 'children'")
        node = self._new_node(f"{own.name}_members", ENSEMBLE, value)
        for child in children:
            self._branch(node, child)
        if implementation == "AVERAGE_COMBINER":
            node.combiner = "AVERAGE"
        else:
            node.combiner = own
            check(source, value, node.remarks, _COMBINER.format(name=own.name))
        return DraftStep(node.name, value, node=node.name, reads=(reads,))

    def _branch(self, node: DraftNode, child: YamlValue) -> DraftStep:
        return self._add_branch(node, self._chain(child, NODE_INPUT, 0), _name_of(child), child)

    def _add_branch(
        self, node: DraftNode, chain: list[DraftStep], name: str, value: YamlValue, *, rename: str = ""
    ) -> DraftStep:
        step = self._as_step(chain, name, value)
        taken = [one.name for one in node.steps]
        step.name = legal_name(self._source, value, rename or step.name, taken, step.remarks)
        step.reads = (NODE_INPUT,)
        node.steps.append(step)
        return step

    def _as_step(self, chain: list[DraftStep], name: str, value: YamlValue) -> DraftStep:
        if len(chain) == 1:
            return chain[0]
        node = self._new_node(name, SEQUENCE, value)
        node.steps = chain
        return DraftStep(name, value, node=node.name)

    def _new_node(self, name: str, kind: NodeKind, value: YamlValue) -> DraftNode:
        node = DraftNode("", kind, value)
        node.name = legal_name(self._source, value, name, (*self._draft.nodes, "root"), node.remarks)
        self._draft.nodes[node.name] = node
        return node


def _name_of(unit: YamlValue) -> str:
    name = unit.entries.get("name")
    return name.text if name is not None and name.text else "unit"
