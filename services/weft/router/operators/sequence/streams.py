"""Streams in a sequence: each tensor belongs to the responses of at most one of its steps.

The rule of Triton Inference Server: the outputs of a decoupled step carry its label, and so does what is made of them.
A step that reads two labels would have to join streams of different lengths, which has no meaning.

Source:
    https://github.com/triton-inference-server/core/blob/main/src/ensemble_utils.cc, ``ValidateEnsembleConfig``
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from weft.language.compiler.names import target_path
from weft.language.compiler.scope import declaring, owner_text
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition, StepDefinition

#: Label of a tensor that exists once for each request.
_ONCE = -1


class StreamStep(NamedTuple):
    """One step of a sequence.

    Attributes:
        is_streaming: The step may give several responses itself.
        producers: Indexes of the steps that this one waits for, by an input, a condition, or because it is after them.
        reads_input: Whether it reads an input of the node.
    """

    definition: StepDefinition
    is_streaming: bool
    producers: Collection[int]
    reads_input: bool = False


def check_streams(
    file: GraphFile,
    node: NodeDefinition,
    order: Sequence[int],
    steps: Sequence[StreamStep],
    outputs: Mapping[str, int],
    report: GraphReport,
) -> None:
    """Report what is wrong with the streams of a sequence that has some.

    Args:
        order: Indexes of ``steps``, each after its producers.
        steps: In declared order. Shadows have no outputs, hence no label.
        outputs: Output of the node -> index of the step that gives it; outputs that are inputs of the node left out.
    """
    labels: dict[int, int] = {}
    for i in order:
        step = steps[i]
        read = dict.fromkeys(labels[producer] for producer in sorted(step.producers))
        if step.reads_input:
            read[_ONCE] = None
        streams = [label for label in read if label != _ONCE]
        if len(streams) > 1 or (len(read) > 1 and not file.dialect.repeats_in_streams):
            names = " and ".join(f"'{steps[label].definition.name}'" for label in streams)
            model = step.definition.message.model_name
            text = file.dialect.joined_streams(file.name, step.definition.name, model, names)
            report.error("G019", file, target_path(step.definition), text)
        labels[i] = i if step.is_streaming else next(iter(streams), _ONCE)
    _check_needed(file, node, steps, outputs.values(), report)
    _check_outputs(file, node, steps, {name: labels[i] for name, i in outputs.items()}, report)
    if node.message.sequence.HasField("loop"):
        text = "'loop' is not for a sequence that streams: it gives several responses to a request"
        report.error("G019", file, f"{node.kind_path}.loop", text, is_name=True)


def check_one_response(file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
    """Report what has an effect on a stream alone in a sequence without one (G018)."""
    is_scheduling = node.kind_path == "ensemble_scheduling"
    if node.message.sequence.max_inflight_responses and not is_scheduling:
        text = "'max_inflight_responses' has no effect: no step of the sequence streams, so it gives one response"
        report.error("G018", file, f"{node.kind_path}.max_inflight_responses", text, is_name=True)
    if node.message.sequence.max_inflight_responses and is_scheduling:
        text = (
            "'max_inflight_requests' has no effect: no step calls a decoupled model, so each request gets one response"
        )
        report.warning("G018", file, "ensemble_scheduling.max_inflight_requests", text)


def _check_needed(
    file: GraphFile, node: NodeDefinition, steps: Sequence[StreamStep], sources: Iterable[int], report: GraphReport
) -> None:
    """The responses of the node are those of a stream that an output follows; a shadow alone has none."""
    needed: set[int] = set()
    unseen = set(sources)
    while unseen:
        i = unseen.pop()
        needed.add(i)
        unseen |= set(steps[i].producers) - needed
    for i, step in enumerate(steps):
        if step.is_streaming and i not in needed:
            text = (
                f"step '{step.definition.name}' streams, and no output of {owner_text(file, node)} follows it; "
                "let one read from it, or leave it out"
            )
            report.error("G019", file, target_path(step.definition), text)


def _check_outputs(
    file: GraphFile,
    node: NodeDefinition,
    steps: Sequence[StreamStep],
    labels: Mapping[str, int],
    report: GraphReport,
) -> None:
    """Outputs of the node come together in each response, so they follow one stream."""
    given = [spec.name for spec in declaring(file, node).output]
    prefix = "" if node.name == file.root else f"{node.path}."
    first: tuple[str, int] | None = None
    for name, label in labels.items():
        if label == _ONCE and file.dialect.repeats_in_streams:
            continue
        if first is not None and label != first[1]:
            path = f"{prefix}output[{given.index(name)}].name" if name in given else node.kind_path
            sources = [f"'{one}' {_source(steps, of)}" for one, of in (first, (name, label))]
            text = f"the responses cannot have both outputs: {' and '.join(sources)}; leave one of them out"
            report.error("G019", file, path, text)
        first = first or (name, label)


def _source(steps: Sequence[StreamStep], label: int) -> str:
    return "comes once" if label == _ONCE else f"follows the responses of step '{steps[label].definition.name}'"
