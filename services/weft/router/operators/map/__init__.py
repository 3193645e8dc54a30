"""The map: runs one step for every row of lists whose length depends on the data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from typing_extensions import override

from weft.base.tensors import INTEGERS, WireTensor
from weft.base.text.pbtxt import suggestion
from weft.language.compiler.names import NodeNames, StepNames, describe, narrowed
from weft.language.compiler.nodes import NodeBuilder, NodeKind
from weft.language.compiler.resolve import ModelTarget, NodeTarget, Target, UnknownTarget
from weft.language.compiler.scope import ResponseCount, Scope
from weft.language.compiler.state import check_rows, targets_of
from weft.language.compiler.uses import declared_uses
from weft.language.plan import DefaultPlan, NodePlan, StepPlan
from weft.language.pruning import slots_read
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft.language.types.signatures import TensorType, dims_fit
from weft.router.operators.map.lists import CollectPlan, ListInput, MapSettings, WholeInput
from weft.router.operators.map.run import MapPlan
from weft_protos import graph_pb2 as pb

__all__ = ["MapKind", "MapPlan"]


class MapKind(NodeKind):
    """The map in graph files: fields, checks, compilation."""

    plan = MapPlan

    @override
    def check(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        """Report unnamed lists (G027), a number of steps other than one (G027), and invalid collects (G029, G005)."""
        message, path = node.message.map, node.kind_path
        if not message.over:
            text = f"map '{node.name}' has no 'over'; name the inputs whose rows its step gets, for example"
            report.error("G027", file, path, f'{text} over: "CROPS"')
        for i, name in enumerate(message.over):
            if name in message.over[:i]:
                report.error("G027", file, f"{path}.over[{i}]", f"'{name}' is named already; leave one out")
            elif name == message.lengths:
                text = f"'{name}' says how many rows of the lists count, so it is no list itself; leave it out here"
                report.error("G027", file, f"{path}.over[{i}]", text)
        steps = [step for step in node.steps if not step.is_shadow]
        if len(steps) > 1:
            text = (
                f"map '{node.name}' has {len(steps)} steps, and runs one; put them into a node, for example a "
                'sequence, and let its step run that: step { node: "..." }'
            )
            report.error("G027", file, steps[1].path, text)
        _check_collects(file, node, report)

    @override
    def why_no_stream(self, node: NodeDefinition) -> str:
        """Its step may stream, if the map collects no lists."""
        return ""

    @override
    def tensors_read(self, node: NodeDefinition, names: NodeNames) -> set[str]:
        return set(node.message.map.over)

    @override
    def tensors_needed(self, node: NodeDefinition, needed: set[str]) -> set[str]:
        """The lists and their lengths, except those that the step's ``when`` tests."""
        tested = {tensor for step in node.steps if not step.is_shadow for tensor in narrowed(step)}
        return {*node.message.map.over, node.message.map.lengths} - {"", *tested}

    @override
    def inputs_read(self, node: NodeDefinition) -> set[str]:
        return {node.message.map.lengths} - {""}

    @override
    def outputs(self, node: NodeDefinition, names: NodeNames) -> Iterator[str]:
        tensors = dict.fromkeys(tensor for step in names.steps for tensor in step.outputs.values())
        yield from tensors
        yield from (name for tensor in tensors if (name := lengths_name(node, tensor)))
        yield from [node.message.map.index] * (node.message.map.index not in ("", *tensors))

    @override
    def build(
        self, builder: NodeBuilder, scope: Scope, declared: Mapping[str, TensorType]
    ) -> tuple[NodePlan | None, dict[str, TensorType]]:
        index = next((index for index, step in enumerate(scope.node.steps) if not step.is_shadow), -1)
        if index < 0:  # reported
            return None, {name: TensorType.unknown("a map without a step") for name in scope.names.outputs}
        return _MapBuilder(builder, scope, index).build()


#: Chunks at once where the file does not say.
DEFAULT_INFLIGHT = 8


def _check_collects(file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
    seen: set[str] = set()
    named = {collect.output for collect in node.message.map.collect}
    for i, collect in enumerate(node.message.map.collect):
        path = f"{node.kind_path}.collect[{i}]"
        if not collect.output:
            report.error(
                "G029", file, path, "the 'collect' has no 'output'; name the output of the step that it is for"
            )
            continue
        if collect.output in seen:
            report.error("G029", file, f"{path}.output", f"'{collect.output}' has a 'collect' already; leave one out")
            continue
        seen.add(collect.output)
        why = "with STACK, where every row has one place; it belongs to LIST"
        report.refuse(file, path, [("lengths", bool(collect.lengths) and collect.method != pb.Collect.LIST)], why)
        lengths = lengths_name(node, collect.output)
        if lengths in named:
            where = f"{path}.lengths" if collect.lengths else path
            text = f"the lengths of '{collect.output}' are named '{lengths}', as another output; give them another name"
            report.error("G005", file, where, f'{text}: lengths: "..."')
        named |= {lengths} - {""}


def lengths_name(node: NodeDefinition, tensor: str) -> str:
    """The output with the row lengths of ``tensor``, if that is a LIST; else ""."""
    for collect in node.message.map.collect:
        if collect.output == tensor and collect.method == pb.Collect.LIST:
            return collect.lengths or f"{tensor}_LENGTHS"
    return ""


class _MapBuilder:
    def __init__(self, builder: NodeBuilder, scope: Scope, index: int) -> None:
        self._builder = builder
        self._scope = scope
        self._index = index
        self._message = scope.node.message.map
        self._names: StepNames = scope.names.steps[index]
        self._is_stream = False
        self._lists = {
            name: self._list_dims(name, known) for name in self._message.over if (known := scope.inputs.get(name))
        }

    def build(self) -> tuple[NodePlan | None, dict[str, TensorType]]:
        scope, wanted = self._scope, self._scope.call.wanted
        if not self._message.over:  # reported; without lists nothing is known of what the step gets
            return None, {name: TensorType.unknown("a map without lists") for name in scope.names.outputs}
        self._check_lists()
        rows = self._rows_scope()
        tensors = dict.fromkeys(self._names.outputs.values())
        answers = {name: rows.new_slot(name) for name in tensors if {name, self._lengths_of(name)} & wanted}
        slots = {name: rows.new_slot(name) for name in scope.names.outputs if name in wanted}
        required = [name for name in answers if {name, self._lengths_of(name)} & scope.call.required]
        built = [
            self._builder.step(rows, index, *((answers, required) if index == self._index else ({},)))
            for index in range(len(scope.node.steps))
        ]
        scope.num_slots = rows.num_slots
        given = built[self._index].outputs
        for name, slot in answers.items():
            scope.note(slot, name, given[name])
        self._is_stream = self._index in scope.streaming
        if self._is_stream:
            scope.streaming[self._index] = ResponseCount.MANY
        types = dict(self._stream_types(given) if self._is_stream else self._types(given))
        for name, slot in slots.items():
            scope.note(slot, name, types.get(name, TensorType.unknown("a step")))
        self._check_collects(given)
        self._check_stream(given)
        check_rows(scope, self._builder.names, self._builder.report, "a map runs rows at the same time", "G030")
        plans = [one.plan for one in built if one.plan is not None]
        if len(plans) != len(built):
            return None, types
        if not self._builder.report.has_errors:
            self._check_read(plans, rows)
        settings = self._settings(plans, rows, answers, slots)
        return replace(scope.node_plan(MapPlan, plans, slots), settings=settings), types

    def _settings(
        self, plans: Sequence[StepPlan], rows: Scope, answers: Mapping[str, int], slots: Mapping[str, int]
    ) -> MapSettings:
        scope, step = self._scope, plans[self._index]
        read = {slot for plan in plans for slot in slots_read(plan)}
        lists, whole = [], []
        for name, slot in rows.slots.items():
            if name in self._lists:
                lists.append(ListInput(name, scope.slots[name], slot, len(self._lists[name])))
            elif slot in read:
                whole.append(WholeInput(scope.slots[name], slot, len(scope.inputs[name].dims)))
        defaults = {default.slot: _row_of(default) for default in step.defaults}
        inflight = self._message.max_inflight or DEFAULT_INFLIGHT
        lengths = self._message.lengths
        return MapSettings(
            over=tuple(lists),
            whole=tuple(whole),
            collects=tuple(
                CollectPlan(
                    name,
                    slot,
                    slots.get(name, -1),
                    self._lengths_of(name) != "",
                    slots.get(self._lengths_of(name), -1),
                    scope.specs[slot],
                    defaults.get(slot),
                )
                for name, slot in answers.items()
            ),
            chunk_rows=1 if self._is_stream else max(rows.max_batch_size, 1),
            max_rows=self._message.max_rows,
            max_inflight=min(inflight, step.max_inflight or inflight),
            lengths=(lengths, scope.slots[lengths]) if lengths in scope.slots else None,
            is_batched=rows.is_batched,
            index_slot=slots.get(self._message.index, -1),
        )

    def _rows_scope(self) -> Scope:
        """The node as its steps' targets see it: rows instead of lists."""
        scope = self._scope
        rows = replace(
            scope,
            inputs={},
            slots={},
            max_batch_size=chunk_size(scope.file, scope.node, scope.names, self._index, self._builder.report),
            around=scope,
        )
        is_complete = bool(self._lists) and self._lists.keys() >= set(
            self._message.over
        )  # else: reported, cause of all
        for name, known in scope.inputs.items():
            row = known
            if not is_complete:
                row = known.forgotten().absent_like(known)
            elif name in self._lists:
                origin = f"the rows of '{name}', {known.origin}"
                row = replace(known, dims=self._lists[name][1:] or (1,), origin=origin)
            rows.inputs[name] = replace(row, is_batched=rows.is_batched) if row.is_known else row
            rows.slots[name] = rows.new_slot(name, rows.inputs[name])
        return rows

    def _list_dims(self, name: str, known: TensorType) -> tuple[int, ...]:
        """Dims from the list's on. In a graph without batch dimension, a model's batch may be the list."""
        if known.is_batched and not self._scope.file.is_batched:
            uses = declared_uses(self._names, is_batched=False)
            fed = [uses.get(wire.target_input) for wire in self._names.wires if wire.tensor == name]
            if any(dims_fit(known.dims, used.dims) for used in fed if used is not None):
                return (-1, *known.dims)
        return known.dims

    def _types(self, given: Mapping[str, TensorType]) -> Iterator[tuple[str, TensorType]]:
        is_batched = self._scope.file.is_batched
        sizes = {dims[0] for dims in self._lists.values() if dims}
        size = sizes.pop() if len(sizes) == 1 else -1
        for name, known in given.items():
            lengths = self._lengths_of(name)
            if known.is_known:
                dims = (-1, *known.dims[1:]) if lengths else (size, *known.dims)
                yield name, replace(known, dims=dims, is_batched=is_batched)
            else:
                yield name, known
            if lengths:
                origin = f"lengths of {known.origin}"
                yield lengths, replace(known, datatype="INT64", dims=(size,), is_batched=is_batched, origin=origin)

    def _stream_types(self, given: Mapping[str, TensorType]) -> Iterator[tuple[str, TensorType]]:
        is_batched = self._scope.file.is_batched
        for name, known in given.items():
            origin = f"{known.origin}, one response of one row, as the step streams"
            yield name, replace(known, is_batched=is_batched, origin=origin) if known.is_known else known
        if name := self._message.index:
            origin = f"the index of map '{self._scope.node.name}'"
            yield name, TensorType("INT64", (1 + is_batched,), is_batched, is_optional=False, origin=origin)

    def _check_stream(self, given: Mapping[str, TensorType]) -> None:
        node, report, path, message = self._scope.node, self._builder.report, self._scope.node.kind_path, self._message
        if self._is_stream:
            why = "where the step streams: each response of each row is one of the map"
            fields = [("max_batch_size", message.max_batch_size > 0)]
            report.refuse(self._scope.file, path, fields, f"{why}, and rows are sent one by one")
            for i in range(len(message.collect)):
                report.refuse(self._scope.file, f"{path}.collect[{i}]", [("output", True)], why)
        elif message.index and not self._names.is_open:
            why = "where the step gives one answer for each row: they are in the order of the rows"
            report.refuse(self._scope.file, path, [("index", True)], why)
        if message.index in given:
            text = f"the index of map '{node.name}' is named as an output of its step; give it another name"
            report.error("G005", self._scope.file, f"{path}.index", text)

    def _lengths_of(self, tensor: str) -> str:
        return lengths_name(self._scope.node, tensor)

    def _check_lists(self) -> None:
        scope, report, message = self._scope, self._builder.report, self._message
        path, is_open = scope.node.kind_path, self._names.is_open
        certain = self._builder.narrowing(scope, scope.node.steps[self._index])
        read = [wire.tensor for names in scope.names.steps for wire in names.wires]
        lengths = [("lengths", message.lengths)] if message.lengths else []
        for where, name in [*((f"over[{i}]", name) for i, name in enumerate(message.over)), *lengths]:
            known = certain.get(name) or scope.inputs.get(name)
            if known is None:
                if not is_open:
                    text = f"map '{scope.node.name}' has no input '{name}' whose rows its step could get"
                    if where == "lengths":
                        text = f"map '{scope.node.name}' has no input '{name}'"
                    if name in scope.call.visible:
                        text += self._input_cure(name)
                    else:
                        text += suggestion(name, dict.fromkeys([*read, *scope.inputs]))
                    report.error("G028", scope.file, f"{path}.{where}", text)
                continue
            if known.is_optional:
                cure = known.absence or "declare it without 'optional: true'"
                text = f"'{name}' of map '{scope.node.name}' may be absent; it comes from {known.origin}; {cure}"
                report.error(
                    "G010", scope.file, f"{path}.{where}", f"{text}, or give the step when: 'has(inputs.{name})'"
                )
            if where == "lengths" and known.is_known and not _counts(known):
                text = f"lengths '{name}' are {known}, from {known.origin}; they must be integers, dims: [ 1 ]"
                report.error("G028", scope.file, f"{path}.{where}", text)
        fixed = {name: dims[0] for name, dims in self._lists.items() if dims and dims[0] > 0}
        if len(set(fixed.values())) > 1:
            shown = ", ".join(f"{name} has {size} rows" for name, size in fixed.items())
            text = f"the lists of map '{scope.node.name}' have as many rows as one another; {shown}"
            report.error("G008", scope.file, f"{path}.over[0]", text)

    def _input_cure(self, name: str) -> str:
        unmapped = [wire.target_input for wire in self._names.wires if wire.target_input == wire.tensor]
        key = unmapped[0] if unmapped else "..."
        return f'; no input of the step takes it: input_map {{ key: "{key}" value: "{name}" }}'

    def _check_read(self, plans: Sequence[StepPlan], rows: Scope) -> None:
        scope, read = self._scope, {slot for plan in plans for slot in slots_read(plan)}
        for i, name in enumerate(self._message.over):
            if name in rows.slots and rows.slots[name] not in read:
                taken = [wire.tensor for wire in self._names.wires]
                text = f"the step of map '{scope.node.name}' does not read '{name}', so that it gets no rows of it"
                report = self._builder.report
                report.error("G028", scope.file, f"{scope.node.kind_path}.over[{i}]", text + suggestion(name, taken))

    def _check_collects(self, given: Mapping[str, TensorType]) -> None:
        scope, report, message = self._scope, self._builder.report, self._message
        for i, collect in enumerate(message.collect):
            path = f"{scope.node.kind_path}.collect[{i}].output"
            known = given.get(collect.output)
            if known is None:
                if collect.output and not self._names.is_open:
                    text = f"the step of map '{scope.node.name}' gives no '{collect.output}'"
                    report.error("G029", scope.file, path, text + suggestion(collect.output, given))
            elif known.is_known and not known.dims and self._lengths_of(collect.output):
                text = (
                    f"rows of '{collect.output}' have no dimension along which they could follow one another; use STACK"
                )
                report.error("G029", scope.file, path, text)
            lengths = self._lengths_of(collect.output)
            if lengths in given and all(lengths != one.output for one in message.collect):
                text = f"the lengths of '{collect.output}' are named '{lengths}', as an output of the step"
                report.error("G005", scope.file, path, f'{text}; give them another name: lengths: "..."')


def _counts(known: TensorType) -> bool:
    return known.datatype in INTEGERS and dims_fit(known.dims, (1,))


def _row_of(default: DefaultPlan) -> WireTensor:
    datatype, shape, data = default.tensor
    return WireTensor(datatype, shape[1:] if default.is_batched else shape, data)


def chunk_size(file: GraphFile, node: NodeDefinition, names: NodeNames, index: int, report: GraphReport) -> int:
    """Most rows in a chunk: the smallest batch limit of the step's target, fallbacks and shadows; 0: no batching."""
    own = _batch(names.steps[index].target)
    targets = [one for step in names.steps for one in targets_of(step) if not isinstance(one, UnknownTarget)]
    given = node.message.map.max_batch_size
    limits = [(max(_batch(one), 1), describe(one)) for one in targets]
    limit, target = min(limits, key=lambda pair: pair[0], default=(max(given, 1), ""))
    if given > limit:
        takes = f"batches of {limit} rows at most" if limit > 1 else "one row at a time"
        text = f"map '{node.name}' has chunks of {given} rows, but {target} takes {takes}; lower 'max_batch_size'"
        report.error("G009", file, f"{node.kind_path}.max_batch_size", text)
    return min(given or limit, limit) if own > 0 else 0


def _batch(target: Target) -> int:
    if isinstance(target, ModelTarget):
        return target.signature.max_batch_size
    return target.file.message.max_batch_size if isinstance(target, NodeTarget) else 0
