"""What an editor shows at a place in a file: completions, documentation, definitions."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor

from weft.base.repository.layout import CONFIG_FILENAME
from weft.base.text.pbtxt_outline import Outline
from weft.base.text.pbtxt_scan import TOKEN
from weft.base.text.pbtxt_writer import CONDITIONS
from weft.language.compiler.name_table import NameTable
from weft.language.compiler.names import NodeNames, StepNames, describe
from weft.language.compiler.resolve import ModelTarget, UnknownTarget
from weft.language.syntax.file import GraphFile
from weft.language.types.expression import FUNCTIONS, MAPS, REQUEST_FIELDS, TENSORS
from weft.tools.lsp.workspace import Texts, Workspace, message_of
from weft.tools.offline import backends_of, model_folders, repository_of
from weft_protos.graph_pb2 import Graph

_TARGETS = ("Step.model_name", "Step.node", "Step.graph", "Import.graph", "Graph.root")
_TYPES = {number: name[5:].lower() for name, number in vars(FieldDescriptor).items() if name.startswith("TYPE_")}
_BEFORE = re.compile(r"(?:\b(inputs|outputs|steps|request)\.)?(\w*)\Z")
_MAX_WORD = 256


class Completion(NamedTuple):
    """What may be written: ``text`` in place of what is between ``start`` and the cursor; ``$0`` is the next cursor."""

    label: str
    text: str
    start: int
    detail: str
    comment: str


@cache
def _comments() -> Mapping[str, str]:
    """Comments of the ``.proto`` files, by full name."""
    table: dict[str, str] = json.loads((resources.files("weft_protos") / "comments.json").read_text("utf-8"))
    return table


class Place:
    """An offset in an open file. Blocks: reads what is around the file.

    Args:
        texts: Of the open files.

    Attributes:
        text: Of the file.
    """

    def __init__(self, workspace: Workspace, path: Path, texts: Texts, offset: int) -> None:
        self._workspace, self._path, self._texts, self._offset = workspace, path, texts, offset
        text = self.text = texts[path]
        self._message: Any = message_of(path, text)
        self._blocks = Outline(text, self._message).blocks
        around = [block for block in self._blocks if block.start < offset <= block.end]
        self._block = around[-1]
        self._path_here = next((block.path for block in reversed(around) if block.path), "")
        types = (given.type for given in self._block.given if 0 <= given.start <= offset <= given.end)
        self._type = next(types, None)  # of the field whose value is here
        self._kind = ".".join(self._type.full_name.split(".")[-2:]) if self._type is not None else ""
        self._is_condition = self._type is not None and self._type.full_name in CONDITIONS
        self._token = next((match for match in TOKEN.finditer(text) if match.start() < offset <= match.end()), None)
        before = _BEFORE.search(text, max(0, offset - _MAX_WORD), offset)
        self._space, word = before.groups("") if before is not None else ("", "")
        self._start = offset - len(word)
        self._word = word + re.split(r"\W", text[offset : offset + _MAX_WORD], maxsplit=1)[0]
        self._is_text = self._token is not None and self._token.lastgroup == "string"
        if self._token is not None and self._is_text and not self._is_condition:
            self._start, self._word = self._token.start() + 1, self._token[0].strip("\"'")

    def completions(self) -> Iterable[Completion]:
        """What may stand here; nothing in a comment, nor behind the quote that ends a text."""
        token = self._token[0] if self._token is not None else ""
        is_over = self._token is not None and self._token.end() == self._offset and token[-1:] == token[:1] != token
        if token.startswith("#") or (self._is_text and is_over):
            return
        if self._type is None:
            yield from () if self._is_text else self._fields()
            return
        quote = '"' if self._type.cpp_type == FieldDescriptor.CPPTYPE_STRING and not self._is_text else ""
        enum = f"{self._type.enum_type.full_name}." if self._type.enum_type else ""
        for name, detail in self._values(self._type).items():
            comment = _comments().get(enum + name, "")
            yield Completion(name, quote + name + quote, self._start, detail, comment)

    def _fields(self) -> Iterator[Completion]:
        there = {given.name.text for given in self._block.given if given.name.offset != self._start}
        for field in self._block.type.fields if self._block.type is not None else ():
            rivals = field.containing_oneof.fields if field.containing_oneof else [field]
            if field.is_repeated or not any(rival.name in there for rival in rivals):
                behind = " { $0 }" if field.message_type else ': "$0"' if _type_name(field) == "string" else ": $0"
                comment = _comments().get(field.full_name, "")
                yield Completion(field.name, field.name + behind, self._start, _type_name(field), comment)

    def _values(self, field: FieldDescriptor) -> Mapping[str, str]:
        """Known values of a field, with what they are; of a condition its words."""
        if field.enum_type:
            return dict.fromkeys(field.enum_type.values_by_name, field.enum_type.name)
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return {"true": "", "false": ""}
        match self._space or "word" if self._is_condition and self._is_text else self._kind:
            case "word":
                return dict.fromkeys((*TENSORS, *MAPS, "steps", "request"), "") | dict.fromkeys(FUNCTIONS, "function")
            case "request":
                return dict.fromkeys(REQUEST_FIELDS, "of the request")
            case "inputs" | "InputMapEntry.value" | "Map.over" | "Map.lengths" | "CarryEntry.value":
                return dict.fromkeys([*self._node.inputs, *self._node.producers], "tensor")
            case "outputs" | "CarryEntry.key" | "Default.output":
                return dict.fromkeys(self._step.outputs.values() if self._step else self._node.producers, "tensor")
            case "Combine.output" | "Combine.from" | "Collect.output" | "Collector.join":
                return dict.fromkeys((name for one in self._node.steps for name in one.outputs.values()), "tensor")
            case "OutputMapEntry.value":
                return dict.fromkeys([*self._node.outputs, *sorted(self._node.read)], "tensor")
            case "steps" | "Step.after" | "Sequence.answer_after":
                return dict.fromkeys(self._node.indexes, "step")
            case "Step.node" | "Graph.root" if self._names is not None:
                return dict.fromkeys(self._names[0].nodes, "node")
            case "Step.model_name" | "Step.graph" | "Import.graph":
                catalog, graphs = self._workspace.around(self._path, self._texts)
                models = catalog.names() if catalog is not None and self._kind == "Step.model_name" else ()
                found = dict.fromkeys(graphs.names() if graphs is not None else (), "graph")
                return found | dict.fromkeys(models, "model")
            case "InputMapEntry.key" | "Constant.input":
                return self._tensors()[0]
            case "OutputMapEntry.key":
                return self._tensors()[1]
            case "InputsEntry.key" | "BatchInput.source_input":
                return dict.fromkeys((tensor.name for tensor in self._message.input), "input")
            case "ModelConfig.backend":
                return dict.fromkeys(backends_of(self._path.parent.parent.name), "backend")
        return {}

    def hover(self) -> str:
        """Markdown about the field, value or target here; "" if there is nothing to say."""
        for name, type, *_ in self._block.given:
            if type is not None and name.offset <= self._offset <= name.offset + len(name.text):
                return f"`{name.text}`: {_type_name(type)}\n\n{_comments().get(type.full_name, '')}"
        enum = self._type.enum_type if self._type is not None else None
        if enum is not None:
            return _comments().get(f"{enum.full_name}.{self._word}", "")
        if self._step is None or self._kind not in _TARGETS or isinstance(self._step.target, UnknownTarget):
            return ""
        lines = [describe(self._step.target)]
        for what, tensors in zip(("inputs", "outputs"), self._tensors(), strict=True):
            lines += [f"\n{what}\n", *(f"- `{name}` {detail}" for name, detail in tensors.items())]
        return "\n".join(lines)

    def definition(self) -> tuple[Path, int] | None:
        """File and offset of what is named here: a model, graph, node or step; None if it is none that is known."""
        kind = self._space if self._is_condition else self._kind
        if kind in ("steps", "Step.after", "Sequence.answer_after"):
            steps = (step.definition for step in self._node.steps if step.definition.name == self._word)
            return next((self._offset_of(step.path) for step in steps), None)
        if kind not in _TARGETS or self._names is None:
            return None
        if kind in ("Step.node", "Graph.root"):
            node = self._names[0].nodes.get(self._word)
            return None if node is None else self._offset_of(node.path)
        place, (_, graphs) = repository_of(self._path), self._workspace.around(self._path, self._texts)
        if kind == "Step.model_name" and place is not None and (found := model_folders(place).get(self._word)):
            files = [found[1] / CONFIG_FILENAME, *sorted(found[1].glob("[0-9]*/*"))]
            return next(((file, 0) for file in files if file.is_file()), None)
        graph = graphs.find(self._word, "") if graphs is not None else None
        return None if graph is None else (Path(graph.file), 0)

    def _offset_of(self, path: str) -> tuple[Path, int] | None:
        starts = (block.start for block in self._blocks if block.path == f"{path}.")
        return next(((self._path, start) for start in starts), None)

    def _tensors(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Inputs and outputs of the step's target, with types if it is a model."""
        if self._step is None or self._names is None:
            return {}, {}
        if isinstance(target := self._step.target, ModelTarget):
            inputs, outputs = (
                {one.name: f"{one.datatype}{list(one.dims)}{' optional' if one.is_optional else ''}" for one in specs}
                for specs in (target.signature.inputs, target.signature.outputs)
            )
            return inputs, outputs
        known = self._names[1].of_target(target)
        return dict.fromkeys(known.inputs, "input"), dict.fromkeys(known.outputs, "output")

    @cached_property
    def _names(self) -> tuple[GraphFile, NameTable] | None:
        is_graph = isinstance(self._message, Graph)
        return self._workspace.names(self._path, self._message, self._texts) if is_graph else None

    @cached_property
    def _node(self) -> NodeNames:
        """Names of the node here; outside of nodes there are none."""
        if self._names is None:
            return NodeNames()
        file, table = self._names
        nodes = (node for node in file.all_nodes if self._path_here.startswith(f"{node.path}."))
        return next((table.of(file, node) for node in nodes), NodeNames())

    @cached_property
    def _step(self) -> StepNames | None:
        """Names of the step here."""
        steps = [step for call in self._node.every_call() for step in call.chain()]
        around = [step for step in steps if self._path_here.startswith(f"{step.definition.path}.")]
        return max(around, key=lambda step: len(step.definition.path), default=None)


def _type_name(field: FieldDescriptor) -> str:
    named = field.message_type or field.enum_type
    return named.name if named else _TYPES[field.type]
