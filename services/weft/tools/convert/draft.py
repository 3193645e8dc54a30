"""A graph while it is converted, with remarks at their places."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.language.compiler.nodes import NodeKind
from weft.language.syntax.parse import NAME
from weft.tools.convert.yaml_tree import Source, YamlValue

#: Begins a remark on what a person has to decide.
CHECK = "CHECK: "
#: Begins, behind it, a remark on what was left out though it changes answers.
DIFFERS = "answers may differ: "
#: Among what a step reads: the inputs of its node.
NODE_INPUT = -1


class DraftTensor(NamedTuple):
    """A tensor; ``dims`` are without the batch dimension."""

    datatype: str
    dims: tuple[int, ...]
    is_batched: bool
    is_optional: bool = False

    @property
    def full_dims(self) -> tuple[int, ...]:
        """Dims with the batch dimension as a leading -1."""
        return (-1, *self.dims) if self.is_batched else self.dims


Tensors = Mapping[str, DraftTensor]


@dataclass(slots=True)
class DraftCondition:
    """A condition of KServe.

    Attributes:
        text: gjson.
        value: Its place in the file.
        is_request: Whether it reads the client's request, not a model's answer.
    """

    text: str
    value: YamlValue
    is_request: bool


@dataclass(slots=True)
class DraftStep:
    """One step; exactly one of ``model``, ``node`` and ``graph`` is given.

    Attributes:
        reads: Sequence: where inputs come from, steps by index or ``NODE_INPUT``; the first that has an input gives it.
        proceed: Sequence: runs if it holds. Switch: chosen if it holds.
        needs: Sequence: a step without whose answer it does not run.
        stop: Cascade: goes on to the next step if it holds.
        shadow_percent: Above 0: a shadow.
        is_guard: Sequence: has to end before the node answers, though nothing of it is read.
        after: Sequence: steps that have to answer first, though nothing of them is read.
    """

    name: str
    value: YamlValue
    model: str = ""
    node: str = ""
    graph: str = ""
    reads: tuple[int, ...] = (NODE_INPUT,)
    weight: float | None = None
    proceed: DraftCondition | None = None
    needs: int | None = None
    stop: DraftCondition | None = None
    when: str = ""
    accept: str = ""
    cases: tuple[str, ...] = ()
    is_otherwise: bool = False
    is_soft: bool = False
    is_guard: bool = False
    shadow_percent: float = 0.0
    timeout_ms: int = 0
    input_map: dict[str, str] = field(default_factory=dict)
    output_map: dict[str, str] = field(default_factory=dict)
    after: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(slots=True)
class DraftCombine:
    """One output of an ensemble."""

    output: str
    method: str
    source: str = ""
    custom: DraftStep | None = None
    remarks: list[str] = field(default_factory=list)


@dataclass(slots=True)
class DraftNode:
    """One node.

    Attributes:
        on: Of a switch of Seldon.
        reads_one_row: Whether a condition reads a tensor of which it takes one row.
        routed_by: Switch of Seldon: the model whose answer ``on`` reads.
        bandit: Splitter that learns: the fields of its ``bandit``.
        loop: Sequence: the fields of its ``loop``.
        answers: Sequence: steps before the last one whose outputs are the node's as well.
        combiner: Ensemble of Seldon: the model that combines, or "AVERAGE"; None: outputs are keyed by step.
    """

    name: str
    kind: NodeKind
    value: YamlValue
    steps: list[DraftStep] = field(default_factory=list)
    on: str = ""
    reads_one_row: bool = False
    routed_by: DraftStep | None = None
    bandit: str = ""
    combiner: DraftStep | str | None = None
    loop: list[str] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    combines: list[DraftCombine] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Draft:
    """A whole graph; the node "root" answers.

    Attributes:
        inputs, outputs: None: not known.
    """

    name: str
    value: YamlValue
    nodes: dict[str, DraftNode] = field(default_factory=dict)
    inputs: Tensors | None = None
    outputs: Tensors | None = None
    max_batch_size: int = 0
    timeout_ms: int = 0
    remarks: list[str] = field(default_factory=list)


def named_draft(source: Source, document: YamlValue, name: str) -> Draft:
    """A graph without nodes, of that name or the legal one nearest to it."""
    draft = Draft("", document)
    metadata = document.entries.get("metadata", document)
    draft.name = legal_name(source, metadata.entries.get("name", document), name, (), draft.remarks)
    return draft


def check(source: Source, value: YamlValue, remarks: list[str], text: str) -> None:
    """Add a question to the output, and a warning at its place in the source."""
    remarks.append(CHECK + text)
    source.warning(value, text)


def differs(source: Source, value: YamlValue, remarks: list[str], text: str) -> None:
    """Say what was left out though it changes answers: in the output, and as a warning at its place in the source."""
    check(source, value, remarks, DIFFERS + text.removeprefix(DIFFERS))


def legal_name(source: Source, value: YamlValue, given: str, taken: Iterable[str], remarks: list[str]) -> str:
    """``given`` as a legal, unused name; a change is remarked on."""
    name = "".join(character if NAME.fullmatch("a" + character) else "_" for character in given)
    name = name if NAME.fullmatch(name) else f"n{name}"
    base, number, others = name, 1, set(taken)
    while name in others:
        number += 1
        name = f"{base}-{number}"
    if name != given:
        why = "that name is taken" if base == given else "names are letters, digits, '_', '-', '.' and ':'"
        text = f"'{given}' is called '{name}' here: {why}"
        remarks.append(text)
        source.warning(value, text)
    return name
