"""The trace of one graph: nodes under construction, their tensors, and what these are called."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from weft.authoring.expressions import Expression, TensorExpression
from weft.authoring.faults import Place, fault
from weft.authoring.tensors import TensorType
from weft.base.signature import TensorSpec
from weft.language.syntax.file import GraphLookup, ModelCatalog
from weft.language.syntax.parse import step_names
from weft_protos import graph_pb2 as pb

#: A step, of ``steps.py``, which is above this module.
Step: TypeAlias = Any


class Symbol(TensorExpression):
    """A tensor while a graph is traced: an output of a step, or an input of a node.

    Attributes:
        output: Its name at the step's target, or as an input of the node.
        step: The step that gives it; None for an input.
    """

    def __init__(self, output: str, spec: TensorSpec | None, step: Step | None, scope: "Scope") -> None:
        super().__init__(spec)
        self.output, self.step, self._scope = output, step, scope

    @property
    def scope(self) -> "Scope":
        """The node whose tensor it is."""
        return self._scope if self.step is None else self.step._scope

    def move(self, scope: "Scope") -> None:
        """Make it an input of another node."""
        self._scope = scope

    def __repr__(self) -> str:
        return f"<tensor {self.output} of {'the inputs' if self.step is None else self.step}>"


class Answer(TensorExpression):
    """A tensor of ``outputs`` in a condition: what the step, or the round of a loop, gave."""

    def __init__(self, symbol: Symbol) -> None:
        super().__init__(symbol.spec)
        self.symbol, self.output = symbol, symbol.output


class Answers:
    """The outputs of a step or a round, for the function of a condition: ``lambda o: o.PROBS.max() >= 0.8``."""

    def __init__(self, find: Callable[[str], Symbol]) -> None:
        self._find = find

    def __getattr__(self, name: str) -> Answer:
        return Answer(self._find(name))

    __getitem__ = __getattr__


@dataclass(eq=False)
class Scope:
    """A node under construction.

    Attributes:
        kind: Its field in the ``oneof kind`` of ``Node``.
        parent: The node whose tensors it may read as they are; None for the graph and for a ``@node``.
        is_named: Its name was given, so it stays a node of its own.
        fields: Of the kind's message.
        node_fields: Of ``Node`` and its ``Policy``.
        declared: Types of its inputs; empty: they are inferred.
        results: Of a sequence: output -> tensor.
        outputs: What its callers see, None for a type that is not known; None: not known at all.
        names: What each tensor is called in it, once ``assign_names`` has run.
    """

    trace: "Trace"
    kind: str
    name: str
    place: Place
    parent: "Scope | None" = None
    is_named: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    node_fields: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Symbol] = field(default_factory=dict)
    declared: dict[str, TensorType] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    results: dict[str, Symbol] = field(default_factory=dict)
    outputs: Mapping[str, TensorSpec | None] | None = None
    names: dict[Symbol, str] = field(default_factory=dict)

    @property
    def is_sequence(self) -> bool:
        """Whether its steps see one another's outputs."""
        return self.kind == "sequence"

    def every_step(self) -> Iterator[Step]:
        """Its steps, and the steps inside these and its fields: fallbacks and custom steps."""
        for step in [*self.steps, *steps_in(self.fields)]:
            yield step
            yield from steps_in(step._fields)

    def reads(self) -> list[Symbol]:
        """Every tensor that its steps and conditions read, each once."""
        found = [symbol for step in self.every_step() for symbol in step._reads()]
        found += [*symbols_in(self.fields), *symbols_in(self.node_fields)]
        return list(dict.fromkeys(found))

    def imports(self) -> list[Symbol]:
        """The tensors of nodes around it that it reads: inputs that nobody has to declare."""
        return [one for one in dict.fromkeys([*self.reads(), *self.results.values()]) if one.scope is not self]

    def step_stubs(self) -> list[pb.Step]:
        """Names and targets of its steps, and which are shadows."""
        stubs = []
        for step in self.steps:
            stub = pb.Step(name=step._fields.get("name", ""), case=step._fields.get("case", ()))
            setattr(stub, step._target.field, step._target.name)
            if step._is_shadow():
                stub.shadow.SetInParent()
            stubs.append(stub)
        return stubs

    def name_of(self, step: Step) -> str:
        """Name of one of its steps. Raises GraphError: the step is in another node."""
        if step not in self.steps:
            text = f"{step} is no step of node '{self.name}'; conditions and 'after' see steps beside them"
            raise fault("G011", text, step._place)
        return step_names(self.step_stubs())[self.steps.index(step)]

    def assign_names(self, around: Mapping[Symbol, str]) -> None:
        """Give every tensor a name: the one it was given, that of the node's output, else its own if that is free.

        Args:
            around: Names in the node around it.
        """
        names = self.names = {symbol: name for name, symbol in self.parameters.items()}
        for step in self.steps:
            names.update((step._symbol(output), name) for output, name in step._renamed().items())
        for name, symbol in self.results.items():
            if symbol.scope is self and names.setdefault(symbol, name) != name:
                title = f"tensor '{names[symbol]}' is returned as '{name}'"
                raise fault("G005", f"{title}, and a tensor has one name; return it under the first alone", self.place)
        taken = {*names.values()}
        for symbol in self.imports():
            if symbol not in around:
                owner = f"{symbol.step} in node '{symbol.scope.name}'" if symbol.step else "another graph or node"
                cure = "use what the node gives, or call the model again; a @weft.node gets its tensors as parameters"
                reader = next((step for step in self.every_step() if symbol in {*step._reads()}), None)
                place = reader._place if reader is not None else self.place
                raise fault("G006", f"node '{self.name}' cannot read '{symbol.output}' of {owner}: {cure}", place)
            names[symbol] = _free_name(around[symbol], "", taken)
        left_out = {name for step in self.every_step() for name in step._left_out()}
        for name, step in zip(step_names(self.step_stubs()), self.steps, strict=True):
            for symbol in step._all_symbols():
                if symbol not in names:
                    is_plain = not self.is_sequence
                    names[symbol] = symbol.output if is_plain else _free_name(symbol.output, name, taken, left_out)


@dataclass(eq=False)
class Trace:
    """One graph while its function runs.

    Attributes:
        functions: The nodes of ``@node`` functions that it has called; None while the function runs.
        catalogs: Where the signatures of its models came from.
        graphs: Where other graphs that it calls came from.
        called: The graphs and models in Python that it has called.
    """

    taken: set[str] = field(default_factory=set)
    functions: dict[Any, Scope | None] = field(default_factory=dict)
    catalogs: dict[ModelCatalog, None] = field(default_factory=dict)
    graphs: dict[GraphLookup, None] = field(default_factory=dict)
    called: dict[Any, None] = field(default_factory=dict)

    def use(self, catalog: ModelCatalog | None, graphs: GraphLookup | None, owner: Any) -> None:
        """Note where the signature of something that is called came from."""
        self.catalogs |= {catalog: None} if catalog is not None else {}
        self.graphs |= {graphs: None} if graphs is not None else {}
        self.called |= {owner: None} if owner is not None else {}

    def free_name(self, wanted: str) -> str:
        """A name for a node, with a number if it is taken."""
        return _free_name(wanted, "", self.taken)


_current: ContextVar[Scope | None] = ContextVar("weft_trace", default=None)


def current_scope() -> Scope | None:
    """The node whose function runs; None outside of a graph."""
    return _current.get()


def scope_for(what: str) -> Scope:
    """The node whose function runs. Raises GraphError: none does."""
    scope = _current.get()
    if scope is None:
        cure = "use it in a function with @weft.graph or @weft.node; graph.run() runs a graph"
        raise fault("G025", f"{what} stands outside of a graph; {cure}")
    return scope


@contextmanager
def running(scope: Scope) -> Iterator[None]:
    """Make ``scope`` the node that new steps go to."""
    token = _current.set(scope)
    try:
        yield
    finally:
        _current.reset(token)


def symbols_in(value: Any) -> Iterator[Symbol]:
    """The tensors in a value of a field, at any depth, but for those in ``outputs`` and in steps."""
    if isinstance(value, Symbol):
        yield value
    elif isinstance(value, Expression):
        yield from (part for part in value.parts if isinstance(part, Symbol))
    else:
        for one in _inside(value):
            yield from symbols_in(one)


def steps_in(value: Any) -> Iterator[Step]:
    """The steps inside a value of a field: fallbacks and custom steps, at any depth."""
    for one in _inside(value):
        if hasattr(one, "_reads"):
            yield one
            yield from steps_in(one._fields)
        else:
            yield from steps_in(one)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return [one for name, one in value.items() if name not in ("after", "answer_after")]
    return value if isinstance(value, list | tuple) else ()


def _free_name(wanted: str, prefix: str, taken: set[str], hidden: Iterable[str] = ()) -> str:
    """``wanted``, or a name like it that is not taken; it is taken then."""
    name, number = wanted, 1
    while name in taken or name in hidden:
        number += 1
        name = f"{prefix}_{wanted}" if prefix and number == 2 else f"{wanted}-{number}"
    taken.add(name)
    return name
