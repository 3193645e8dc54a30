"""Writes a graph as Python, as a person would: a function for the graph and one for each further node."""

import builtins
import keyword
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from weft.authoring.python_conditions import literal, python_condition
from weft.authoring.tensors import DATATYPES
from weft.authoring.writing import head_comment
from weft.base.text.pbtxt import is_map
from weft.base.text.pbtxt_format import WIDTH
from weft.base.text.pbtxt_writer import CONDITIONS, scalar
from weft.language.compiler.name_table import NameTable
from weft.language.compiler.names import StepNames
from weft.language.compiler.resolve import ModelTarget, Resolver
from weft.language.syntax.file import (
    GraphError,
    GraphFile,
    GraphLookup,
    GraphReport,
    GraphSource,
    ModelCatalog,
    NodeDefinition,
)
from weft.router.operators import KINDS
from weft.router.policies import POLICIES
from weft_protos import graph_pb2 as pb
from weft_protos.model_config_pb2 import DataType

_CONSTRUCTORS = {"splitter": "split", "map": "each", "collector": "collect"}
#: Names that mean something else in the Python file.
_TAKEN = {
    *keyword.kwlist,
    *dir(builtins),
    *DATATYPES,
    *("m", "o", "weft", "Path", "REPOSITORY", "Tensor", "has", "header", "parameter", "request"),
}
#: Attributes of a step that are no outputs, and keywords of a call that are no inputs.
_METHODS = {"soft", "when", "after", "named", "options"}
_KEYWORDS = {one.name for one in (*pb.Step.DESCRIPTOR.fields, *pb.Policy.DESCRIPTOR.fields)} | {"inputs", "outputs"}
#: Fields of a step that its call says in another way.
_SAID = {
    *("model_name", "node", "graph", "name", "input_map", "output_map"),
    *("constant", "policy", "fallback", "dependency", "default"),
}
#: Fields that name an input of the node.
_TENSORS = {"weft.graph.Map.over", "weft.graph.Map.lengths"}
_PART = re.compile(r'"(?:[^"\\]|\\.)*"|[(\[{]|[)\]}]|, |.')


def python_text(
    source: GraphSource,
    catalog: ModelCatalog,
    graphs: GraphLookup | None = None,
    *,
    repository: str = '"model_repository"',
    lock: Path | None = None,
) -> str:
    """Write Python that makes the graph when it is imported, and writes it when it is run.

    The comment at the head of the file becomes the function's docstring; others are lost.

    Args:
        catalog, graphs: Models and other graphs that it calls.
        repository: Python for the path of the repository.
        lock: File of signatures, if these are not the repository's.

    Raises:
        GraphError: The graph has errors in its structure or its names.
    """
    report = GraphReport(source.file)
    resolver = Resolver(KINDS, POLICIES, catalog, graphs, report)
    file, text = resolver.load(source), ""
    if file is not None and file.root in file.nodes:
        text = _FileWriter(file, NameTable(resolver, KINDS, report)).text(repository, lock)
    if report.has_errors or not text:
        raise GraphError(report.diagnostics())
    return text


class _FileWriter:
    def __init__(self, file: GraphFile, names: NameTable) -> None:
        self.file, self.names, self.imported = file, names, set[str]()
        root = file.nodes[file.root]
        self._nodes = [*self._called(root, {root.name}), root]
        taken = {*_TAKEN}
        titles = [(root.name, file.name), *((node.name, node.name) for node in self._nodes[:-1])]
        self.functions = {name: _word(title or "graph", taken) for name, title in titles}
        #: Node -> those of its inputs that some step gives.
        self.given: dict[str, set[str]] = {node.name: set() for node in self._nodes}

    def _called(self, node: NodeDefinition, seen: set[str]) -> Iterator[NodeDefinition]:
        """The nodes that one runs, each behind those that it runs itself."""
        for step in (one for own in self.names.of(self.file, node).every_call() for one in own.chain()):
            inner = self.file.nodes.get(step.definition.message.node)
            if inner is not None and inner.name not in seen:
                seen.add(inner.name)
                yield from (*self._called(inner, seen), inner)

    def text(self, repository: str, lock: Path | None) -> str:
        writers = [_NodeWriter(self, node) for node in reversed(self._nodes)]
        functions = [writer.text() for writer in reversed(writers)]
        is_path = "__file__" in repository
        place = "REPOSITORY" if is_path else repository
        order = sorted(self.imported, key=lambda name: (not name.isupper(), name[0].islower(), name))
        head = ["from pathlib import Path\n"] * is_path + ["import weft"]
        head += [f"from weft import {', '.join(order)}"] * bool(order) + [""]
        head += [f"REPOSITORY = {repository}"] * is_path
        head.append(f"m = weft.models({place}{f', lock={literal(str(lock))}' if lock else ''})")
        foot = f'if __name__ == "__main__":\n    weft.write({self.functions[self.file.root]}, to={place})\n'
        return "\n\n\n".join(["\n".join(head), *functions, foot])

    def type_of(self, tensor: Any, *hidden: str) -> str:
        """``Tensor[FP32, 10]`` of a declared input or output."""
        datatype = DataType.Name(tensor.data_type).removeprefix("TYPE_")
        self.imported |= {datatype, "Tensor"}
        options = self.fields(tensor, ("name", "data_type", "dims", *hidden))
        code = f"Tensor[{', '.join([datatype, *map(str, tensor.dims)])}]"
        return f"{code}.options({', '.join(options)})" if options else code

    def fields(self, message: Message, hidden: Collection[str] = (), find: Any = None) -> list[str]:
        """The given fields as keywords; ``find`` gives Python for the names in conditions."""
        given = ((field, value) for field, value in message.ListFields() if field.name not in hidden)
        return [
            f"{field.name}{'_' * keyword.iskeyword(field.name)}={self.value(field, value, find)}"
            for field, value in given
        ]

    def policy(self, holder: Any, find: Any = None) -> list[str]:
        """The fields of the policy as keywords of what has it."""
        return self.fields(holder.policy, (), find) or ["policy={}"] * holder.HasField("policy")

    def value(self, field: FieldDescriptor, value: Any, find: Any = None) -> str:
        """A field's value: messages as dicts, enums by name."""
        if is_map(field):
            entry: Any = field.message_type
            return _dict((key, self._one(entry.fields_by_name["value"], value[key], find)) for key in sorted(value))
        if not field.is_repeated:
            return self._one(field, value, find)
        every = [self._one(field, one, find) for one in value]
        return every[0] if len(every) == 1 and isinstance(value[0], str) else f"[{', '.join(every)}]"

    def _one(self, field: FieldDescriptor, value: Any, find: Any) -> str:
        if isinstance(value, Message):
            return _dict((inner.name, self.value(inner, one, find)) for inner, one in value.ListFields())
        if field.full_name in CONDITIONS and find is not None:
            code, used = python_condition(value, find)
            self.imported |= used
            return f"lambda o: {code}" if re.search(r"\bo[.\[]", code) and code[0] != '"' else code
        if field.full_name in _TENSORS and find is not None and (code := find("inputs", value)):
            return str(code)
        if field.enum_type is not None:
            return literal(field.enum_type.values_by_number[value].name)
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        return literal(value) if isinstance(value, str | bool) else scalar(field, value)


class _NodeWriter:
    """Writes one node as a function."""

    def __init__(self, whole: _FileWriter, node: NodeDefinition) -> None:
        self._whole, self._node, self._file = whole, node, whole.file
        self._names = whole.names.of(whole.file, node)
        self._is_root = node.name == whole.file.root
        self._is_ensemble = node.path == "ensemble_scheduling"
        self._kind = node.kind.name if node.kind is not None else "sequence"
        #: The root's own policy, beside that of the graph.
        self._own_policy = whole.policy(node.message) if self._is_root else []
        self._owner: Any = whole.file.message if self._is_root else node.message
        self._message = (
            whole.file.message.ensemble_scheduling if self._is_ensemble else getattr(node.message, self._kind)
        )
        taken = {*_TAKEN, *whole.functions.values()}
        inputs = [one.name for one in self._owner.input]
        if not self._is_root and not inputs:
            given = whole.given[node.name]
            inputs = [name for name, is_required in self._names.inputs.items() if is_required or name in given]
        self._parameters = {name: _word(name, taken) for name in dict.fromkeys(inputs)}
        names = [own.definition.name for own in self._names.steps]
        self._variables = [_word(f"{one}_step" if one in whole.functions.values() else one, taken) for one in names]
        self._used: set[str] = set()
        calls = {own.definition.path: own for own in (*self._names.steps, *self._names.shadows)}
        self._steps = [calls[f"{node.kind_path}.step[{index}]"] for index in range(len(self._message.step))]
        for own in (one for step in self._names.every_call() for one in step.chain()):
            if (called := own.definition.message.node) in whole.given:
                whole.given[called] |= {*self._bound(own)}

    def text(self) -> str:
        body = self._sequence() if self._kind == "sequence" else [f"return {self._constructor()}"]
        name = self._whole.functions[self._node.name]
        head = [_laid_out(self._decorator(name), ""), _laid_out(self._signature(name), "")]
        doc = _docstring(head_comment(self._file.positions.text)) if self._is_root else ""
        return "\n".join(head) + doc + "".join(f"\n    {_laid_out(line, '    ')}" for line in body)

    def _decorator(self, name: str) -> str:
        hidden = ("name", "platform", "input", "output", "node", "policy", "ensemble_scheduling", self._kind)
        own = self._file.name if self._is_root else self._node.name
        parts = [f"name={literal(own)}"] * (own != name)
        names = {word: literal(tensor) for tensor, word in self._parameters.items() if word != tensor}
        parts += [f"names={_dict(names.items())}"] * bool(names)
        parts += ['platform="ensemble"'] * self._is_ensemble
        parts += self._whole.fields(self._owner, hidden) + self._whole.policy(self._owner)
        if self._kind == "sequence" and not self._own_policy:
            parts += self._whole.fields(self._message, ("step",), self._find_output)
        return f"@weft.{'graph' if self._is_root else 'node'}" + (f"({', '.join(parts)})" if parts else "")

    def _signature(self, name: str) -> str:
        types = {one.name: one for one in self._owner.input}
        parameters, is_end = list[str](), True
        for tensor, word in reversed(self._parameters.items()):
            if tensor not in types:
                parameters.append(word)
                continue
            is_end &= types[tensor].optional  # a parameter with a default stands behind those without
            code = f"{word}: {self._whole.type_of(types[tensor], *['optional'] * is_end)}"
            parameters.append(f"{code} = None" if is_end else code)
        outputs = {one.name: self._whole.type_of(one) for one in self._owner.output}
        shown = ", ".join(f"{key}={one}" for key, one in outputs.items())
        gives = shown if all(map(_is_word, outputs)) else f"**{_dict(outputs.items())}"
        return (
            f"def {name}({', '.join(reversed(parameters))})" + (f" -> weft.Outputs({gives})" if outputs else "") + ":"
        )

    def _sequence(self) -> list[str]:
        steps = [
            (self._variables[self._index(own)] if own in self._names.steps else "", self._step(own))
            for own in self._steps
        ]
        if self._own_policy:
            self._used.update(variable for variable, _ in steps)
            parts = [variable or call for variable, call in steps]
            parts += self._whole.fields(self._message, ("step",), self._find_output)
            return [
                *self._assigned(step for step in steps if step[0]),
                f'return weft.construct("sequence", {", ".join(parts + self._own_policy)})',
            ]
        outputs = [one.name for one in self._owner.output] or [*self._names.outputs]
        givers = {self._names.last(name) for name in outputs}
        last, call = steps[-1] if steps else ("", "")
        if len(givers) == 1 and None not in givers:
            result = self._variables[givers.pop() or 0]
            if result == last and last not in self._used:
                return [*self._assigned(steps[:-1]), f"return {call}"]
            self._used.add(result)
        else:
            found = ((name, self._tensor(name, self._names.last(name))) for name in outputs)
            result = _dict((name, code) for name, code in found if code is not None)
        return [*self._assigned(steps), f"return {result}"]

    def _assigned(self, steps: Iterable[tuple[str, str]]) -> list[str]:
        return [f"{variable} = {call}" if variable in self._used else call for variable, call in steps]

    def _constructor(self) -> str:
        cases = {case: own for own in self._steps for case in own.definition.message.case}
        others = [own for own in self._steps if not own.definition.message.case]
        is_dict = len(cases) + len(others) == len(self._steps) and [
            own.definition.message.otherwise for own in others
        ] in ([], [True])
        if cases and is_dict and [*cases.values(), *others] == self._steps:
            parts = [_dict((case, self._step(own, ("case",))) for case, own in cases.items())]
            parts += self._whole.fields(self._message, ("step",), self._find)
            parts += [f"otherwise={self._step(own, ('otherwise',))}" for own in others]
        else:
            parts = [self._step(own) for own in self._steps] + self._whole.fields(self._message, ("step",), self._find)
        name = _CONSTRUCTORS.get(self._kind, self._kind)
        if name in ("each", "collect") and len(self._steps) > 1:  # shadows beside the step
            name, parts = "construct", [literal(self._kind), *parts]
        return f"weft.{name}({', '.join(parts + self._own_policy)})"

    def _step(self, own: StepNames, hidden: Collection[str] = ()) -> str:
        """The call of a step or a fallback."""
        message = own.definition.message
        find = partial(self._find, index=self._index(own))
        head, parts = self._target(own)
        parts = [*parts, *self._inputs(own, is_named=bool(parts))]
        parts += [f"name={literal(message.name)}"] * bool(message.name)
        parts += [f"outputs={_dict((key, literal(one)) for key, one in sorted(message.output_map.items()))}"] * bool(
            message.output_map
        )
        parts += self._whole.fields(message, {*_SAID, *hidden}, find) + self._whole.policy(message, find)
        if own.fallback is not None:
            parts.append(f"fallback={self._fallback(own, own.fallback)}")
        default = [f"default={self._elements('default', own)}"] * bool(message.default)
        if message.dependency == pb.Step.SOFT:
            return f"{head}({', '.join(parts)}).soft({', '.join(default)})"
        return f"{head}({', '.join(parts + default)})"

    def _fallback(self, own: StepNames, fallback: StepNames) -> str:
        """A model alone, which gets what the step gets, if that says it."""
        message, main = fallback.definition.message, own.definition.message
        is_alone = [field.name for field, _ in message.ListFields()] == ["model_name"] and not (
            main.input_map or main.constant
        )
        head, parts = self._target(fallback)
        return (
            head if is_alone and not parts and {*self._bound(fallback)} <= {*self._bound(own)} else self._step(fallback)
        )

    def _target(self, own: StepNames) -> tuple[str, list[str]]:
        """What is called, and further arguments that say it."""
        message = own.definition.message
        if message.node in self._whole.functions:
            return self._whole.functions[message.node], []
        imported = {getattr(one, "as"): one.graph for one in getattr(self._file.message, "import")}
        name = message.model_name or message.graph
        if isinstance(own.target, ModelTarget) if message.model_name else imported.get(name, name) == name:
            return f"m.{name}" if _is_word(name) else f"m[{literal(name)}]", []
        return "weft.step", [f"{'model_name' if message.model_name else 'graph'}={literal(name)}"]

    def _inputs(self, own: StepNames, *, is_named: bool) -> list[str]:
        message = own.definition.message
        bound = self._bound(own)
        raw = {name: tensor for name, tensor in sorted(message.input_map.items()) if name not in bound}
        if (
            not is_named
            and len(bound) == 1
            and [*self._whole.names.of_target(own.target).inputs] == [*bound]
            and not message.constant
        ):
            return [*bound.values()]
        words = {name for name in bound if _is_word(name) and name not in _KEYWORDS}
        parts = [f"{name}={code}" for name, code in bound.items() if name in words]
        others = {name: code for name, code in bound.items() if name not in words}
        parts += [f"inputs={_dict(others.items())}"] * bool(others)
        parts += [f"input_map={_dict((name, literal(tensor)) for name, tensor in raw.items())}"] * bool(raw)
        return parts + [f"constant={self._elements('constant', own)}"] * bool(message.constant)

    def _bound(self, own: StepNames) -> dict[str, str]:
        """Inputs of a step's target that get a tensor, and Python for it.

        Without those that only ``input_map`` can say: from a later step, or an optional one that the file requires.
        """
        found, index, needs = {}, self._index(own), self._whole.names.of_target(own.target).inputs
        for wire in own.wires:
            is_later = wire.producer is not None and wire.producer >= index
            is_plain = not wire.is_mapped or wire.tensor != wire.target_input or needs[wire.target_input]
            if wire.producer is not None:  # under its own name, a call says it as well
                is_plain |= self._names.steps[wire.producer].outputs.get(wire.tensor) == wire.tensor
            if not is_later and is_plain and (code := self._tensor(wire.tensor, wire.producer)) is not None:
                found[wire.target_input] = code
        return found

    def _elements(self, field: str, own: StepNames) -> str:
        """Constants or defaults: a dict of names and values if each is a single one, else messages."""
        key, values = "output" if field == "default" else "input", dict[str, str]()
        entries = getattr(own.definition.message, field)
        for entry in entries:
            held = [list(value) for one, value in entry.ListFields() if one.name != key]
            if len(held) != 1 or len(held[0]) != 1 or (isinstance(held[0][0], float) and not math.isfinite(held[0][0])):
                return self._whole.value(pb.Step.DESCRIPTOR.fields_by_name[field], entries)
            values[getattr(entry, key)] = literal(held[0][0])
        return _dict(values.items())

    def _index(self, own: StepNames) -> int:
        """Of the step, or of the one that it is a fallback of; a shadow counts as the first."""
        path = own.definition.path.partition(".fallback")[0]
        return next((i for i, one in enumerate(self._names.steps) if one.definition.path == path), 0)

    def _find_output(self, space: str, name: str) -> str | None:
        return self._find(space, name) if space == "outputs" else None

    def _find(self, space: str, name: str, index: int = 0) -> str | None:
        """Python for a name in a condition."""
        if space == "outputs":
            return f"o.{name}" if _is_word(name) else f"o[{literal(name)}]"
        if space == "inputs":
            return self._tensor(name, self._names.seen(name, index))
        asked = self._names.indexes.get(name, index)
        if asked >= index or self._kind != "sequence":
            return None
        self._used.add(self._variables[asked])
        return self._variables[asked]

    def _tensor(self, tensor: str, producer: int | None) -> str | None:
        """Python for a tensor of the node; None if there is none."""
        if producer is None:
            return self._parameters.get(tensor)
        variable = self._variables[producer]
        self._used.add(variable)
        is_plain = _is_word(tensor) and tensor not in _METHODS and tensor[0] != "_"
        return f"{variable}.{tensor}" if is_plain else f"{variable}[{literal(tensor)}]"


def _laid_out(code: str, indent: str, num_behind: int = 0) -> str:
    """Code on one line if it fits, else with the parts of its longest brackets one a line; ``num_behind`` follow."""
    room = WIDTH - len(indent)
    if len(code) + num_behind <= room:
        return code
    groups, starts, commas, at = list[tuple[int, int, list[int]]](), list[int](), [list[int]()], 0
    for part in _PART.findall(code):
        if part in "([{":
            starts.append(at)
            commas.append([])
        elif part in ")]}" and starts:
            start, own = starts.pop(), commas.pop()
            groups += [(start, at, own)] * (not starts and at - start > 1)
        elif part == ", ":
            commas[-1].append(at)
        at += len(part)
    if not groups:
        return code
    longest = max(groups, key=lambda group: group[1] - group[0])
    start, end, own = longest if longest[0] < room else groups[0]
    parts = [code[first : last - 2] for first, last in pairwise([start + 1, *(comma + 2 for comma in own), end + 2])]
    deeper = f"{indent}    "
    lines = "".join(f"{deeper}{_laid_out(part, deeper, len(','))},\n" for part in parts)
    return f"{code[: start + 1]}\n{lines}{indent}{_laid_out(code[end:], indent, num_behind)}"


def _docstring(comment: Sequence[str]) -> str:
    lines = [line.replace("\\", "\\\\").replace('"""', '\\"\\"\\"') for line in comment]
    if len(lines) == 1 and not lines[0].endswith('"'):
        return f'\n    """{lines[0]}"""'
    is_flush = any(line[:1].strip() for line in lines[1:])  # else the lines lose their indent to that of the docstring
    more = [f"    {line}".rstrip() for line in lines[1:]]
    return (
        "\n".join(["", f'    """{"" if is_flush else chr(10) + "    "}{lines[0]}', *more, '    """']) if lines else ""
    )


def _word(name: str, taken: set[str]) -> str:
    """A Python name like ``name`` that is not taken; it is taken then."""
    base = re.sub(r"\W", "_", name, flags=re.ASCII)
    base = word = f"_{base}" if base[:1].isdigit() else base
    number = 1
    while word in taken:
        number += 1
        word = f"{base}_{number}"
    taken.add(word)
    return word


def _is_word(name: str) -> bool:
    return name.isidentifier() and name.isascii() and not keyword.iskeyword(name)


def _dict(items: Iterable[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{literal(key)}: {code}" for key, code in items) + "}"
