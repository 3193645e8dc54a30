"""Checks of an ensemble in a file that need no models."""

from collections.abc import Callable, Iterable, Iterator

from weft.language.checks.fields import OF_THE_STEP
from weft.language.compiler.names import NodeNames
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft.language.syntax.parse import given_fields
from weft.router.combine import METHODS, CombineMethod
from weft_protos import graph_pb2 as pb

#: Tensor that tells the model of a CUSTOM which steps answered.
MASK = "MASK"


def combines_of(node: NodeDefinition) -> Iterable[pb.Combine]:
    """The combines of an ensemble, KEYED if it has none; those without 'output' are skipped."""
    given = node.message.ensemble.combine
    if not given:
        return [pb.Combine(method=pb.Combine.KEYED)]
    return [combine for combine in given if combine.output or method_of(combine).is_keyed]


def method_of(combine: pb.Combine) -> CombineMethod:
    """The method of a combine."""
    return METHODS[pb.Combine.Method.Name(combine.method)]


def is_race(node: NodeDefinition) -> bool:
    """Whether the first answer of any step is the ensemble's answer."""
    combines = list(combines_of(node))
    return bool(combines) and all(method_of(combine).is_first for combine in combines)


def is_merge(node: NodeDefinition) -> bool:
    """Whether each response of each step is a response of the ensemble."""
    return any(method_of(combine).is_merged for combine in combines_of(node))


def keyed_outputs(node: NodeDefinition, names: NodeNames, only: str) -> Iterator[tuple[str, int, str]]:
    """Yield (output name, index of the step, its tensor) of a KEYED combine; ``only`` one tensor, or "" for all."""
    for i, step in enumerate(names.steps):
        for tensor in step.outputs.values():
            if only in ("", tensor):
                yield f"{node.steps[i].name}.{tensor}", i, tensor


def combined_tensor(combine: pb.Combine) -> str:
    """The tensor of the steps that a combine merges; "" for all."""
    return getattr(combine, "from") or combine.output


def check_combines(file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
    """Report combines without an output or a model, and two for one output."""
    seen: set[str] = set()
    for i, combine in enumerate(node.message.ensemble.combine if is_merge(node) else ()):
        if not method_of(combine).is_merged:
            text = (
                f"{method_of(combine).name} beside MERGE: where responses are merged each has the tensors of one step, "
                "and there is nothing to combine; make every 'combine' a MERGE, or none"
            )
            report.error("G041", file, f"{node.kind_path}.combine[{i}]", text)
    for i, combine in enumerate(node.message.ensemble.combine):
        path = f"{node.kind_path}.combine[{i}]"
        method = method_of(combine)
        if method.is_keyed:
            continue
        if not combine.output:
            report.error("G025", file, path, f"the {method.name} has no 'output'; name the node's output that it makes")
        elif combine.output in seen:
            text = f"'{combine.output}' has a 'combine' already; leave one out"
            report.error("G005", file, f"{path}.output", text)
        seen.add(combine.output)
        if not method.calls_model:
            continue
        if not combine.HasField("custom"):
            report.error(
                "G025",
                file,
                path,
                f"the {method.name} has no 'custom'; give it the model: custom {{ model_name: ... }}",
            )
        elif not combine.custom.model_name or combine.custom.node or combine.custom.graph:
            text = f"a {method.name} calls a model: give 'custom' a 'model_name', and neither 'node' nor 'graph'"
            report.error("G025", file, f"{path}.custom", text)


def check_quorum(file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
    """Report a quorum that cannot be met, or is less than the steps that must answer (G016)."""
    quorum, path = node.message.ensemble.quorum, f"{node.kind_path}.quorum"
    if not quorum or is_race(node) or is_merge(node):
        return
    num_steps = len(node.steps)
    num_hard = sum(step.message.dependency == pb.Step.HARD for step in node.steps)
    if quorum > num_steps:
        steps = f"{num_steps} step{'s' * (num_steps != 1)}{', shadows not counted' * bool(node.shadows)}"
        text = f"quorum {quorum} can never be met: ensemble '{node.name}' has {steps}"
        report.error("G016", file, path, text)
    elif quorum < num_hard:
        text = (
            f"quorum {quorum} is less than the {num_hard} HARD steps of ensemble '{node.name}', which must all answer; "
            "make those that may be missing 'dependency: SOFT'"
        )
        report.error("G016", file, path, text)


def check_idle(file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
    """Report fields without effect (G018)."""
    ensemble = node.message.ensemble
    if is_race(node):
        why = "where every 'combine' is FIRST: one answer is enough, and the others are cancelled"
        report.refuse(
            file, node.kind_path, [("quorum", ensemble.quorum > 0), ("straggler_ms", ensemble.straggler_ms > 0)], why
        )
        for step in node.steps:
            report.refuse(file, step.path, given_fields(step.message, ("dependency",)), why)
    elif is_merge(node):
        why = "where responses are merged: each is given as it comes"
        fields = [("quorum", ensemble.quorum > 0), ("straggler_ms", ensemble.straggler_ms > 0)]
        report.refuse(file, node.kind_path, fields, why)
    elif node.steps and not any(step.message.dependency == pb.Step.SOFT for step in node.steps):
        why = "without a SOFT step: HARD ones are always waited for; make those that may be missing 'dependency: SOFT'"
        is_sure = ensemble.quorum == len(node.steps) and not any(step.message.when for step in node.steps)
        report.refuse(file, node.kind_path, [("straggler_ms", ensemble.straggler_ms > 0), ("quorum", is_sure)], why)
    elif ensemble.quorum == len(node.steps):
        why = f"with a quorum of all {ensemble.quorum} steps: when they have answered nobody is late; lower the quorum"
        report.refuse(file, node.kind_path, [("straggler_ms", ensemble.straggler_ms > 0)], why)
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
        report.refuse(file, path, [(name, is_given and not is_of(method))], f"with {method.name}{hint}")
    if method.calls_model and combine.HasField("custom"):
        why = "on the model that combines; give it to the steps"
        report.refuse(file, f"{path}.custom", given_fields(combine.custom, (*OF_THE_STEP, "fallback")), why)
        own = [policy.field for policy in file.policies.values() if not policy.is_inherited]
        limits = given_fields(combine.custom.policy, own)
        report.refuse(file, f"{path}.custom.policy", limits, why)
