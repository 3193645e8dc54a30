"""Decoupled models in a graph: each tensor belongs to the responses of at most one of them.

The rule of Triton Inference Server: the outputs of a decoupled step carry its label, and so does what is made of them.
A step that reads two labels would have to join streams of different lengths, which has no meaning.

Source:
    https://github.com/triton-inference-server/core/blob/main/src/ensemble_utils.cc, ``ValidateEnsembleConfig``
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from weft_router.graph.compiler.names import target_path
from weft_router.graph.policy import has_field
from weft_router.graph.syntax.parse import GraphFile, NodeDefinition, StepDefinition
from weft_router.graph.syntax.report import GraphReport

#: Label of a tensor that exists once for each request.
_ONCE = -1


class StreamStep(NamedTuple):
    """One step of a sequence.

    Attributes:
        definition: What the file says.
        is_decoupled: The step itself calls a decoupled model.
        producers: Indexes of the steps that this one waits for, by an input, a condition or ``steps.<name>.ok``.
        reads_input: Whether it reads an input of the graph.
        is_known: Whether anything is known of what it calls.
    """

    definition: StepDefinition
    is_decoupled: bool
    producers: Collection[int]
    reads_input: bool = False
    is_known: bool = True


def check_streams(
    file: GraphFile,
    node: NodeDefinition,
    order: Sequence[int],
    steps: Sequence[StreamStep],
    outputs: Mapping[str, int],
    report: GraphReport,
) -> bool:
    """Whether the graph is decoupled: whether a step of its root sequence calls a decoupled model.

    To be called once, for the root sequence of the graph that is compiled.

    Args:
        file: The graph.
        node: Its root, a sequence.
        order: Indexes of ``steps``, each after its producers.
        steps: In declared order. Shadows have no outputs, hence no label.
        outputs: Output of the graph -> index of the step that gives it; outputs that are inputs of the graph left out.
        report: Receives steps and outputs that would join two streams, and what has no effect on a stream or without
            one (G019).
    """
    labels: dict[int, int] = {}
    for i in order:
        step = steps[i]
        read = dict.fromkeys(labels[producer] for producer in sorted(step.producers))
        if step.reads_input:
            read[_ONCE] = None
        streams = [label for label in read if label != _ONCE]
        if len(streams) > 1 or (file.is_ensemble and len(read) > 1):
            text = _joined(file, step.definition, [steps[label].definition.name for label in streams])
            report.error("G019", file, target_path(step.definition), text)
        labels[i] = i if step.is_decoupled else next(iter(streams), _ONCE)
        if step.is_decoupled:
            _check_step(file, step.definition, report)
    is_decoupled = any(step.is_decoupled for step in steps)
    _check_needed(file, steps, outputs.values(), report)
    _check_outputs(file, steps, {name: labels[i] for name, i in outputs.items()}, report)
    if is_decoupled or all(step.is_known for step in steps):
        _check_idle(file, node, report, is_decoupled=is_decoupled)
    return is_decoupled


def _joined(file: GraphFile, step: StepDefinition, streams: list[str]) -> str:
    if file.is_ensemble:
        return (
            f"in ensemble {file.name}, step of model '{step.message.model_name}' receives inputs originated from "
            "different decoupled models"
        )
    names = " and ".join(f"'{name}'" for name in streams)
    return (
        f"step '{step.name}' joins responses of the decoupled steps {names}, which may differ in number; let it read "
        "from one of them"
    )


def _check_step(file: GraphFile, step: StepDefinition, report: GraphReport) -> None:
    for name, kind in file.policies.items():
        if kind.why_no_stream and has_field(step.message.policy, name):
            why = kind.why_no_stream
            text = f"'{name}' is not for step '{step.name}', whose model is decoupled: {why}; leave it out"
            report.error("G019", file, f"{step.path}.policy.{name}", text, is_name=True)


def _check_needed(file: GraphFile, steps: Sequence[StreamStep], sources: Iterable[int], report: GraphReport) -> None:
    """The responses of the graph are those of a stream that an output follows; a shadow alone has none."""
    needed: set[int] = set()
    unseen = set(sources)
    while unseen:
        i = unseen.pop()
        needed.add(i)
        unseen |= set(steps[i].producers) - needed
    for i, step in enumerate(steps):
        if step.is_decoupled and i not in needed and not step.definition.message.HasField("shadow"):
            text = (
                f"step '{step.definition.name}', whose model is decoupled, is read by shadows alone; no output of the "
                "graph follows its responses"
            )
            report.error("G019", file, target_path(step.definition), text)


def _check_outputs(
    file: GraphFile, steps: Sequence[StreamStep], labels: Mapping[str, int], report: GraphReport
) -> None:
    """Outputs of the graph come together in each response, so they follow one stream."""
    given = [spec.name for spec in file.message.output]
    first: tuple[str, int] | None = None
    for name, label in labels.items():
        if label == _ONCE and not file.is_ensemble:
            continue
        if first is not None and label != first[1]:
            path = f"output[{given.index(name)}].name" if name in given else "name"
            sources = [f"'{one}' {_source(steps, of)}" for one, of in (first, (name, label))]
            text = f"the responses cannot have both outputs: {' and '.join(sources)}; leave one of them out"
            report.error("G019", file, path, text)
        first = first or (name, label)


def _source(steps: Sequence[StreamStep], label: int) -> str:
    return "comes once" if label == _ONCE else f"follows the responses of step '{steps[label].definition.name}'"


def _check_idle(file: GraphFile, node: NodeDefinition, report: GraphReport, *, is_decoupled: bool) -> None:
    """What only a decoupled graph has, and what such a graph does not have."""
    message, sequence = file.message, node.message.sequence
    reason = "no step of the root calls a decoupled model, so each request gets one response"
    if not is_decoupled and not file.is_ensemble:
        if message.model_transaction_policy.decoupled:
            path = "model_transaction_policy.decoupled"
            report.error("G018", file, path, f"'decoupled' has no effect: {reason}", is_name=True)
        if sequence.max_inflight_responses:
            path = f"{node.kind_path}.max_inflight_responses"
            report.error("G018", file, path, f"'max_inflight_responses' has no effect: {reason}", is_name=True)
    if not is_decoupled and message.ensemble_scheduling.max_inflight_requests:
        text = f"'max_inflight_requests' has no effect: {reason}"
        report.warning("G018", file, "ensemble_scheduling.max_inflight_requests", text)
    if is_decoupled:
        several = "the graph gives several responses to a request"
        for path, is_given in (
            ("policy.cache", message.policy.HasField("cache")),
            ("response_cache.enable", message.response_cache.enable),
            (f"{node.kind_path}.loop", sequence.HasField("loop")),
            (f"{node.kind_path}.ordered", sequence.ordered),
        ):
            if is_given:
                name = path.removesuffix(".enable").rpartition(".")[2]
                report.error("G019", file, path, f"'{name}' is not for a decoupled graph: {several}", is_name=True)
