"""Nodes: a constructor for each kind, and ``@node``, whose function is one."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, overload

from weft.authoring.faults import Place, fault, here
from weft.authoring.fields import POLICY_FIELDS, check_known, fill, fill_with_policy, known_fields, plain_name
from weft.authoring.steps import Draft, Specs, Step, Target
from weft.authoring.tensors import Outputs, signature_of
from weft.authoring.tracing import Answers, Scope, Symbol, running, scope_for, steps_in
from weft.base.text.pbtxt import suggestion
from weft.language.compiler.names import NodeNames, StepNames
from weft.language.syntax.parse import node_definition
from weft.router.operators import KINDS as COMPILED_KINDS
from weft_protos import graph_pb2 as pb

#: Message of each kind of node, by its field in the ``oneof kind`` of ``Node``.
KINDS = {field.name: field.message_type for field in pb.Node.DESCRIPTOR.oneofs_by_name["kind"].fields}
#: Fields of a kind's message, and those of ``Node`` and ``Policy``.
SplitFields: TypeAlias = tuple[dict[str, Any], dict[str, Any]]
#: Kinds whose outputs have the types of their steps'.
_SAME_TYPES = ("switch", "splitter", "cascade")
_NODE_FIELDS = known_fields(pb.Node.DESCRIPTOR, but=KINDS) | POLICY_FIELDS


def construct(kind: str, *steps: Step, **fields: Any) -> Step:
    """A node of any kind of ``graph.proto``, made of these steps, and the step that runs it.

    Args:
        kind: Name of its field in ``Node``: ``switch``.
        fields: Of the kind's message, of ``Node`` (``name=``: it stays a node of its own) and of ``Policy``.
    """
    if kind not in KINDS:
        raise fault("G001", f"there is no kind of node '{kind}'{suggestion(kind, KINDS)}")
    if not steps:
        raise fault("G025", f"a {kind} has no steps; give the calls of models that it chooses from")
    scope = scope_for(f"a {kind}")
    node = _new_node(scope, kind, split_fields(fields, f"a {kind}", kind), kind, here(), scope)
    for step in [*steps, *steps_in(node.fields)]:
        _check_step(step)._move(node, f"node '{node.name}'")
    node.steps += steps
    node.outputs = _outputs_of(node)
    made: Step = _target_of(node)()
    return made


def cascade(*steps: Step, accept: Any = None, **fields: Any) -> Step:
    """Steps in order until the ``accept`` of one holds; the given one is that of every step but the last.

    Args:
        accept: A condition over the step's outputs: ``lambda o: o.PROBS.max() >= 0.8``. A step may have its own.
        fields: Of ``Cascade`` (``per_row``), ``Node`` and ``Policy``.
    """
    for step in steps[:-1] if accept is not None else ():
        if "accept" not in _check_step(step)._fields:
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
                cases = [_case(one) for one in (values if isinstance(values, tuple) else (values,))]
                steps.append(_check_step(step).options(case=cases))
        elif isinstance(branch, tuple) and len(branch) == 2:
            steps.append(_check_step(branch[1]).when(branch[0]))
        else:
            steps.append(branch)
    if otherwise is not None:
        steps.append(_check_step(otherwise).options(otherwise=True))
    return construct("switch", *steps, **fields)


def split(*steps: Step, **fields: Any) -> Step:
    """One step, drawn by its share, gives the outputs.

    Args:
        steps: With shares: ``weft.weigh(90, m.digits_cnn(pixels), name="A")``.
        fields: Of ``Splitter`` (``sticky_by``, ``salt``, ``bandit``, ``rollout={"steps": [5, 50], "guard": {...}}``),
            ``Node`` and ``Policy``.
    """
    return construct("splitter", *steps, **fields)


def weigh(weight: float, step: Step, **fields: Any) -> Step:
    """Give a step its share in a splitter, or its weight in an ensemble, and any other fields of ``Step``."""
    return _check_step(step).options(weight=weight, **fields)


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
        target = _inline(target, lists, {}, ({}, {}), is_row=True)
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
    inputs = {name: given.pop(name) for name in inspect.signature(function).parameters if name in given}
    repeat = {name: given.pop(name) for name in known_fields(pb.Loop.DESCRIPTOR) if name in given}
    return _inline(function, tensors, inputs, split_fields({**given, "loop": repeat}, "a loop", "sequence"))


def answer_after(*steps: Step) -> None:
    """The node whose function runs answers after these steps have ended, though nothing may read what they give."""
    scope = scope_for("answer_after")
    scope.fields["answer_after"] = [*scope.fields.get("answer_after", []), *steps]


class NodeFunction:
    """A node of its own, as ``@weft.node`` makes it: called in graphs, it is a step that runs the node."""

    def __init__(self, function: Callable[..., Any], fields: Mapping[str, Any]) -> None:
        self.function, self.place = function, here()
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        given = {**fields}
        self._names: Mapping[str, str] = given.pop("names", {})
        self._fields = split_fields(given, f"node '{function.__name__}'", "sequence")

    def __call__(self, *tensors: Any, **keywords: Any) -> Step:
        """Make a step that runs the node; arguments are those of a call of a model."""
        scope = scope_for(f"node '{self.__name__}'")
        known = scope.trace.functions
        if self not in known:
            known[self] = None
            node = _new_node(scope, "sequence", self._fields, self.__name__, self.place, None)
            inputs = {**keywords, **keywords.get("inputs", {})}
            known[self] = run_body(node, self.function, _specs_of(self.function, tensors, inputs), self._names)
        body = known[self]
        if body is None:
            raise fault("G003", f"node '{self.__name__}' calls itself; repeat with weft.loop")
        made: Step = _target_of(body)(*tensors, **keywords)
        return made


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
            ``names`` has those of inputs that are no words of Python, by parameter: ``names={"x": "input:0"}``.
    """
    return NodeFunction(function, fields) if function is not None else lambda function: NodeFunction(function, fields)


def run_body(scope: Scope, function: Callable[..., Any], specs: Specs, names: Mapping[str, str] | None = None) -> Scope:
    """Run a function as the body of a node.

    Args:
        specs: Types of its parameters, where they have none.
        names: Parameter -> name of the input, where that is another.

    Returns:
        The node: ``scope``, or the constructor's that the function returns, as ``scope``.
    """
    types, outputs = signature_of(function)
    inputs = {(names or {}).get(name, name): given for name, given in types.items()}
    scope.declared = {name: given for name, given in inputs.items() if given is not None}
    if scope.declared and len(scope.declared) < len(inputs):
        untyped = ", ".join(name for name in inputs if name not in scope.declared)
        raise fault("G025", f"'{scope.name}' has types for some inputs, and none for {untyped}", scope.place)
    for name, given in inputs.items():
        spec = given.spec(name) if given is not None else specs.get(name)
        scope.parameters[name] = Symbol(name, spec, None, scope)
    with running(scope):
        result = function(**dict(zip(types, scope.parameters.values(), strict=True)))
    results = _results(scope, result, outputs, function.__name__)
    repeat = scope.fields.get("loop")
    if isinstance(repeat, Mapping) and callable(repeat.get("while")):
        scope.fields["loop"] = {**repeat, "while": repeat["while"](Answers(partial(_round_output, scope, results)))}
    body = result._target.scope if isinstance(result, Step) else None
    if body is not None and _is_all(scope, result, body):
        scope.trace.taken.discard(body.name)
        body.name, body.parent, body.is_named = scope.name, scope.parent, scope.is_named
        body.declared, body.parameters = scope.declared, scope.parameters
        for symbol in scope.parameters.values():
            symbol.move(body)
        body.node_fields = {**scope.node_fields, **body.node_fields}
        scope = body
    else:
        scope.results, scope.outputs = results, {name: symbol.spec for name, symbol in results.items()}
    if outputs is not None:
        scope.outputs = {name: given.spec(name) for name, given in outputs.items()}
        scope.node_fields.setdefault("output", [given.declared(name) for name, given in outputs.items()])
    return scope


def split_fields(fields: Mapping[str, Any], title: str, kind: str) -> SplitFields:
    """Fields of the kind's message, and those of ``Node`` and ``Policy``. Raises GraphError: an unknown one."""
    given = {plain_name(name): value for name, value in fields.items()}
    own = known_fields(KINDS[kind], but=("step",))
    check_known(title, given, own | _NODE_FIELDS)
    ours = {name: value for name, value in given.items() if name in own}
    theirs = {name: value for name, value in given.items() if name not in own}
    for name in {"input", "output"} & theirs.keys():
        if isinstance(theirs[name], Mapping):
            theirs[name] = [one.declared(key) for key, one in theirs[name].items()]
    message = pb.Node()
    fill(getattr(message, kind), ours, "", Draft())
    fill_with_policy(message, theirs, "", Draft())
    return ours, theirs


def _new_node(scope: Scope, kind: str, fields: SplitFields, name: str, place: Place, parent: Scope | None) -> Scope:
    own, node_fields = ({**one} for one in fields)
    given = node_fields.pop("name", "")
    trace = scope.trace
    trace.taken.add(given)
    is_named = bool(given) or parent is None
    return Scope(trace, kind, given or trace.free_name(name), place, parent, is_named, own, node_fields)


def _case(value: Any) -> str:
    """A value of ``on`` as text: ``true``, ``7``."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_step(step: Any) -> Step:
    if not isinstance(step, Step):
        cure = "call it with its inputs" if callable(step) else "give the call of a model: m.NAME(tensor)"
        raise fault("G025", f"{step!r} is no step; {cure}")
    return step


def _inline(
    function: Callable[..., Any],
    tensors: Sequence[Any],
    inputs: dict[str, Any],
    fields: SplitFields,
    *,
    is_row: bool = False,
) -> Step:
    """A function as a node that reads the tensors around it; ``is_row``: it gets one row of each tensor."""
    scope = scope_for("a function")
    name = function.__name__ if function.__name__.isidentifier() else "body"
    node = _new_node(scope, "sequence", fields, name, here(), scope)
    specs = _specs_of(function, tensors, inputs)
    if is_row:
        specs = {name: spec and replace(spec, dims=spec.dims[1:] or (1,)) for name, spec in specs.items()}
    made: Step = _target_of(run_body(node, function, specs))(*tensors, inputs=inputs)
    return made


def _specs_of(function: Callable[..., Any], tensors: Sequence[Any], inputs: Mapping[str, Any]) -> Specs:
    given = {**dict(zip(inspect.signature(function).parameters, tensors, strict=False)), **inputs}
    return {name: one.spec for name, one in given.items() if isinstance(one, Symbol)}


def _target_of(node: Scope) -> Target:
    inputs = {name: symbol.spec for name, symbol in node.parameters.items()}
    return Target("node", node.name, inputs, node.outputs, scope=node)


def _round_output(scope: Scope, results: Mapping[str, Symbol], name: str) -> Symbol:
    """The tensor that a round gives under a name: one that is returned, or else the last one of that name."""
    giver = next((step for step in reversed(scope.steps) if step._gives(name)), None)
    if name not in results and giver is None:
        raise fault("G006", f"a round of node '{scope.name}' gives no '{name}'{suggestion(name, results)}")
    return results[name] if name in results or giver is None else giver._symbol(name)


def _is_all(scope: Scope, result: Step, body: Scope) -> bool:
    """Whether a function that returns ``result``, which runs ``body``, is just that node."""
    is_plain = body.parent is scope and not (body.is_named or body.parameters or scope.fields or result._fields)
    return is_plain and scope.steps == [result]


def _results(scope: Scope, result: Any, declared: Outputs | None, title: str) -> dict[str, Symbol]:
    """What a function returned, by the names of its outputs."""
    place, found = scope.place, result
    if isinstance(result, Step):
        known, place = list(declared) if declared is not None else result._output_names(), result._place
        found = dict.fromkeys(known, result)
    elif isinstance(result, Symbol):
        found = {next(iter(declared)) if declared is not None and len(declared) == 1 else result.output: result}
    elif isinstance(result, list | tuple) and declared is not None and len(declared) == len(result):
        found = dict(zip(declared, result, strict=True))
    if not isinstance(found, Mapping) or not found:
        cure = "; return a step, a tensor, or {'NAME': tensor, ...}"
        if isinstance(result, Step):
            cure = ", whose outputs are not known; return {'NAME': step.NAME}, or write -> weft.Outputs(...)"
        raise fault("G006", f"'{title}' returns {result!r}{cure}", place)
    for name in [*found, *(declared or ())]:
        if name not in found or name not in (declared or found):
            text = f"'{title}' returns {', '.join(found)}, and its outputs are {', '.join(declared or ())}"
            raise fault("G006", text, place)
    for name, one in found.items():
        if isinstance(one, Step) and one._target.outputs is not None and not one._gives(name):
            raise fault("G006", f"output '{name}' of '{title}': {one} gives {', '.join(one._output_names())}", place)
        if not isinstance(one, Step | Symbol):
            raise fault("G006", f"output '{name}' of '{title}' is {one!r}, which is no tensor of the graph", place)
    return {name: one._symbol(name) if isinstance(one, Step) else one for name, one in found.items()}


def _outputs_of(node: Scope) -> Specs | None:
    """What a constructed node gives, as the compiler infers it; None if a step's outputs are not known."""
    if "output" in node.node_fields:
        return {one["name"]: None for one in node.node_fields["output"]}
    if any(step._target.outputs is None for step in node.steps):
        return None
    message, kind = pb.Node(name=node.name), COMPILED_KINDS[node.kind]
    fill(getattr(message, node.kind), {**node.fields, "step": node.step_stubs()}, "", Draft())
    definition = node_definition(message, "", COMPILED_KINDS)
    tables = [
        {step._renamed().get(name, name): spec for name, spec in (step._target.outputs or {}).items()}
        for step in node.steps
        if kind.plan.runs_shadows or not step._is_shadow()
    ]
    unknown: Any = None
    steps = [
        StepNames(one, unknown, {name: name for name in table}, is_open=False)
        for one, table in zip(definition.steps, tables, strict=True)
    ]
    known = {name: spec for table in tables for name, spec in table.items()} if node.kind in _SAME_TYPES else {}
    producers = {name: [index] for index, table in enumerate(tables) for name in table}
    return {name: known.get(name) for name in kind.outputs(definition, NodeNames(steps=steps, producers=producers))}
