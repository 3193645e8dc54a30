"""A Sequence of KServe, which ends early where a Hard step fails or where a condition does not hold.

Its steps run one after another, whatever they read. So a step that does not read the answer before it is ``after`` that
step: a Hard one that fails stops the request, though nobody reads it, and a Soft one that fails does not. A step that
reads the error body of a Soft step has no counterpart, because no tensor holds an error: there the failure is the
node's. A ``condition`` makes a cascade of steps that read the request, and ``when`` of steps that read an answer.

Source:
    https://github.com/kserve/kserve/blob/master/cmd/router/main.go
"""

from collections.abc import Collection

from weft.router.operators import CASCADE, SEQUENCE
from weft.tools.convert.draft import NODE_INPUT, Draft, DraftNode, DraftStep
from weft.tools.convert.yaml_tree import Source

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


def shape_sequence(source: Source, draft: Draft, node: DraftNode, names: Collection[str]) -> None:
    """Give the steps of a Sequence their order and what ends it early.

    Args:
        source: The file.
        draft: The graph, which receives nodes for what is several steps.
        node: The Sequence; its steps are as in the file, ``is_soft`` where they are.
        names: Of the other nodes.
    """
    if any(step.is_soft and _reads(node, i + 1) for i, step in enumerate(node.steps[:-1])):
        node.remarks.append(_SOFT)
    for i, step in enumerate(node.steps):
        step.is_soft = step.is_soft and 0 <= i < len(node.steps) - 1 and not _reads(node, i + 1)
        if i and step.reads == (NODE_INPUT,) and not step.proceed:
            step.after = [node.steps[i - 1].name]
    starts = [0, *(i for i, step in enumerate(node.steps) if i > 0 and step.proceed)]
    if len(starts) == 1:
        return
    parts = [node.steps[i:j] for i, j in zip(starts, [*starts[1:], len(node.steps)], strict=True)]
    node.remarks.append(_ENDS_EARLY)
    if all(part[0].reads == (NODE_INPUT,) for part in parts[1:]):
        _make_cascade(draft, node, parts, starts, names)
        return
    # A condition that does not hold skips its step and all behind it.
    for i, step in enumerate(node.steps):
        if i >= starts[1]:
            step.is_soft, step.after = False, []
            step.needs = i - 1 if i > starts[1] else None
        if i in starts[1:]:
            step.remarks.append(_EVERY_ANSWER)
            node.answers.append(i - 1)


def _reads(node: DraftNode, index: int) -> bool:
    """Whether a step reads the answer before it, as data or in its condition."""
    return node.steps[index].reads == (index - 1,) or node.steps[index].proceed is not None


def _make_cascade(
    draft: Draft, node: DraftNode, parts: list[list[DraftStep]], starts: list[int], names: Collection[str]
) -> None:
    """All parts begin with the request: the first answer that does not go on is the node's."""
    conditions = [part[0].proceed for part in parts[1:]]
    node.kind = CASCADE
    node.steps = [_as_step(draft, node, part, i, names) for part, i in zip(parts, starts, strict=True)]
    for step, condition in zip(node.steps, conditions, strict=False):
        step.stop = condition
    for i, step in enumerate(node.steps):
        step.after = []
        step.is_soft = False
        step.proceed = step.proceed if i == 0 else None


def _as_step(draft: Draft, node: DraftNode, part: list[DraftStep], start: int, names: Collection[str]) -> DraftStep:
    """The steps as one: itself, or a node of its own."""
    if len(part) == 1:
        return part[0]
    for step in part:
        step.reads = tuple(i - start for i in step.reads if i >= start) or (NODE_INPUT,)
    name = f"{node.name}_{part[-1].name}"
    while name in draft.nodes or name in names:
        name += "_"
    if start:
        part[0].proceed = None
    part[0].after = []
    draft.nodes[name] = DraftNode(name, SEQUENCE, part[0].value, part)
    return DraftStep(part[-1].name, part[0].value, node=name)
