"""Steps: calls of models, graphs and nodes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from weft.authoring.expressions import Expression
from weft.authoring.faults import Place, fault, here, lacks
from weft.authoring.fields import POLICY_FIELDS, check_known, elements_of, fill_with_policy, known_fields, plain_name
from weft.authoring.tracing import Answer, Answers, Scope, Symbol, scope_for, symbols_in
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.text.pbtxt import suggestion
from weft.language.syntax.file import GraphLookup, ModelCatalog
from weft_protos import graph_pb2 as pb

Specs = Mapping[str, TensorSpec | None]
#: What a call takes besides tensors; ``inputs`` and ``outputs`` are maps by name.
STEP_FIELDS = known_fields(pb.Step.DESCRIPTOR) | POLICY_FIELDS | {"inputs", "outputs"}
_TARGETS = ("model_name", "node", "graph")


@dataclass(frozen=True, eq=False)
class Target:
    """A model, graph or node that can be called while a graph is traced.

    Attributes:
        field: Field of ``Step`` that names it: ``model_name``, ``graph`` or ``node``.
        inputs, outputs: Types by name, None for a type that is not known; None: nothing is known of them.
        catalog: Has the model's signatures.
        graphs: Has the graph's file.
        owner: The graph or model in Python.
    """

    field: str
    name: str
    inputs: Specs | None = None
    outputs: Specs | None = None
    catalog: ModelCatalog | None = None
    graphs: GraphLookup | None = None
    scope: Scope | None = None
    owner: Any = None

    def __call__(self, *tensors: Any, **keywords: Any) -> Any:
        """Make a ``Step``.

        Args:
            tensors: Inputs in the order of the signature.
            keywords: Inputs by name: a tensor of this graph, a step with one fitting output, or a constant (number,
                text, bool, list, array). And fields of ``Step`` or ``Policy`` in ``graph.proto``: ``timeout_ms=300``,
                ``retry={"attempts": 3}``, ``fallback=m.other``. ``inputs={...}`` has inputs whose names are those of
                fields, ``outputs={"LABEL": "DIGITS"}`` renames outputs.

        Raises:
            GraphError: An unknown input or field, a tensor of another datatype, a value that does not fit.
        """
        scope = scope_for(str(self))
        fields = {name: value for key, value in keywords.items() if (name := plain_name(key)) in STEP_FIELDS}
        inputs = {key: value for key, value in keywords.items() if plain_name(key) not in STEP_FIELDS}
        more = fields.pop("inputs", {})
        if not isinstance(more, Mapping):
            raise fault("G001", f"inputs={more!r}: give a dict from names of inputs to tensors")
        inputs |= more
        target = self._at_version(fields.get("model_version"))
        if tensors:
            inputs = {**target._named(tensors, inputs), **inputs}
        for name in inputs:
            if target.inputs is not None and name not in target.inputs:
                known = [*target.inputs, *sorted(STEP_FIELDS)]
                raise fault("G006", f"{self} has no input '{name}', and a step no such field{suggestion(name, known)}")
        scope.trace.use(self.catalog, self.graphs, self.owner)
        step = Step(target, scope, here())
        step._given = inputs
        step._inputs = {name: target._checked(name, value) for name, value in inputs.items()}
        scope.steps.append(step)
        return step.options(**fields)

    def with_signature(self, signature: ModelSignature) -> "Target":
        """The same with these inputs and outputs."""
        inputs, outputs = ({spec.name: spec for spec in specs} for specs in (signature.inputs, signature.outputs))
        return replace(self, inputs=inputs, outputs=outputs)

    def __str__(self) -> str:
        return f"{self.field.removesuffix('_name')} '{self.name}'"

    __repr__ = __str__

    def _at_version(self, version: Any) -> "Target":
        if self.catalog is None or not isinstance(version, int) or version < 1:
            return self
        found = self.catalog.find(self.name, str(version))
        if found is None:
            raise fault("G002", f"{self} has no version {version}")
        return self.with_signature(found[1])

    def _named(self, tensors: Sequence[Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        free = [name for name in self.inputs or () if name not in inputs]
        if len(tensors) > len(free):
            known = f"; its inputs are {', '.join(self.inputs)}" if self.inputs else ""
            raise fault("G006", f"{len(tensors)} tensors are given to {self} by place{known}; name them: INPUT=tensor")
        return dict(zip(free, tensors, strict=False))

    def _checked(self, name: str, value: Any) -> Any:
        """The tensor for an input, or the fields of a constant."""
        spec = self.inputs.get(name) if self.inputs is not None else None
        if isinstance(value, Step):
            value = value._only_output(name)
        if isinstance(value, Symbol):
            given = value.spec
            if spec is not None and given is not None and spec.datatype != given.datatype:
                title = f"input '{name}' of {self} is {spec.datatype}{list(spec.dims)}"
                cure = "give another tensor, or put a model that converts it between them"
                raise fault("G007", f"{title}; '{value.output}' is {given.datatype}{list(given.dims)}: {cure}")
            return value
        if isinstance(value, Expression | Target) or value is None or callable(value):
            raise fault(
                "G006", f"{value!r} is no tensor for input '{name}' of {self}; give an output of a step, or a constant"
            )
        return elements_of(value, spec)


class Step:
    """A step of a node. Its outputs are its attributes: ``tiny.PROBS``; ``tiny["a.b"]`` where a name is no word."""

    def __init__(self, target: Target, scope: Scope, place: Place) -> None:
        self._target, self._scope, self._place = target, scope, place
        self._given: Mapping[str, Any] = {}
        self._inputs: dict[str, Any] = {}
        self._fields: dict[str, Any] = {}
        self._places: dict[str, Place] = {}
        self._symbols: dict[str, Symbol] = {}
        self._holder = ""

    def soft(self, default: Mapping[str, Any] | Any = None) -> Self:
        """Let the request go on when the step fails; ``default`` has values for its outputs, which are absent else."""
        return self.options(dependency="SOFT", **({} if default is None else {"default": default}))

    def when(self, condition: Any) -> Self:
        """Run the step only if the condition holds; else its outputs are absent, or their ``default``."""
        return self.options(when=condition)

    def after(self, *steps: "Step | str") -> Self:
        """Start it when these steps have ended, though it may read nothing of theirs."""
        return self.options(after=[*self._fields.get("after", []), *steps])

    def named(self, name: str) -> Self:
        """Name the step, for conditions, paths and spans."""
        return self.options(name=name)

    def options(self, **fields: Any) -> Self:
        """Set any fields of ``Step`` and ``Policy`` in ``graph.proto``; those of the policy apply to this step."""
        given = {plain_name(name): value for name, value in fields.items()}
        check_known(f"the call of {self._target}: it", given, STEP_FIELDS - {"inputs"})
        for name, one in given.items():
            if name in _TARGETS:
                raise fault("G018", f"'{name}' is what is called: {self._target}; weft.step({name}=...) calls anything")
            value = self._taken(name, one)
            self._fields[name] = value
            self._places[name] = here()
            fill_with_policy(pb.Step(), {"output_map" if name == "outputs" else name: value}, "", Draft())
        return self

    def __getattr__(self, name: str) -> Symbol:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._symbol(name)

    def __getitem__(self, name: str) -> Symbol:
        return self._symbol(name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(self._target.outputs or ())]

    def __str__(self) -> str:
        return f"step '{self._fields.get('name') or self._target.name}'"

    __repr__ = __str__

    def _symbol(self, name: str) -> Symbol:
        """The tensor of an output, by its name at the target or the one that it was given."""
        output = next((key for key, given in self._renamed().items() if given == name), name)
        outputs = self._target.outputs
        if outputs is not None and not self._gives(output):
            raise lacks(f"{self._target} has no output '{name}'{suggestion(name, outputs)}")
        if output not in self._symbols:
            self._symbols[output] = Symbol(output, (outputs or {}).get(output), self, self._scope)
        return self._symbols[output]

    def _gives(self, name: str) -> bool:
        """Whether it has an output of the name; of a node with branches, whether one of them has."""
        body = self._target.scope
        branches = body.steps if body is not None and body.kind in ("sequence", "switch", "splitter", "cascade") else ()
        is_own = name in (self._target.outputs or ()) or name in self._renamed().values()
        return is_own or any(one._gives(name) for one in branches)

    def _output_names(self) -> list[str]:
        """Its outputs, as far as they are known, under the names that they have here."""
        renamed = self._renamed()
        return [renamed.get(name, name) for name in self._target.outputs or renamed]

    def _only_output(self, wanted: str) -> Symbol:
        outputs = self._target.outputs
        if outputs is None or wanted in outputs or wanted in self._renamed().values():
            return self._symbol(wanted)
        if len(outputs) != 1:
            raise fault(
                "G006", f"{self} gives {', '.join(outputs) or 'nothing'}, none of them '{wanted}'; say which: step.NAME"
            )
        return self._symbol(next(iter(outputs)))

    def _renamed(self) -> dict[str, str]:
        return {**self._fields.get("output_map", {}), **self._fields.get("outputs", {})}

    def _is_shadow(self) -> bool:
        return "shadow" in self._fields

    def _all_symbols(self) -> list[Symbol]:
        """All of its tensors, as far as they are known."""
        if self._is_shadow():
            return []
        return [self._symbol(name) for name in self._target.outputs or ()] or list(self._symbols.values())

    def _reads(self) -> list[Symbol]:
        body = self._target.scope
        inner = body.imports() if body is not None and body.parent is not None else []
        return [
            *(value for value in self._inputs.values() if isinstance(value, Symbol)),
            *symbols_in(self._fields),
            *inner,
        ]

    def _left_out(self) -> list[str]:
        """Optional inputs that the step does not give, and so must not find under their own names."""
        specs = self._target.inputs or {}
        constants = (one["input"] for one in self._fields.get("constant", ()))
        given = {*self._inputs, *self._fields.get("input_map", ()), *constants}
        return [name for name, spec in specs.items() if spec is not None and spec.is_optional and name not in given]

    def _taken(self, name: str, value: Any) -> Any:
        """A field's value with its functions called and its steps taken out of the sequence."""
        if name == "fallback" and callable(value):
            known = getattr(value, "inputs", None)
            value = value(inputs={one: given for one, given in self._given.items() if known is None or one in known})
        if name == "fallback" and isinstance(value, Step):
            value._move(self._scope, f"the fallback of {self}")
        elif callable(value):
            value = value(Answers(self._symbol))
        if name in ("outputs", "output_map") and isinstance(value, Mapping):
            for output in value:
                self._symbol(output)
        if name == "constant" and isinstance(value, Mapping):
            specs = self._target.inputs or {}
            value = [{"input": key, **elements_of(one, specs.get(key))} for key, one in value.items()]
        elif name == "default" and isinstance(value, Mapping):
            given = [(Answer(self._symbol(key)), one) for key, one in value.items()]
            value = [{"output": tensor, **elements_of(one, tensor.spec)} for tensor, one in given]
        return value

    def _move(self, scope: Scope, holder: str) -> None:
        """Take it out of the sequence in which it was called, into a node or a step."""
        if self._holder:
            raise fault(
                "G005", f"{self} is a step of {self._holder} already; a step stands once: call {self._target} again"
            )
        if self not in self._scope.steps:
            raise fault("G005", f"{self} was called in another graph or node; call {self._target} again")
        self._scope.steps.remove(self)
        self._scope, self._holder = scope, holder


class Draft:
    """Writes fields to see whether they can be written, before the names of tensors and steps are known."""

    def text(self, value: Any, field: Any) -> Any:
        """A text for anything that becomes one."""
        if isinstance(value, Answer | Symbol):
            return value.output
        return str(value) if isinstance(value, Expression | Step) or callable(value) else value

    def step(self, message: pb.Step, value: Any, path: str) -> None:
        """Nothing: the step was checked when it was called."""
        if not isinstance(value, Step | Target):
            raise TypeError("give a model, or a call of one")


def step(*, model_name: str = "", node: str = "", graph: str = "", **keywords: Any) -> Step:
    """A step that calls anything by its name, with or without a known signature.

    Args:
        keywords: Tensors by the names of inputs, and fields of ``Step`` and ``Policy``.
    """
    given = {"model_name": model_name, "node": node, "graph": graph}
    field = next((name for name, value in given.items() if value), "model_name")
    made: Step = Target(field, given[field])(**keywords)
    return made


def with_called(things: Iterable[Any]) -> list[Any]:
    """Graphs and models in Python, and those that the functions of graphs have called, each once."""
    found, pending = dict[int, Any](), [*reversed([*things])]
    while pending:
        one = pending.pop()
        if id(one) not in found:
            found[id(one)] = one
            pending += reversed(getattr(one, "called", ()))
    return [*found.values()]
