"""How random graphs are drawn."""

import os
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from tests.unit.router.naive_types import answered_perhaps, can_stream, given_perhaps, waits_for
from tests.unit.router.random_graph_text import is_allowed
from tests.unit.router.random_graphs import CODES, Model, Node, Step, Test, models_within

from weft.language.plan import NodePlan
from weft.router.combine import METHODS
from weft.router.operators.cascade import CascadePlan
from weft.router.operators.collector import CollectorPlan
from weft.router.operators.ensemble import EnsemblePlan
from weft.router.operators.map import MapPlan
from weft.router.operators.sequence import SequencePlan
from weft.router.operators.splitter import SplitterPlan
from weft.router.operators.switch import SwitchPlan
from weft.router.policies.hedge import HedgePlan
from weft.router.policies.retry import RetryPlan

KINDS: tuple[type[NodePlan], ...] = (
    SequencePlan,
    SequencePlan,
    SwitchPlan,
    SplitterPlan,
    EnsemblePlan,
    CascadePlan,
    MapPlan,
    CollectorPlan,
)
COMBINE_METHODS = tuple(METHODS[name] for name in ("FIRST", "VOTE", "MAX", "SUM", "CUSTOM"))


#: In a hundred steps so many read something that may be absent where they must not, which the language does not allow.
PERCENT_CARELESS = 5
#: Of nodes within nodes.
MAX_DEPTH = 2


class Drawing:
    """Draws one graph; every model and node gets a number of its own."""

    def __init__(self, draw: st.DrawFn, *, has_streams: bool = False) -> None:
        self.draw = draw
        self.has_streams = has_streams
        self.count = 0
        self.num_hedged = 0

    def number(self) -> int:
        self.count += 1
        return self.count

    def chance(self, percent: int) -> bool:
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def test(self, names: tuple[str, ...], absent: set[str] | frozenset[str] = frozenset()) -> Test:
        """A test of one of the tensors or steps; whether it is there is asked only of what may be absent."""
        name = self.draw(st.sampled_from(names))
        may_ask = name in absent or name.startswith("steps.")
        rest = self.draw(st.integers(0 if may_ask else 1, 4))
        return Test(name, rest, is_not=self.chance(15))

    def target(
        self, depth: int, required: tuple[str, ...], optional: tuple[str, ...], *, gives_more: bool
    ) -> Model | Node:
        if depth > 0 and self.chance(40):
            return self.node(depth - 1, gives_more=gives_more)
        return self.model(required, optional, gives_more=gives_more)

    def model(self, required: tuple[str, ...], optional: tuple[str, ...] = (), *, gives_more: bool = False) -> Model:
        outputs = ("OUT", "AUX") if gives_more else ("OUT",)
        leaves_out = tuple(one for one in outputs if self.chance(15))
        fails, is_flaky = self.chance(15), self.chance(15) and not self.has_streams
        streams = self.has_streams and self.chance(35)
        return Model(self.number(), fails, is_flaky, required, optional, outputs, leaves_out, streams)

    def around(self) -> dict[str, Any]:
        """Policies around a target; within a hedge nothing is kept, because its calls would share it.

        What streams is not kept; a model then answers every attempt alike, so that these change nothing.
        """
        hedge = HedgePlan(self.draw(st.integers(1, 60)), self.draw(st.integers(1, 3))) if self.chance(10) else None
        retry = None
        if self.chance(12):
            codes = self.draw(st.sets(st.sampled_from((*CODES, "DEADLINE_EXCEEDED")), min_size=2))
            retry = RetryPlan(
                self.draw(st.integers(2, 3)), self.draw(st.sampled_from((0, 15))), frozenset(codes), 100.0
            )
        return {
            "retry": retry,
            "hedge": hedge,
            "is_cached": self.chance(12) and not self.num_hedged and not self.has_streams,
        }

    def aimed(
        self, depth: int, x: str, e: str, reads: tuple[str, ...], absent: frozenset[str], outputs: tuple[str, ...]
    ) -> dict[str, Any]:
        """Target, inputs, outputs and policies of a step.

        Args:
            depth: Of nodes that may follow.
            x: What it reads as X.
            e: What a node gets as E if nothing is read.
            reads: What else it may read.
            absent: What of all that may be absent for it.
            outputs: Its tensors.
        """
        policies = self.around()
        self.num_hedged += policies["hedge"] is not None
        careless = self.chance(PERCENT_CARELESS)
        sure = tuple(name for name in reads if careless or name not in absent)
        required = tuple(name for name in sure if self.chance(50))
        target = self.target(
            depth, ("X", *required), tuple(name for name in reads if name not in required), gives_more=len(outputs) > 1
        )
        self.num_hedged -= policies["hedge"] is not None
        constants: tuple[tuple[str, bytes], ...] = ()
        if self.chance(15):
            constants = (("E" if isinstance(target, Node) else "K", self.draw(st.binary(min_size=8, max_size=8))),)
        if isinstance(target, Node):
            others = () if constants else (("E", reads[0] if reads else e),)
            inputs: tuple[tuple[str, str], ...] = (("X", x), *others)
            given = zip(target.outputs, outputs, strict=False)
        else:
            target = replace(target, required=(*target.required, *(name for name, _ in constants)))
            inputs = (("X", x), *((name, name) for name in reads))
            given = zip(target.outputs, outputs, strict=True)
        return {"target": target, "inputs": inputs, "outputs": tuple(given), "constants": constants} | policies

    def step(
        self,
        index: int,
        depth: int,
        seen: tuple[str, ...],
        absent: frozenset[str],
        oks: tuple[str, ...],
        outputs: tuple[str, ...],
        **more: Any,
    ) -> Step:
        is_soft = self.chance(35)
        when = (
            tuple(self.test((*seen, *oks), absent) for _ in range(self.draw(st.integers(1, 2))))
            if self.chance(25)
            else ()
        )
        narrowed = {test.name for test in when if not test.is_not}
        certain = absent - narrowed
        xs = [name for name in seen if name not in certain]
        x = self.draw(st.sampled_from(xs)) if self.chance(30) else seen[0]
        reads = tuple(name for name in seen if name not in (x, "X") and self.chance(40))[:2]
        step = Step(
            f"s{index}",
            **self.aimed(depth, x, seen[1], reads, frozenset(certain), outputs),
            is_soft=is_soft,
            when=when,
            timeout_ms=self.draw(st.integers(61, 150)) if self.chance(15) and not self.has_streams else 0,
        )
        if self.chance(15):
            fallback = Step(
                f"f{index}", **self.aimed(0, x, seen[1], reads, frozenset(certain), tuple(t for _, t in step.outputs))
            )
            step = replace(step, fallback=fallback)
        perhaps = answered_perhaps(step)
        may_lack = [tensor for _, tensor in step.outputs if is_soft or when or tensor in perhaps]
        return replace(step, defaults=tuple(tensor for tensor in may_lack if self.chance(50)), **more)

    def node(self, depth: int, *, gives_more: bool = False) -> Node:
        name, size = f"n{self.number()}", self.draw(st.integers(1, 4))
        kind = self.draw(st.sampled_from(KINDS))
        if (kind in (EnsemblePlan, MapPlan) and gives_more) or (kind is MapPlan and self.has_streams):
            kind = SequencePlan
        if kind is CollectorPlan and gives_more:
            kind = SequencePlan
        node = self.node_of(kind, name, size, depth, gives_more=gives_more)
        return replace(node, is_graph=True) if depth < MAX_DEPTH and self.chance(15) else node

    def node_of(self, kind: type[NodePlan], name: str, size: int, depth: int, *, gives_more: bool) -> Node:
        if kind is MapPlan:
            return self.map(name, depth)
        if kind is CollectorPlan:
            return self.collector(name, depth)
        outputs = ("Y", "Z") if gives_more else ("Y",)
        if kind is SequencePlan:
            return self.sequence(name, size, depth, outputs)
        steps = []
        for index in range(size):
            oks = tuple(f"steps.s{i}" for i in range(index) if kind is CascadePlan)
            steps.append(self.step(index, depth, ("X", "E"), frozenset("E"), oks, outputs))
        steps = [with_first_output(step) if self.chance(15) else step for step in steps]
        if max(len(step.outputs) for step in steps) == 1:
            outputs = ("Y",)
        if kind is SwitchPlan:
            return self.switch(name, steps, outputs)
        if kind is EnsemblePlan:
            return self.ensemble(name, steps)
        if kind is CascadePlan:
            for index in range(size):
                accept = self.test(("Y",), given_perhaps_of(steps[index])) if index < size - 1 else None
                limit_ms = self.draw(st.integers(20, 150)) if self.chance(20) and not self.has_streams else 0
                steps[index] = replace(steps[index], accept=accept, min_remaining_ms=limit_ms)
            steps = [with_useful_defaults(step) for step in steps]
            if not steps[0].is_soft and size > 1 and self.chance(60):
                steps[0] = replace(steps[0], is_soft=True)
            return Node(name, kind, tuple(steps), outputs, per_row=self.chance(50) and not self.has_streams)
        return Node(name, kind, tuple(steps), outputs)

    def map(self, name: str, depth: int) -> Node:
        """Nothing is kept in it, because its chunks would share that."""
        self.num_hedged += 1
        step = self.step(0, depth, ("L", "E"), frozenset("E"), (), ("Y",))
        self.num_hedged -= 1
        when = tuple(test for test in step.when if test.name == "E")
        step = replace(step, name="s0", when=when)
        if not step.is_soft and not when:
            step = with_useful_defaults(step)
        perhaps = given_perhaps(Node(name, MapPlan, ()), step)
        collects_lists = self.chance(40)
        if collects_lists and not isinstance(step.target, Node) and self.chance(70):
            step = ragged(step)
        lists = ("L", "N") if collects_lists else ("L",)
        required, optional = (("X",), lists) if perhaps or self.chance(30) else (("X", *lists), ())
        split, join = (Model(self.number(), fails=False) for _ in range(2))
        return Node(
            name,
            MapPlan,
            (step,),
            split=split,
            join=replace(join, required=required, optional=optional),
            has_lengths=self.chance(30),
            chunk_rows=self.draw(st.sampled_from((0, 1, 2, 3, 7))),
            max_inflight=self.draw(st.sampled_from((0, 1, 2, 3))),
            collects_lists=collects_lists,
        )

    def collector(self, name: str, depth: int) -> Node:
        """A sequence: the collector, and a model that reads its pieces. Without streams it collects a model."""
        spoken = ("OUT", "TEXT", "NUMS")
        required: tuple[str, ...] = ("X",)
        inputs: tuple[tuple[str, str], ...] = (("X", "X"),)
        inner: list[Step] = []
        if self.has_streams and self.chance(70):
            first = self.step(0, depth, ("X", "E"), frozenset("E"), (), (f"{name}t",))
            is_sure = not given_perhaps(Node(name, SequencePlan, ()), first)
            inner, inputs = [first], (*inputs, ("M", f"{name}t"))
            required = ("X", "M") if is_sure else required
        piece = self.draw(st.sampled_from(("WHOLE", "SENTENCE", "RESPONSES"))) if self.has_streams else "WHOLE"
        optional = tuple(name for name, _ in inputs if name not in required)

        must_stream = piece != "SENTENCE" and not any(map(can_stream, inner))

        def say(tensors: tuple[str, ...]) -> dict[str, Any]:
            model = self.model(required, optional)
            streams = must_stream or self.chance(60)
            leaves_out = tuple(one for one in spoken if self.chance(10))
            model = replace(model, outputs=spoken, is_flaky=False, streams=streams, leaves_out=leaves_out)
            return {"target": model, "inputs": inputs, "outputs": tuple(zip(spoken, tensors, strict=True))}

        step = Step("say", **say(spoken))
        if inner:
            inside = Node(f"{name}s", SequencePlan, (*inner, step), spoken, is_declared=False)
            step = Step("all", inside, (("X", "X"), ("E", "E")), tuple((one, one) for one in spoken))
        joins = tuple(one for one in spoken[1:] if self.chance(70)) or spoken[1:]
        pieces = Node(
            f"{name}c",
            CollectorPlan,
            (step,),
            spoken,
            is_declared=False,
            piece=piece,
            count=self.draw(st.integers(2, 3)) if piece == "RESPONSES" else 0,
            max_bytes=self.draw(st.sampled_from((0, 8, 12, 20))),
            joins=("TEXT",) if piece == "SENTENCE" and joins == ("NUMS",) else joins,
        )
        given = tuple((one, f"{name}{one}") for one in spoken)
        is_soft = self.chance(20)
        reading = Step("say", pieces, (("X", "X"), ("E", "E")), given, is_soft=is_soft, **self.around())
        if not inner and self.chance(15):
            other = say(tuple(tensor for _, tensor in given))
            other["target"] = replace(other["target"], streams=False)
            reading = replace(reading, fallback=Step("other", **other))
        perhaps = given_perhaps(Node(name, SequencePlan, ()), reading)
        sure = tuple(one for one, tensor in given if tensor not in perhaps)
        model = self.model(("X", *sure), tuple(one for one in spoken if one not in sure))
        model = replace(model, streams=False)
        read = Step("read", model, (("X", "X"), *given), (("OUT", "Y"),))
        return Node(name, SequencePlan, (reading, read))

    def ensemble(self, name: str, steps: list[Step]) -> Node:
        method = self.draw(st.sampled_from((*COMBINE_METHODS, *[METHODS["MERGE"]] * (3 * self.has_streams))))
        size, num_hard = len(steps), sum(not step.is_soft for step in steps)
        quorum = (
            self.draw(st.integers(max(num_hard, 1), size))
            if num_hard < size and self.chance(60) and not self.has_streams
            else 0
        )
        straggler_ms = (
            self.draw(st.sampled_from((0, 10, 40))) if num_hard < size and quorum < size and not self.has_streams else 0
        )
        if method is METHODS["FIRST"]:
            quorum = straggler_ms = 0
            steps = [replace(step, is_soft=False) for step in steps]
            steps = [step if step.when else with_useful_defaults(step) for step in steps]
        custom = self.model(()) if method is METHODS["CUSTOM"] else None
        custom = custom and replace(custom, leaves_out=(), streams=False)
        node = Node(name, EnsemblePlan, tuple(steps), quorum=quorum, straggler_ms=straggler_ms, method=method)
        return replace(node, custom=custom)

    def sequence(self, name: str, size: int, depth: int, outputs: tuple[str, ...]) -> Node:
        """Its last step gives Y; the last that gives more gives Z."""
        steps: list[Step] = []
        seen: tuple[str, ...] = ("X", "E")
        absent = {"E"}
        in_place: list[tuple[str, str]] = []
        for index in range(size):
            gives_more = self.chance(25)
            tensors = tuple(f"{name}{letter}{index}" for letter in ("tu" if gives_more else "t"))
            oks = tuple(f"steps.s{i}" for i in range(index))
            after = tuple(f"s{i}" for i in range(index) if self.chance(12))
            step = self.step(index, depth, seen, frozenset(absent), oks, tensors, after=after)
            steps.append(step)
            absent |= given_perhaps(Node(name, SequencePlan, ()), step)
            first, *others = (tensor for _, tensor in step.outputs)
            may_stand = [own for own in "XE" if own == "E" or first not in absent]
            taken = self.draw(st.sampled_from(may_stand))
            if index < size - 1 and self.chance(10) and all(taken != own for _, own in in_place):
                in_place.append((first, taken))
                seen = (first, *seen[1:]) if taken == "X" else (seen[0], first, *seen[2:])
            else:
                seen += (first,)
            seen += tuple(others)
        more = [tensor for step in steps for _, tensor in step.outputs[1:] if tensor]
        renamed = {steps[-1].outputs[0][1]: "Y"}
        if len(outputs) > 1 and more:
            renamed[more[-1]] = "Z"
        outputs = outputs if "Z" in renamed.values() else ("Y",)
        node = Node(name, SequencePlan, tuple(rename(step, renamed) for step in steps), outputs)
        node = replace(node, in_place=tuple(in_place))
        if size > 1 and self.chance(10):
            node = replace(node, is_ordered=True, steps=tuple(replace(step, after=()) for step in node.steps))
        node = self.guarded(node)
        if self.has_streams or not self.chance(25):
            return node
        absent = {renamed.get(tensor, tensor) for tensor in absent}
        given = tuple(tensor for step in node.steps for _, tensor in step.outputs)
        certain = [tensor for tensor in given if tensor not in absent]
        carries = self.draw(st.sampled_from(certain)) if certain and self.chance(70) else ""
        unchanged = () if any(own == "X" for _, own in in_place) else ("X",)
        again = self.test((*unchanged, *given), absent)
        return replace(node, max_iterations=self.draw(st.integers(1, 3)), again=again, carries=carries)

    def guarded(self, node: Node) -> Node:
        """The sequence, perhaps with a step that waits for one that stands behind it, or an answer that does."""
        names = [step.name for step in node.steps]
        behind = {name: {name} for name in names}  # those that wait for a step, itself too
        for step in node.steps:
            waits = waits_for(node, step, names)
            behind = {name: found | ({step.name} if waits & found else set()) for name, found in behind.items()}
        if len(names) > 1 and not node.is_ordered and self.chance(15):
            first, second = self.draw(st.sampled_from(names)), self.draw(st.sampled_from(names))
            if second not in behind[first]:
                steps = {step.name: step for step in node.steps}
                steps[first] = replace(steps[first], after=tuple(dict.fromkeys((*steps[first].after, second))))
                node = replace(node, steps=tuple(steps.values()))
        return replace(node, answer_after=tuple(name for name in names if self.chance(8)))

    def switch(self, name: str, steps: list[Step], outputs: tuple[str, ...]) -> Node:
        """Some branches have tests, some values, the last one may be the one for the rest."""
        values = iter("012")
        for index, step in enumerate(steps):
            is_last = index == len(steps) - 1
            value = "" if step.when else next(values, "")
            if not step.when and (not value or (is_last and self.chance(70))):
                steps[index] = replace(step, is_otherwise=True)
                steps = steps[: index + 1]
                break
            steps[index] = replace(step, value=value)
        steps = [step if step.is_soft else with_useful_defaults(step) for step in steps]
        return Node(name, SwitchPlan, tuple(steps), outputs, per_row=self.chance(50) and not self.has_streams)


def with_first_output(step: Step) -> Step:
    """The step, which gives Y alone if it is models that it calls; what else a node gives keeps its name."""
    if any(isinstance(one.target, Node) for one in step.chain):
        return step
    fallback = None if step.fallback is None else with_first_output(step.fallback)
    defaults = tuple(tensor for tensor in step.defaults if tensor == step.outputs[0][1])
    return replace(step, outputs=step.outputs[:1], defaults=defaults, fallback=fallback)


def with_useful_defaults(step: Step) -> Step:
    """The step, with defaults of what its answer may leave out alone."""
    perhaps = answered_perhaps(replace(step, defaults=()))
    return replace(step, defaults=tuple(tensor for tensor in step.defaults if tensor in perhaps))


def given_perhaps_of(step: Step) -> frozenset[str]:
    return given_perhaps(Node("", CascadePlan, ()), step)


def rename(step: Step, names: dict[str, str]) -> Step:
    """The step with other names of tensors."""

    def of(name: str) -> str:
        return names.get(name, name)

    return replace(
        step,
        inputs=tuple((name, of(tensor)) for name, tensor in step.inputs),
        outputs=tuple((name, of(tensor)) for name, tensor in step.outputs),
        defaults=tuple(map(of, step.defaults)),
        when=tuple(replace(test, name=of(test.name)) for test in step.when),
        fallback=None if step.fallback is None else rename(step.fallback, names),
    )


def ragged(step: Step) -> Step:
    """The step, whose models give rows of any length; where a node may answer as well, as it was."""
    if isinstance(step.target, Node) or any(isinstance(one.target, Node) for one in step.chain):
        return step
    fallback = None if step.fallback is None else ragged(step.fallback)
    return replace(step, target=replace(step.target, is_ragged=True), fallback=fallback)


def without_batches(node: Node) -> Node:
    """The node where the graph has no batch dimension: no rows go their own ways, and chunks are for models alone.

    Graphs of their own keep theirs, every second time.
    """
    steps = tuple(_without_batches(step) for step in node.steps)
    targets = [one.target for step in steps for one in step.chain]
    takes_one = any(not (one.is_batched if isinstance(one, Node) else one.takes_batches) for one in targets)
    chunk_rows = 1 if node.kind is MapPlan and takes_one else node.chunk_rows
    own: dict[str, Any] = {field: replace(model, is_batched=False) for field in OWN if (model := getattr(node, field))}
    return replace(node, steps=steps, per_row=False, chunk_rows=chunk_rows, is_batched=False, **own)


OWN = ("custom", "split", "join")


def _without_batches(step: Step) -> Step:
    target = step.target
    if isinstance(target, Model):
        target = replace(target, is_batched=False)
    elif not (target.is_graph and sum(target.name.encode()) % 2):
        target = without_batches(target)
    fallback = None if step.fallback is None else _without_batches(step.fallback)
    return replace(step, target=target, fallback=fallback)


@st.composite
def any_graphs(draw: st.DrawFn) -> Node:
    """A root node with up to two levels of nodes in it; the language may not allow it."""
    return Drawing(draw).node(MAX_DEPTH)


@st.composite
def any_streams(draw: st.DrawFn) -> Node:
    """As `any_graphs`, with decoupled models, and nothing that depends on time."""
    return Drawing(draw, has_streams=True).node(MAX_DEPTH)


def graphs() -> st.SearchStrategy[Node]:
    """Graphs that the language allows, with a batch dimension."""
    return any_graphs().filter(is_allowed)


def graphs_of_any_batch() -> st.SearchStrategy[Node]:
    """Graphs that the language allows, every third without a batch dimension."""
    roots = st.tuples(any_graphs(), st.integers(0, 2))
    return roots.map(lambda pair: without_batches(pair[0]) if pair[1] == 2 else pair[0]).filter(is_allowed)


@st.composite
def any_collectors(draw: st.DrawFn) -> Node:
    """As `any_streams`, with a collector as the root."""
    return Drawing(draw, has_streams=True).collector("n0", 1)


def streams() -> st.SearchStrategy[Node]:
    """Graphs with decoupled models that the language allows; of every second the root is a collector."""
    return st.one_of(any_streams(), any_collectors()).filter(
        lambda root: any(model.streams for model in models_within(root)) and is_allowed(root)
    )


def num_examples(default: int) -> int:
    """How many graphs are drawn; WEFT_RANDOM_GRAPHS makes it more."""
    return int(os.environ.get("WEFT_RANDOM_GRAPHS", default))
