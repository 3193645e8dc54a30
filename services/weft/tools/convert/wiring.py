"""Wires a draft: inputs and outputs of each node, name maps, conditions as CEL.

KServe and Seldon pass whole messages; Weft passes tensors by name. With the signatures of all models the names are
known: a tensor with two producers is renamed, an input named differently from its source is mapped. Without signatures
the draft is wired by name, and remarks say what is missing.
"""

import json
from dataclasses import replace

from weft.base.tensors import FLOATS, INTEGERS
from weft.language.types.signatures import TensorType
from weft.router.operators import ENSEMBLE
from weft.tools.convert.conditions import Body, translate
from weft.tools.convert.draft import (
    CHECK,
    NODE_INPUT,
    Draft,
    DraftCombine,
    DraftCondition,
    DraftNode,
    DraftStep,
    Tensors,
    check,
    differs,
)
from weft.tools.convert.signatures import (
    Interface,
    Signatures,
    fits,
    listed,
    merged,
    shared_inputs,
    shared_outputs,
)
from weft.tools.convert.yaml_tree import Source, YamlValue

_ONE_ROW = (
    "there a request of several rows goes one way as a whole; here it is refused. With 'per_row: true' each row goes "
    "its own way"
)
_FAILED = "where a step fails softly KServe puts its error body under the step's key; here its outputs are absent then"


def wire(source: Source, draft: Draft, signatures: Signatures) -> None:
    """Add inputs, outputs, maps and conditions to the draft, as far as its models and graphs are known."""
    wiring = _Wiring(source, draft, signatures)
    interface = wiring.node("root", None)
    if interface is None:
        signatures.ask(source, draft, wiring.unknown)
        return
    draft.inputs, draft.outputs = interface.inputs, interface.outputs
    draft.max_batch_size = min(wiring.batch_sizes, default=0)
    for node in draft.nodes.values():
        if node.reads_one_row and draft.max_batch_size > 1:
            differs(source, node.value, node.remarks, _ONE_ROW)
    if not draft.outputs:
        check(source, draft.value, draft.remarks, "the root's steps have no output in common; name them alike")


class _Wiring:
    def __init__(self, source: Source, draft: Draft, signatures: Signatures) -> None:
        self._source = source
        self._draft = draft
        self._signatures = signatures
        self._done: dict[str, Interface | None] = {}
        self.unknown: dict[str, YamlValue] = {}
        self.batch_sizes: list[int] = []

    def node(self, name: str, given: Tensors | None) -> Interface | None:
        """Wire a node, once; ``given`` are the tensors that the step which calls it reads, None if not known."""
        if name not in self._done:
            node = self._draft.nodes[name]
            if node.kind.plan.is_pipeline:
                self._done[name] = self._sequence(node, given)
            elif node.kind is ENSEMBLE:
                self._done[name] = self._ensemble(node, given)
            else:
                self._done[name] = self._alternatives(node, given)
        return self._done[name]

    def _target(self, step: DraftStep, given: Tensors | None) -> Interface | None:
        if step.node:
            return self.node(step.node, given)
        known = self._signatures
        interface = known.graph(step.graph) if step.graph else known.model(step.model)
        if interface is None:
            self.unknown.setdefault(step.graph or step.model, step.value)
        else:
            self.batch_sizes.append(interface.max_batch_size)
        return interface

    def _sequence(self, node: DraftNode, given: Tensors | None) -> Interface | None:
        found: list[Interface | None] = []
        for step in node.steps:
            read = [given if i == NODE_INPUT else _outputs(found[i]) for i in step.reads]
            known = [tensors for tensors in read if tensors is not None]
            visible = {name: tensor for tensors in reversed(known) for name, tensor in tensors.items()}
            found.append(self._target(step, visible if len(known) == len(read) else None))
        interfaces = [one for one in found if one is not None]
        interface = None
        if len(interfaces) == len(found):
            inputs = _own_inputs(node.steps, interfaces)
            names = self._name_outputs(node, interfaces, inputs)
            for step, one in zip(node.steps, interfaces, strict=True):
                self._map_inputs(step, one, interfaces, names, inputs)
            skipped = next((i for i, step in enumerate(node.steps) if step.proceed is not None), len(node.steps))
            outputs = {
                names[i][name]: replace(one, is_optional=one.is_optional or i >= skipped)
                for i in (*node.answers, _last(node))
                for name, one in interfaces[i].outputs.items()
            }
            interface = Interface(inputs, outputs)
        for i, step in enumerate(node.steps):
            if step.needs is not None:
                step.when = f"has({cel_name('steps', node.steps[step.needs].name)})"
            if step.proceed is not None:
                before = found[i - 1] if i else None
                body = Body("inputs", _outputs(before), node.steps[i - 1].output_map if i else {})
                text = self._cel(node, step, step.proceed, body) if i else f"CHECK({json.dumps(step.proceed.text)})"
                step.when = f"{step.when} && {f'({text})' if ' || ' in text else text}" if step.when else text
        return interface

    def _name_outputs(self, node: DraftNode, interfaces: list[Interface], inputs: Tensors) -> list[dict[str, str]]:
        """Name every output in the node; on a clash the last step keeps its name."""
        names: list[dict[str, str]] = [{} for _ in interfaces]
        taken = set(inputs)
        last = _last(node)
        for i in (last, *(i for i in range(len(interfaces)) if i != last)):
            step = node.steps[i]
            for output in () if step.shadow_percent else interfaces[i].outputs:
                name = output
                if name in taken and not (i == last and name in inputs):  # the last step may work in place
                    name = unused(f"{step.name}_{output}", taken)
                    step.output_map[output] = name
                    if i in node.answers:
                        text = f"two answers have a tensor '{output}'; that of '{step.name}' is '{name}' here"
                        differs(self._source, step.value, step.remarks, text)
                taken.add(name)
                names[i][output] = name
        return names

    def _map_inputs(
        self,
        step: DraftStep,
        interface: Interface,
        interfaces: list[Interface],
        names: list[dict[str, str]],
        inputs: Tensors,
    ) -> None:
        """Map inputs whose source has another name; one input and one output without a counterpart belong together."""
        open_inputs: list[str] = []
        used: set[str] = set()
        for name, tensor in interface.inputs.items():
            source = next((names[i][name] for i in step.reads if i != NODE_INPUT and name in names[i]), None)
            if source is not None:
                used.add(source)
                if source != name:
                    step.input_map[name] = source
            elif not tensor.is_optional and not (NODE_INPUT in step.reads and name in inputs):
                open_inputs.append(name)
        if not open_inputs:
            return
        left = [
            (names[i][name], one)
            for i in step.reads
            if i != NODE_INPUT
            for name, one in interfaces[i].outputs.items()
            if names[i][name] not in used
        ]
        if len(open_inputs) == len(left) == 1 and fits(left[0][1], interface.inputs[open_inputs[0]]):
            step.input_map[open_inputs[0]] = left[0][0]
            return
        given = listed(name for name, _ in left)
        text = f"nothing that the step reads is called {listed(open_inputs)}; map it from one of: {given}"
        check(self._source, step.value, step.remarks, text)

    def _alternatives(self, node: DraftNode, given: Tensors | None) -> Interface | None:
        found = [self._target(step, given) for step in node.steps]
        interfaces = [one for one in found if one is not None]
        is_known = len(interfaces) == len(found) > 0
        inputs = shared_inputs(node.steps, interfaces) if is_known else None
        for step in node.steps:
            if step.proceed is not None:
                body = Body("inputs", given if given is not None else inputs)
                step.when = self._cel(node, step, step.proceed, body)
                if step.when == "true" and step is node.steps[-1]:
                    step.when, step.is_otherwise = "", True
                if inputs is not None and body.tensors is not None:
                    inputs.update({name: body.tensors[name] for name in body.read if name in body.tensors})
        if node.routed_by is not None:
            route = self._route(node, node.routed_by)
            if inputs is not None:
                inputs |= route
        outputs = shared_outputs(self._source, node, node.steps, interfaces) if is_known else None
        for step, interface in zip(node.steps, found, strict=True):
            if step.stop is not None:
                body = Body("outputs", _outputs(interface), step.output_map)
                step.accept = self._cel(node, step, step.stop, body, is_negated=True)
        return Interface(inputs, outputs) if inputs is not None and outputs is not None else None

    def _cel(
        self, node: DraftNode, step: DraftStep, condition: DraftCondition, body: Body, *, is_negated: bool = False
    ) -> str:
        text = translate(condition, body, is_negated=is_negated)
        node.reads_one_row |= body.is_of_one_row
        step.remarks += dict.fromkeys(body.notes)
        for remark in dict.fromkeys(body.remarks):
            check(self._source, condition.value, step.remarks, remark)
        return text

    def _route(self, node: DraftNode, router: DraftStep) -> dict[str, TensorType]:
        """The answer of a Seldon router, which becomes ``on``, as an input of the node; none where it is not known."""
        interface = self._target(router, None)
        if interface is not None and len(interface.outputs) == 1:
            name, tensor = next(iter(interface.outputs.items()))
            node.on = cel_name("inputs", name) + "[0]" * len(tensor.dims)
            node.reads_one_row = True
            if tensor.datatype.startswith("U"):
                for step in node.steps:
                    step.cases = tuple(case for case in step.cases if case != "-1")
            return {name: tensor}
        node.on = "inputs.ROUTE[0]"
        text = f"'ROUTE' stands for the output of '{router.name}' with the number of the child; write its name"
        check(self._source, router.value, node.remarks, text)
        return {}

    def _ensemble(self, node: DraftNode, given: Tensors | None) -> Interface | None:
        interfaces = [one for step in node.steps if (one := self._target(step, given)) is not None]
        is_known = len(interfaces) == len(node.steps)
        inputs = shared_inputs(node.steps, interfaces) if is_known else {}
        if any(step.is_soft for step in node.steps):
            node.remarks.append(_FAILED)
        if node.combiner is None:
            outputs = {
                f"{step.name}.{name}": replace(tensor, is_optional=tensor.is_optional or step.is_soft)
                for step, one in zip(node.steps, interfaces, strict=False)
                for name, tensor in one.outputs.items()
            }
            return Interface(inputs, outputs) if is_known else None
        offered = shared_outputs(self._source, node, node.steps, interfaces) if is_known else {}
        custom = node.combiner if isinstance(node.combiner, DraftStep) else None
        if custom is not None:
            interface = self._target(custom, None)
            node.combines, outputs = _custom(custom, interface, offered)
            is_known = is_known and interface is not None
        else:
            outputs = {n: t for n, t in offered.items() if t.datatype in FLOATS | INTEGERS}
            node.combines = [self._average(node, name, tensor) for name, tensor in outputs.items()]
        if not node.combines:
            remark = CHECK + "write the name of the tensor that the members give and that is combined"
            node.combines = [DraftCombine("OUTPUT", "CUSTOM" if custom else "AVERAGE", "", custom, [remark])]
            self._source.warning(node.value, f"which tensor '{node.name}' combines is not known")
        return Interface(inputs, outputs) if is_known else None

    def _average(self, node: DraftNode, name: str, tensor: TensorType) -> DraftCombine:
        combine = DraftCombine(name, "AVERAGE")
        if tensor.datatype in INTEGERS:
            text = f"the mean of '{name}', {tensor.datatype}, is rounded here; if it is a label, write VOTE for AVERAGE"
            check(self._source, node.value, combine.remarks, text)
        return combine


def cel_name(space: str, name: str) -> str:
    """A tensor or step in CEL."""
    return f"{space}.{name}" if name.isidentifier() else f"{space}[{json.dumps(name)}]"


def unused(name: str, taken: set[str]) -> str:
    """The name, or the nearest unused one."""
    while name in taken:
        name += "_"
    return name


def _last(node: DraftNode) -> int:
    return max((i for i, step in enumerate(node.steps) if not step.shadow_percent), default=0)


def _outputs(interface: Interface | None) -> dict[str, TensorType] | None:
    return interface.outputs if interface is not None else None


def _own_inputs(steps: list[DraftStep], interfaces: list[Interface]) -> dict[str, TensorType]:
    return merged(
        {
            name: tensor
            for name, tensor in one.inputs.items()
            if not any(i != NODE_INPUT and name in interfaces[i].outputs for i in step.reads)
        }
        for step, one in zip(steps, interfaces, strict=True)
        if NODE_INPUT in step.reads
    )


def _custom(
    combiner: DraftStep, interface: Interface | None, offered: Tensors
) -> tuple[list[DraftCombine], dict[str, TensorType]]:
    if interface is None or not offered:
        return [], {}
    source = next(iter(offered))
    wanted = [name for name in interface.inputs if name not in ("MASK", *offered)]
    if source not in interface.inputs and wanted:
        combiner.input_map[wanted[0]] = source
    return [DraftCombine(name, "CUSTOM", source, combiner) for name in interface.outputs], dict(interface.outputs)
