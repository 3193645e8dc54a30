"""What a random graph streams, worked out one response at a time, without time.

Written from the description of the language alone. A node is a list of responses, after which it may fail.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from tests.unit.router.naive_interpreter import Interpreter, inputs_of, rows_of
from tests.unit.router.naive_pieces import BrokenError, pieces_of
from tests.unit.router.naive_types import can_stream, live_steps, read_in, steps_behind, waits_for
from tests.unit.router.naive_values import (
    COMBINED,
    AmbiguousError,
    FailsError,
    Rows,
    UnsoundError,
    Values,
    default,
    holds,
    present,
)
from tests.unit.router.random_graphs import WIDTH, Model, Node, Step

from weft.router.combine import METHODS
from weft.router.operators.cascade import CascadePlan
from weft.router.operators.collector import CollectorPlan
from weft.router.operators.ensemble import EnsemblePlan
from weft.router.operators.sequence import SequencePlan
from weft.router.operators.splitter import SplitterPlan
from weft.router.operators.switch import SwitchPlan


@dataclass(frozen=True)
class Stream:
    """What a step or a node gives.

    Attributes:
        responses: Each a value for each tensor.
        code: It then fails with this; "" if it does not.
        has_answered: Of a step: whether it gave this, not its default.
        is_ordered: Whether the responses come in this order.
        may_be_fewer: Of what fails: something beside it failed, and where it was by then is open.
    """

    responses: list[Values] = field(default_factory=list)
    code: str = ""
    has_answered: bool = True
    is_ordered: bool = True
    may_be_fewer: bool = False


class StreamInterpreter:
    """Runs graphs that may stream."""

    def __init__(self) -> None:
        self.branches = Interpreter()
        self.wanted: dict[Step, Collection[str]] = {}

    def node(self, node: Node, values: Values, wanted: Collection[str]) -> Stream:
        """The responses of a node."""
        read = read_in(node, wanted)
        self.wanted |= {one: read for step in node.steps for one in step.chain}
        if node.kind is SequencePlan:
            return self.sequence(node, values, wanted)
        if node.kind is EnsemblePlan:
            return self.ensemble(node, values)
        if node.kind is CascadePlan:
            return self.cascade(node, values)
        if node.kind is CollectorPlan:
            return self.collector(node, values)
        if node.kind is SplitterPlan:
            return self.step(node.steps[-1], values)
        assert node.kind is SwitchPlan
        try:
            chosen = self.branches.branch(node, values, 0)
        except FailsError as failure:
            return Stream(code=failure.code)
        return self.step(chosen, values, looks_at_when=False)

    def step(self, step: Step, values: Values, *, looks_at_when: bool = True) -> Stream:
        """The responses of a step, in the tensors of its node."""
        absent = Stream([default(step, values)], has_answered=False)
        if looks_at_when and not all(holds(test, values) for test in step.when):
            return absent
        given = self.target(step, values)
        if given.may_be_fewer and given.responses and (step.fallback is not None or step.is_soft):
            raise AmbiguousError
        if given.code and not given.responses:
            if step.fallback is not None:
                given = self.step(step.fallback, values)
            if given.code and not given.responses and step.is_soft:
                return absent
        completed = [default(step, values) | present(response) for response in given.responses]
        return replace(given, responses=completed, code="" if step.is_soft and completed else given.code)

    def target(self, step: Step, values: Values) -> Stream:
        inputs = inputs_of(step, values)
        if isinstance(step.target, Node):
            wanted = [name for name, tensor in step.outputs if tensor in self.wanted[step]]
            given = self.node(step.target, {"E": None} | inputs, wanted)
        else:
            given = called(step.target, inputs)
        named = [{tensor: one.get(name) for name, tensor in step.outputs} for one in given.responses]
        return replace(given, responses=named, has_answered=True)

    def sequence(self, node: Node, values: Values, wanted: Collection[str]) -> Stream:
        waiting = {node.steps[index].name: node.steps[index] for index in live_steps(node, wanted)}
        needs = {name: waits_for(node, step, set(waiting)) for name, step in waiting.items()}
        given = self.rest(waiting, needs, dict(values))
        behind = steps_behind(node, wanted)
        if not any(map(can_stream, behind)):  # what streams is read to its end, for one response
            if given.code:
                return Stream(code=given.code, may_be_fewer=given.may_be_fewer)
            given = self.rest({step.name: step for step in behind}, needs, dict(values))
        return replace(given, responses=[{n: one.get(n) for n in node.outputs} for one in given.responses])

    def rest(self, waiting: Mapping[str, Step], needs: Mapping[str, set[str]], values: Values) -> Stream:
        """What comes of the steps that have not run yet; those that cannot stream run first."""
        ready = [step for name, step in waiting.items() if needs[name].isdisjoint(waiting)]
        if not ready:
            return Stream([values])
        step = min(ready, key=can_stream)
        others = {name: other for name, other in waiting.items() if other is not step}
        given = self.step(step, values)
        if not given.responses:
            return replace(given, may_be_fewer=True)
        responses: list[Values] = []
        is_ordered = given.is_ordered
        for response in given.responses:
            ok = [b""] if given.has_answered else None
            after = self.rest(others, needs, values | response | {f"steps.{step.name}": ok})
            responses += after.responses
            is_ordered &= after.is_ordered
            if after.code:
                may_be_fewer = after.may_be_fewer or not is_ordered or len(given.responses) == 1
                return Stream(responses, after.code, is_ordered=is_ordered, may_be_fewer=may_be_fewer)
        return replace(given, responses=responses, is_ordered=is_ordered, has_answered=True)

    def cascade(self, node: Node, values: Values) -> Stream:
        values = dict(values)
        latest: Stream | None = None
        code = "INVALID_ARGUMENT"
        for step in node.steps:
            values[f"steps.{step.name}"] = None
            if not all(holds(test, values) for test in step.when):
                continue
            given = self.step(step, values, looks_at_when=False)
            if given.code and not given.responses:
                return given
            if not given.has_answered:
                code = ""  # that of the step that has failed
                continue
            if not given.responses or not given.is_ordered:
                raise AmbiguousError
            values[f"steps.{step.name}"] = [b""]
            latest = given
            if step.accept is None or holds(step.accept, given.responses[0]):
                break
        return latest if latest is not None else Stream(code=code or "ANY")

    def collector(self, node: Node, values: Values) -> Stream:
        given = self.step(node.steps[0], values)
        if not given.is_ordered:
            raise AmbiguousError
        is_over, code = not given.code, given.code
        try:
            pieces = pieces_of(node, given.responses, is_over=is_over)
        except BrokenError as broken:
            pieces, code = broken.pieces, broken.code
        if node.piece == "WHOLE":
            code = code or ("" if pieces else "UNKNOWN")
            pieces = [] if code else pieces
        return replace(given, responses=pieces, code=code)

    def ensemble(self, node: Node, values: Values) -> Stream:
        given = [self.step(step, values) for step in node.steps]
        is_hard = [not step.is_soft for step in node.steps]
        if node.method is METHODS["FIRST"] and len(given) > 1:
            raise AmbiguousError
        if node.method is METHODS["MERGE"]:
            if any(one.code for one in given):
                return Stream([r for one in given for r in one.responses], "ANY", is_ordered=False, may_be_fewer=True)
            answers = [one for one in given if one.has_answered]
            if not answers:
                raise AmbiguousError
            is_ordered = len(answers) == 1 and answers[0].is_ordered
            return Stream([r for one in answers for r in one.responses], is_ordered=is_ordered)
        failures = [
            one.code for one, hard in zip(given, is_hard, strict=True) if one.code and not one.responses and hard
        ]
        if failures:
            return Stream(code="ANY", may_be_fewer=True)
        if not any(one.has_answered for one in given):
            return Stream(code="ANY")
        streaming = [index for index, step in enumerate(node.steps) if can_stream(step)]
        if not streaming:
            return self.combined(node, given, values)
        (index,) = streaming
        responses: list[Values] = []
        for response in given[index].responses:
            parts = [replace(one, responses=[response]) if i == index else one for i, one in enumerate(given)]
            made = self.combined(node, parts, values)
            responses += made.responses
            if made.code:
                return Stream(responses, made.code, is_ordered=given[index].is_ordered)
        return replace(given[index], responses=responses, has_answered=True)

    def combined(self, node: Node, given: list[Stream], values: Values) -> Stream:
        """One response made of one of each."""
        outputs: list[Rows] = [one.responses[0]["Y"] if one.responses else None for one in given]
        there = [output for output in outputs if output is not None]
        if not there:
            return Stream([{"Y": None}])
        if node.method is METHODS["FIRST"]:
            return Stream([{"Y": there[0]}])
        if node.custom is None:
            return Stream([{"Y": COMBINED[node.method](there)}])
        num_rows = len(there[0])
        stack = [b"".join(bytes(WIDTH) if o is None else o[row] for o in outputs) for row in range(num_rows)]
        mask = bytes(output is not None for output in outputs)
        made = called(node.custom, {"S": stack, "MASK": [mask] * num_rows})
        return replace(made, responses=[{"Y": one["OUT"]} for one in made.responses])


def called(model: Model, inputs: Values) -> Stream:
    """What a model answers."""
    if any(inputs[name] is None for name in model.required):
        raise UnsoundError
    rows = rows_of(inputs)
    if model.streams:
        return Stream([dict(answer) for answer in model.responses(rows)], model.code if model.fails else "")
    return Stream(code=model.code) if model.fails else Stream([dict(model.answer(rows))])
