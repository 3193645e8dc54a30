"""What a request asks of a graph: outputs, intermediate tensors, routes, and an answer that may be kept."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from weft.base.caching import CachedResponse, CoalescingCache, cache_key, cache_key_base
from weft.base.core import RequestedOutput
from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.security.access import KEY_HEADERS
from weft.base.tensors import WireTensor
from weft.base.text.pbtxt import suggestion
from weft.language.plan import CallPlan, GraphPlan, NodePlan, Reshaping, StepPlan
from weft.language.pruning import live_steps
from weft.router.policies.cache import CachePlan
from weft.router.reporting.path import UsualPath
from weft.router.runtime import Runtime
from weft.router.steps.action import ErrorContext
from weft.router.steps.node import Node, PrunableNode, across
from weft.router.steps.run import Run
from weft.router.tensors import fitted_output, full_rank

#: Selections that a graph keeps; the oldest goes first.
MAX_SELECTIONS = 64
#: Request header that pins the path; read only where the router allows it.
ROUTE_HEADER = "x-graph-route"
#: Metadata that belongs to one connection, or that each hop writes anew.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "content-type",
        "host",
        "keep-alive",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "triton_grpc_error",
        "upgrade",
        "user-agent",
    }
)
#: A key is for the service that it was sent to.
_NOT_FORWARDED = _HOP_BY_HOP | KEY_HEADERS
_TRACE_CONTEXT = frozenset({"traceparent", "tracestate"})


class Intermediate(NamedTuple):
    """One tensor.

    Attributes:
        root_step: Index of the step of the root that it lies in; -1 where the root runs as a whole.
    """

    path: str
    output: str
    root_step: int

    @property
    def key(self) -> str:
        """The key that steps keep it under."""
        return f"{self.path}/{self.output}"


class Intermediates:
    """Every tensor of a graph that can be requested by the step that gives it.

    Args:
        outputs: Names of the graph's own outputs; these come first where a name is both.
    """

    def __init__(self, root: NodePlan, outputs: Collection[str]) -> None:
        self._outputs = outputs
        self._by_name: dict[str, Intermediate] = {}
        for index, step in enumerate(root.steps):
            self._add(step, index, root.path)
        for custom in root.customs:
            self._add(custom, -1, root.path)

    def get(self, name: str) -> Intermediate | None:
        """The tensor of that name; None for an output of the graph itself."""
        return None if name in self._outputs else self._by_name.get(name)

    def own_outputs(self, requested: tuple[RequestedOutput, ...], graph: str) -> tuple[RequestedOutput, ...]:
        """What is requested of the graph's own outputs; what has no ``/`` is taken for one.

        Raises:
            InvalidArgumentError: A name with ``/`` is neither an output nor an intermediate tensor of the graph.
        """
        if all("/" not in output.name for output in requested):
            return requested
        for name, _ in requested:
            if "/" in name and name not in self._outputs and name not in self._by_name:
                hint = suggestion(name[:200], (*self._outputs, *self._by_name))
                raise InvalidArgumentError(
                    f"unexpected inference output '{name[:200]}' for model '{graph}': no step of the graph gives such "
                    f"a tensor{hint}"
                )
        return tuple(output for output in requested if self.get(output.name) is None)

    def _add(self, step: StepPlan, index: int, root: str) -> None:
        for inner, outputs in steps_within(step):
            name = inner.path.removeprefix(root).removeprefix("/")
            for output in outputs:
                self._by_name.setdefault(f"{name}/{output}", Intermediate(inner.path, output, index))


def steps_within(step: StepPlan) -> Iterator[tuple[StepPlan, list[str]]]:
    """The step, its fallbacks and all steps inside, with the outputs of their targets; shadows are left out."""
    if step.shadow is not None:
        return
    action = step.action
    if isinstance(action, CallPlan):
        yield step, [spec.name for spec in action.signature.outputs]
    else:
        yield step, [binding.name for binding in action.outputs]
        for inner in (*action.steps, *action.customs):
            yield from steps_within(inner)
    if step.fallback is not None:
        yield from steps_within(step.fallback)


class Selection(NamedTuple):
    """A set of requested outputs.

    Attributes:
        names: Of the outputs, in the order in which they are answered.
        slots: For each of the graph's own outputs its slot in the root's frame, its rank there, and what gives it
            the dims that clients see, where these differ.
        captures: Outputs that steps keep, by the step's path; None for nothing.
        usual_path: Of a request in which every step answers; None where the request decides.
    """

    node: Node
    names: tuple[str, ...]
    slots: Mapping[str, tuple[int, int | None, Reshaping | None]]
    keys: Mapping[str, str]
    captures: Mapping[str, tuple[str, ...]] | None
    usual_path: UsualPath | None

    def outputs(self, run: Run) -> dict[str, WireTensor]:
        """The outputs that have a value after a run of ``node``."""
        frame, captured = run.frame, run.request.captured
        outputs: dict[str, WireTensor] = {}
        for name in self.names:
            if name in self.slots:
                slot, rank, reshaping = self.slots[name]
                tensor = frame[slot]
                if tensor is not None and rank is not None and len(tensor.shape) != rank:
                    tensor = fitted_output(tensor, rank)
                if reshaping is not None and tensor is not None:
                    tensor = across(tensor, reshaping)
            else:
                tensor = captured.get(self.keys[name])
            if tensor is not None:
                outputs[name] = tensor
        return outputs


class Selections:
    """Computes selections, once for each set of outputs.

    Where the root can leave steps out, those that the outputs do not need are. Intermediate tensors are outputs as
    any other: a request for them alone runs what they need and no more.
    """

    def __init__(self, plan: GraphPlan, root: Node) -> None:
        self._root = root
        self.intermediates = Intermediates(plan.root, [spec.name for spec in plan.signature.outputs])
        is_batching = plan.signature.max_batch_size > 0
        ranks = {spec.name: full_rank(spec, is_batching=is_batching) for spec in plan.signature.outputs}
        by_slot = {one.slot: one for one in plan.root.reshaped_outputs}
        inside = {name: by_slot[slot] for name, slot in plan.root.outputs if slot in by_slot}
        ranks |= {name: len(one.source) + is_batching for name, one in inside.items()}
        self._slots = {name: (slot, ranks.get(name), inside.get(name)) for name, slot in plan.root.outputs}
        self.all = self._made(tuple(self._slots), is_whole=True)
        self._known: dict[tuple[str, ...], Selection] = {}

    def of(self, requested: Sequence[RequestedOutput]) -> Selection:
        """The selection of a request that names outputs."""
        names = tuple(dict.fromkeys([output.name for output in requested]))
        found = self._known.get(names)
        if found is None:
            if len(self._known) >= MAX_SELECTIONS:
                del self._known[next(iter(self._known))]
            found = self._known[names] = self._made(names, is_whole=False)
        return found

    def _made(self, names: tuple[str, ...], *, is_whole: bool) -> Selection:
        asked = {name: found for name in names if (found := self.intermediates.get(name)) is not None}
        keys = {name: found.key for name, found in asked.items()}
        node = self._root
        if isinstance(node, PrunableNode) and not is_whole:
            also = {found.root_step for found in asked.values()}
            node = node.only(live_steps(node.plan, [name for name in names if name in self._slots], also))
        captures = _captures(asked.values()) if asked else None
        return Selection(node, names, self._slots, keys, captures, _usual_path(node))


def _usual_path(node: Node) -> UsualPath | None:
    """That of calls which follow one another."""
    chain = node.chain
    if chain is None or not all(isinstance(step.plan.action, CallPlan) for step in chain):
        return None
    return UsualPath(len(chain))


def _captures(asked: Iterable[Intermediate]) -> Mapping[str, tuple[str, ...]]:
    """Path of each step -> its outputs, in an order that does not depend on the request's."""
    captures: dict[str, tuple[str, ...]] = {}
    for path, output in sorted({(found.path, found.output) for found in asked}):
        captures[path] = (*captures.get(path, ()), output)
    return captures


class Routes:
    """The nodes of a graph whose step a request may choose, which messages call splitters."""

    def __init__(self, root: NodePlan) -> None:
        self._steps: dict[str, list[str]] = {}
        for node in _pinnable(root):
            known = self._steps.setdefault(node.name, [])
            known += [step.name for step in node.steps if step.name not in known]

    def parse(self, header: str) -> Mapping[str, str]:
        """Splitter node -> step, as the header says.

        Raises:
            InvalidArgumentError: It is no such list, or names a node or step that is not there, or a node twice.
        """
        pins: dict[str, str] = {}
        for entry in header.split(","):
            node, equals, step = (part.strip() for part in entry.partition("="))
            if not (node and equals and step):
                raise InvalidArgumentError(
                    f"header '{ROUTE_HEADER}' is {header[:200]!r}; write <splitter node>=<step>, several with commas"
                )
            steps = self._steps.get(node)
            if steps is None:
                known = ", ".join(f"'{name}'" for name in self._steps) or "none"
                raise InvalidArgumentError(
                    f"header '{ROUTE_HEADER}' names node {node[:200]!r}; the splitters of this graph are: {known}"
                )
            if step not in steps:
                known = ", ".join(f"'{name}'" for name in steps)
                raise InvalidArgumentError(
                    f"header '{ROUTE_HEADER}' names step {step[:200]!r} of splitter '{node}'; its steps are: {known}"
                )
            if node in pins:
                raise InvalidArgumentError(f"header '{ROUTE_HEADER}' names splitter '{node}' twice; give it one step")
            pins[node] = step
        return pins


def _pinnable(node: NodePlan) -> Iterator[NodePlan]:
    if node.can_be_pinned:
        yield node
    for step in (*node.steps, *node.shadows):
        yield from _inside(step)


def _inside(step: StepPlan) -> Iterator[NodePlan]:
    if isinstance(step.action, NodePlan):
        yield from _pinnable(step.action)
    if step.fallback is not None:
        yield from _inside(step.fallback)


class GraphAnswers:
    """Runs a graph once for equal requests: from the cache, or together while the first of them runs.

    Requests are equal when their inputs and requested outputs, in any order, are, and the value of the plan's key
    condition; headers and parameters do not count. Errors are not kept.
    """

    def __init__(self, plan: GraphPlan, cache: CachePlan, error_context: ErrorContext, runtime: Runtime) -> None:
        self._subject = ("", plan.signature.name, plan.signature.version)
        self._inputs = plan.root.inputs
        self._condition = cache.key
        self._error_context = error_context
        self._answers = CoalescingCache(
            runtime.share(cache.max_bytes), cache.ttl_ms, runtime.clock_ns, cache.stale_if_error_ms
        )

    async def outputs(self, run: Run, selection: Selection) -> tuple[dict[str, WireTensor], bool]:
        """The outputs, and whether they took no run of our own; response parameters are in the request of ``run``."""
        request, kept = run.request, sorted(selection.names)
        extra = ""
        if self._condition is not None:
            extra = self._error_context.text(self._condition, run, "cache key of the graph")
        inputs = [(name, run.frame[slot]) for name, slot in self._inputs]

        async def make() -> CachedResponse:
            own = run.fork()
            await selection.node.run(own)
            outputs = selection.outputs(own)
            return CachedResponse(tuple(map(outputs.get, kept)), own.request.response_parameters)

        key = cache_key(cache_key_base(self._subject, kept), inputs, extra)
        try:
            answer, is_cached = await self._answers.answer(key, make, run.deadline_ns)
        except WeftError as error:
            stale = self._answers.stale_on_unavailable(error, key)
            if stale is None:
                raise
            answer, is_cached = stale, True
        request.response_parameters.update(answer.parameters)
        found = dict(zip(kept, answer.outputs, strict=True))
        return {name: tensor for name in selection.names if (tensor := found[name]) is not None}, is_cached


def forwarded_headers(headers: Mapping[str, str], *, is_traced: bool) -> dict[str, str]:
    """The metadata that a step receives.

    Args:
        is_traced: Spans are made here, so each call carries a trace context of its own; else the client's goes through.
    """
    forwarded: dict[str, str] = {}
    if not headers:
        return forwarded
    for key, value in headers.items():
        if key in _NOT_FORWARDED or key.startswith(("grpc-", ":")) or (is_traced and key in _TRACE_CONTEXT):
            continue
        forwarded[key] = value
    return forwarded
