"""Nodes: a constructor for each kind, and ``@node``, whose function is one."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

from weft.authoring.faults import Place, fault, here
from weft.authoring.fields import check_known, fill, known_fields, plain_name
from weft.authoring.steps import POLICY_FIELDS, Draft, Specs, Step, Target
from weft.authoring.tensors import Outputs, signature_of
from weft.authoring.tracing import Answers, Scope, Symbol, current_scope, running, steps_in
from weft.base.signature import TensorSpec
from weft.base.text.pbtxt import suggestion
from weft_protos import graph_pb2 as pb

#: Message of each kind of node, by its field in the ``oneof kind`` of ``Node``.
KINDS = {field.name: field.message_type for field in pb.Node.DESCRIPTOR.oneofs_by_name["kind"].fields}
_NODE_FIELDS = known_fields(pb.Node.DESCRIPTOR, but=KINDS) | POLICY_FIELDS


def construct(kind: str, *steps: Step, **fields: Any) -> Step:
    """A node of any kind of ``graph.proto``, made of these steps, and the step that runs it.

    Args:
        kind: Name of its field in ``Node``: ``switch``.
        fields: Of the kind's message, of ``Node`` (``name=``: it stays a node of its own) and of ``Policy``.
    """
    scope, place = _scope_for(f"weft's {kind}"), here()
    if kind not in KINDS:
        raise fault("G001", f"there is no kind of node '{kind}'{suggestion(kind, KINDS)}")
    own = split_fields(fields, f"a {kind}", kind)
    name = own[1].pop("name", "")
    node = Scope(scope.trace, kind, name or scope.trace.free_name(kind), place, scope, bool(name), *own)
    scope.trace.taken.add(node.name)
    for step in [*steps, *steps_in(node.fields)]:
        if not isinstance(step, Step):
            cure = "call it with its inputs" if isinstance(step, Target) else "give calls: m.NAME(tensor)"
            raise fault("G025", f"{step!r} is no step of a {kind}; {cure}")
        step._move(node, f"node '{node.name}'")
    node.steps += steps
    node.outputs = _outputs_of(node)
    return _called(node, scope, place)


def cascade(*steps: Step, accept: Any = None, **fields: Any) -> Step:
    """Steps in order until the ``accept`` of one holds; the given one is that of every step but the last.

    Args:
        accept: A condition over the step's outputs: ``lambda o: o.PROBS.max() >= 0.8``. A step may have its own.
        fields: Of ``Cascade`` (``per_row``), ``Node`` and ``Policy``.
    """
    for step in steps[:-1] if accept is not None else ():
        if "accept" not in step._fields:
            step.options(accept=accept)
    return construct("cascade", *steps, **fields)


def switch(*branches: Any, otherwise: Step | None = None, **fields: Any) -> Step:
    """The first branch that holds gives the outputs.

    Args:
        branches: A dict from values of ``on``, or tuples of them, to steps; or pairs of a condition and a step.
        otherwise: The step where none holds; without one such a request fails.
        fields: Of ``Switch`` (``on``, ``per_row``), ``Node`` and ``Policy``.
    """
    steps: list[Step] = []
    for branch in branches:
        if isinstance(branch, Mapping):
            for values, step in branch.items():
                steps.append(step.options(case=[*values] if isinstance(values, tuple) else [values]))
        elif isinstance(branch, tuple) and len(branch) == 2:
            steps.append(branch[1].when(branch[0]))
        else:
            steps.append(branch)
    if otherwise is not None:
        steps.append(otherwise.options(otherwise=True))
    return construct("switch", *steps, **fields)


def split(*steps: Step, **fields: Any) -> Step:
    """One step, drawn by its share, gives the outputs.

    Args:
        steps: With shares: ``weft.weigh(90, m.digits_cnn(pixels), name="A")``.
        fields: Of ``Splitter`` (``sticky_by``, ``salt``, ``bandit``), ``Node`` and ``Policy``.
    """
    return construct("splitter", *steps, **fields)


def weigh(weight: float, step: Step, **fields: Any) -> Step:
    """Give a step its share in a splitter, or its weight in an ensemble, and any other fields of ``Step``."""
    return step.options(weight=weight, **fields)


def ensemble(*steps: Step, **fields: Any) -> Step:
    """All steps at once; ``combine`` makes the outputs of their answers.

    Args:
        fields: Of ``Ensemble`` (``combine=[{"output": "LABEL", "method": "VOTE"}]``, ``quorum``, ``straggler_ms``),
            ``Node`` and ``Policy``. ``custom`` in a combine takes a model, or a call of one.
    """
    return construct("ensemble", *steps, **fields)


def each(target: Any, *, over: Any, **fields: Any) -> Step:
    """One step for every row of lists whose length the data decides.

    Args:
        target: A call that reads the lists; a model or node that takes one row of each; or a function that does, which
            becomes a node.
        over: The lists: a tensor, or several of one length.
        fields: Of ``Map`` (``max_rows``, ``max_inflight``, ``collect``, ``lengths``), ``Node`` and ``Policy``.
    """
    lists = over if isinstance(over, Sequence) and not isinstance(over, str) else [over]
    if inspect.isfunction(target):
        rows = [_row_of(one.spec) if isinstance(one, Symbol) else None for one in lists]
        target = _inline(target, lists, {}, {}, {}, rows)
    return construct("map", target if isinstance(target, Step) else target(*lists), over=lists, **fields)


def collect(step: Step, **fields: Any) -> Step:
    """Responses of a step that streams, put together to pieces.

    Args:
        fields: Of ``Collector`` (``by="SENTENCE"``, ``count``, ``join``, ``max_bytes``), ``Node`` and ``Policy``.
    """
    return construct("collector", step, **fields)


def loop(function: Callable[..., Any], *tensors: Any, **keywords: Any) -> Step:
    """A sequence that runs again while a condition holds.

    Args:
        function: Its steps; gets the tensors and returns what a round gives.
        keywords: Of ``Loop``: ``while_=lambda o: o.SCORE[0] < 0.9``, ``max_iterations``, ``carry={"DRAFT": "TEXT"}``;
            inputs of the function; fields of ``Sequence``, ``Node`` and ``Policy``.
    """
    given = {plain_name(name): value for name, value in keywords.items()}
    names = known_fields(pb.Loop.DESCRIPTOR)
    inputs = {name: given.pop(name) for name in inspect.signature(function).parameters if name in given}
    fields = {name: value for name, value in given.items() if name not in names}
    own, node_fields = split_fields(fields, "a loop", "sequence")
    return _inline(
        function, tensors, inputs, {**own, "loop": {n: v for n, v in given.items() if n in names}}, node_fields
    )


def answer_after(*steps: Step) -> None:
    """The node whose function runs answers after these steps have ended, though nothing may read what they give."""
    scope = _scope_for("answer_after")
    scope.fields["answer_after"] = [*scope.fields.get("answer_after", []), *steps]


class NodeFunction:
    """A node of its own, as ``@weft.node`` makes it: called in graphs, it is a step that runs the node."""

    def __init__(self, function: Callable[..., Any], fields: Mapping[str, Any]) -> None:
        self.function, self.place = function, here()
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self._fields = split_fields(fields, f"node '{function.__name__}'", "sequence")
        self._inputs, self._outputs = signature_of(function)

    def __call__(self, *tensors: Any, **keywords: Any) -> Step:
        """Make a step that runs the node; arguments are those of a call of a model."""
        scope = _scope_for(f"node '{self.__name__}'")
        known = scope.trace.functions
        if self not in known:
            known[self] = None
            own, node_fields = ({**fields} for fields in self._fields)
            name = node_fields.pop("name", "") or scope.trace.free_name(self.__name__)
            scope.trace.taken.add(name)
            node = Scope(scope.trace, "sequence", name, self.place, None, True, own, node_fields)
            inputs = [*self._inputs]
            given = {**dict(zip(inputs, tensors, strict=False)), **keywords, **keywords.get("inputs", {})}
            specs = [one.spec if isinstance(one := given.get(name), Symbol) else None for name in inputs]
            known[self] = run_body(node, self.function, specs)
        body = known[self]
        if body is None:
            raise fault("G003", f"node '{self.__name__}' calls itself; repeat with weft.loop")
        return _target_of(body)(*tensors, **keywords)


@overload
def node(function: Callable[..., Any], /) -> NodeFunction: ...
@overload
def node(function: None = None, **fields: Any) -> Callable[[Callable[..., Any]], NodeFunction]: ...
def node(function: Callable[..., Any] | None = None, **fields: Any) -> Any:
    """Make a node of a function of tensors.

    Its steps are a sequence; a function that returns one unnamed constructor, and has no other step, is of that kind.
    Parameters are the node's inputs and need no types.

    Args:
        fields: Of ``Node`` (``name``; by default the function's), ``Policy`` and ``Sequence`` (``ordered``, ``loop``).
    """
    return NodeFunction(function, fields) if function is not None else lambda function: NodeFunction(function, fields)


def run_body(scope: Scope, function: Callable[..., Any], specs: Sequence[TensorSpec | None] = ()) -> Scope:
    """Run a function as the body of a node.

    Args:
        specs: Types of its parameters, where they have none.

    Returns:
        The node: ``scope``, or the constructor's that the function returns, as ``scope``.
    """
    inputs, outputs = signature_of(function)
    scope.declared = {name: given for name, given in inputs.items() if given is not None}
    if scope.declared and len(scope.declared) < len(inputs):
        untyped = ", ".join(name for name in inputs if name not in scope.declared)
        raise fault(
            "G025",
            f"'{function.__name__}' has types for some inputs, and none for {untyped}; give all or none",
            scope.place,
        )
    known = dict(zip(inputs, specs, strict=False))
    for name, given in inputs.items():
        spec = given.spec(name) if given is not None else known.get(name)
        scope.parameters[name] = Symbol(name, spec, None, scope)
    with running(scope):
        result = function(**scope.parameters)
    _call_loop(scope, result)
    return _conclude(scope, result, outputs, function.__name__)


def split_fields(fields: Mapping[str, Any], title: str, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the kind's message, and those of ``Node`` and ``Policy``. Raises GraphError: an unknown one."""
    given = {plain_name(name): value for name, value in fields.items()}
    own = known_fields(KINDS[kind], but=("step",))
    check_known(title, given, own | _NODE_FIELDS)
    ours = {name: value for name, value in given.items() if name in own}
    message: Any = pb.Node()
    fill(getattr(message, kind), ours, "", Draft())
    theirs = {name: value for name, value in given.items() if name not in own}
    for name in ("input", "output"):
        if isinstance(theirs.get(name), Mapping):
            theirs[name] = [one.declared(key) for key, one in theirs[name].items()]
    fill(message, {name: value for name, value in theirs.items() if name not in POLICY_FIELDS}, "", Draft())
    fill(message.policy, {name: value for name, value in theirs.items() if name in POLICY_FIELDS}, "", Draft())
    return ours, theirs


def _scope_for(what: str) -> Scope:
    scope = current_scope()
    if scope is None:
        raise fault("G025", f"{what} stands outside of a graph; use it in a function with @weft.graph or @weft.node")
    return scope


def _inline(
    function: Callable[..., Any],
    tensors: Sequence[Any],
    inputs: Mapping[str, Any],
    fields: dict[str, Any],
    node_fields: dict[str, Any],
    specs: Sequence[TensorSpec | None] | None = None,
) -> Step:
    """A function as a node that reads the tensors around it."""
    scope, place = _scope_for("a function"), here()
    given = node_fields.pop("name", "")
    own = function.__name__ if function.__name__.isidentifier() else "body"
    node = Scope(
        scope.trace, "sequence", given or scope.trace.free_name(own), place, scope, bool(given), fields, node_fields
    )
    node.trace.taken.add(node.name)
    specs = specs if specs is not None else [one.spec if isinstance(one, Symbol) else None for one in tensors]
    names = [*inspect.signature(function).parameters]
    more = {names.index(name): value.spec for name, value in inputs.items() if isinstance(value, Symbol)}
    every = [more.get(i, specs[i] if i < len(specs) else None) for i in range(len(names))]
    return _target_of(run_body(node, function, every))(*tensors, inputs=dict(inputs))


def _called(node: Scope, scope: Scope, place: Place) -> Step:
    step = Step(_target_of(node), scope, place)
    scope.steps.append(step)
    return step


def _target_of(node: Scope) -> Target:
    inputs: Specs | None = {name: symbol.spec for name, symbol in node.parameters.items()} or None
    return Target("node", node.name, inputs, node.outputs, scope=node)


def _call_loop(scope: Scope, result: Any) -> None:
    loop = scope.fields.get("loop")
    condition = loop.get("while") if isinstance(loop, Mapping) else None
    if loop is not None and callable(condition):
        returned = result if isinstance(result, Mapping) else {}

        def find(name: str) -> Symbol:
            found = returned.get(name)
            return found if isinstance(found, Symbol) else _find_output(scope, result, name)

        scope.fields["loop"] = {**loop, "while": condition(Answers(find))}


def _find_output(scope: Scope, result: Any, name: str) -> Symbol:
    if isinstance(result, Step):
        return result._symbol(name)
    if isinstance(result, Symbol) and result.output == name:
        return result
    raise fault("G006", f"a round of node '{scope.name}' gives no '{name}'; return it: return {{'{name}': tensor}}")


def _conclude(scope: Scope, result: Any, declared: Outputs | None, title: str) -> Scope:
    """Take what the function returned as the node's outputs."""
    results = _results(scope, result, declared, title)
    body = result._target.scope if isinstance(result, Step) else None
    is_kind = (
        body is not None and body.parent is scope and not body.is_named and not body.parameters and not scope.fields
        and scope.steps == [result] and not result._fields
    )  # fmt: skip
    if is_kind and body is not None:
        scope.trace.taken.discard(body.name)
        body.name, body.parent, body.is_named, body.declared = scope.name, scope.parent, scope.is_named, scope.declared
        body.parameters = scope.parameters
        for symbol in scope.parameters.values():
            symbol.move(body)
        body.node_fields = {**scope.node_fields, **body.node_fields}
        scope = body
    else:
        scope.results = results
        scope.outputs = {name: symbol.spec for name, symbol in results.items()}
    if declared is not None:
        scope.outputs = {name: given.spec(name) for name, given in declared.items()}
        scope.node_fields.setdefault("output", [given.declared(name) for name, given in declared.items()])
    return scope


def _results(scope: Scope, result: Any, declared: Outputs | None, title: str) -> dict[str, Symbol]:
    names = list(declared) if declared is not None else None
    if isinstance(result, Symbol):
        result = {names[0] if names is not None and len(names) == 1 else result.output: result}
    elif isinstance(result, Step):
        known = names if names is not None else result._target.outputs
        if known is None:
            raise fault(
                "G006",
                f"what {result} gives is not known; return {{'NAME': step.NAME}}, or write -> weft.Outputs(...)",
                scope.place,
            )
        lacking = next((name for name in known if result._target.outputs is not None and not _gives(result, name)), "")
        if lacking:
            given = ", ".join(result._target.outputs or ())
            text = f"'{title}' has the output '{lacking}', and returns {result}, which gives {given}"
            raise fault("G006", text, result._place)
        result = {name: result._symbol(name) for name in known}
    elif isinstance(result, list | tuple):
        if names is None or len(names) != len(result):
            count = "no declared outputs" if names is None else f"{len(names)} outputs"
            raise fault(
                "G006",
                f"'{title}' returns {len(result)} tensors for {count}; return {{'NAME': tensor, ...}}",
                scope.place,
            )
        result = dict(zip(names, result, strict=True))
    if not isinstance(result, Mapping):
        raise fault(
            "G006", f"'{title}' returns {result!r}; return a step, a tensor, or {{'NAME': tensor, ...}}", scope.place
        )
    for name in names or ():
        if name not in result:
            raise fault("G006", f"'{title}' does not return its output '{name}'{suggestion(name, result)}", scope.place)
    found = {name: one._only_output(name) if isinstance(one, Step) else one for name, one in result.items()}
    for name, one in found.items():
        if names is not None and name not in names:
            raise fault(
                "G006",
                f"'{title}' returns '{name}', which is none of its outputs{suggestion(name, names)}",
                scope.place,
            )
        if not isinstance(one, Symbol):
            raise fault("G006", f"'{title}' returns {one!r} as '{name}', which is no tensor of the graph", scope.place)
    return found


def _gives(step: Step, name: str) -> bool:
    return name in (step._target.outputs or ()) or name in step._renamed().values()


def _row_of(spec: TensorSpec | None) -> TensorSpec | None:
    return replace(spec, dims=spec.dims[1:] or (1,)) if spec is not None else None


def _outputs_of(node: Scope) -> Specs | None:
    """What a constructed node gives; None if a step's outputs are not known."""
    if "output" in node.node_fields:
        return {one["name"]: None for one in node.node_fields["output"]}
    tables: list[dict[str, TensorSpec | None]] = []
    for step in node.steps:
        outputs = step._target.outputs
        if outputs is None:
            return None
        if not step._is_shadow():
            tables.append({step._renamed().get(name, name): spec for name, spec in outputs.items()})
    shape = {"ensemble": _combined, "map": _listed, "collector": _joined}.get(node.kind)
    if shape is not None:
        return shape(node, tables)
    return {name: spec for name, spec in tables[0].items() if all(name in one for one in tables)} if tables else {}


def _combined(node: Scope, tables: Sequence[Specs]) -> Specs:
    combines = node.fields.get("combine") or [{}]
    message = pb.Ensemble()
    fill(message, {"combine": combines}, "", Draft())
    found: dict[str, TensorSpec | None] = {}
    for one in message.combine:
        source = getattr(one, "from")
        if one.method == pb.Combine.KEYED:
            steps = [name for name, step in zip(node.step_names(), node.steps, strict=True) if not step._is_shadow()]
            for step, table in zip(steps, tables, strict=True):
                found.update((f"{step}.{name}", spec) for name, spec in table.items() if source in ("", name))
        else:
            given = next((table.get(source or one.output) for table in tables), None)
            is_same = one.method not in (pb.Combine.CONCAT, pb.Combine.STACK, pb.Combine.CUSTOM)
            found[one.output] = given if is_same else None
    return found


def _listed(node: Scope, tables: Sequence[Specs]) -> Specs:
    message = pb.Map()
    fill(message, {name: value for name, value in node.fields.items() if name in ("collect", "index")}, "", Draft())
    as_list = {
        one.output: one.lengths or f"{one.output}_LENGTHS" for one in message.collect if one.method == pb.Collect.LIST
    }
    table = tables[0] if tables else {}
    found = {name: spec and replace(spec, dims=(-1, *spec.dims[name in as_list :])) for name, spec in table.items()}
    names = [as_list[name] for name in table if name in as_list] + [message.index] * bool(message.index)
    return {**found, **{name: TensorSpec(name, "INT64", (-1,)) for name in names}}


def _joined(node: Scope, tables: Sequence[Specs]) -> Specs:
    return {
        name: spec and replace(spec, dims=(-1, *spec.dims[1:])) for name, spec in (tables[0] if tables else {}).items()
    }
