"""Request options of a graph: requested outputs, intermediate tensors, routes; and cached answers."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from weft.base.caching import CachedResponse, CoalescingCache, cache_key, cache_key_base
from weft.base.core import RequestedOutput
from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.security.access import KEY_HEADERS
from weft.base.tensors import WireTensor
from weft.base.text.pbtxt import suggestion
from weft.language.plan import CallPlan, GraphPlan, NodePlan, Reshaping, StepPlan, steps_of
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
    """A tensor inside the graph that a client can request.

    Attributes:
        root_step: Index of the root's step that contains it; -1 if the root runs as a whole.
    """

    path: str
    output: str
    root_step: int

    @property
    def key(self) -> str:
        """The key under which steps capture it."""
        return f"{self.path}/{self.output}"


class Intermediates:
    """All tensors of a graph that can be requested as ``step/tensor``.

    Args:
        outputs: Names of the graph's own outputs; they take precedence.
    """

    def __init__(self, root: NodePlan, outputs: Collection[str]) -> None:
        self._outputs = outputs
        self._by_name: dict[str, Intermediate] = {}
        for index, step in enumerate(root.steps):
            self._add(step, index, root.path)
        for custom in root.customs:
            self._add(custom, -1, root.path)

    def get(self, name: str) -> Intermediate | None:
        """Look up a tensor; None for an output of the graph itself."""
        return None if name in self._outputs else self._by_name.get(name)

    def own_outputs(self, requested: tuple[RequestedOutput, ...], graph: str) -> tuple[RequestedOutput, ...]:
        """The requested outputs of the graph itself; a name without ``/`` counts as one.

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
    """The step, its fallbacks and all nested steps, with the outputs of their targets; without shadows."""
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
        names: Of the outputs, in the order of the answer.
        slots: For each of the graph's own outputs: its slot in the root's frame, its rank there, and the reshape to the
            dims that clients see, if they differ.
        captures: Outputs that steps capture, by the step's path; None for none.
        usual_path: Path of a request in which every step answers; None if it depends on the request.
    """

    node: Node
    names: tuple[str, ...]
    slots: Mapping[str, tuple[int, int | None, Reshaping | None]]
    keys: Mapping[str, str]
    captures: Mapping[str, tuple[str, ...]] | None
    usual_path: UsualPath | None

    def outputs(self, run: Run) -> dict[str, WireTensor]:
        """The outputs that have a value after a run of the node."""
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

    If the root can skip steps, those that the outputs do not need are skipped. Intermediate tensors count as outputs: a
    request for them alone runs only what they need.
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
    """The ``UsualPath`` of a node whose steps are model calls that run one after another; None for others."""
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
    """The nodes of a graph whose step a request may choose with ``x-graph-route``."""

    def __init__(self, root: NodePlan) -> None:
        self._steps: dict[str, list[str]] = {}
        for node in {node.path: node for node, _ in steps_of(root) if node.can_be_pinned}.values():
            known = self._steps.setdefault(node.name, [])
            known += [step.name for step in node.steps if step.name not in known]

    def parse(self, header: str) -> Mapping[str, str]:
        """Parse the header to splitter node -> step.

        Raises:
            InvalidArgumentError: It is malformed, names an unknown node or step, or a node twice.
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


class GraphAnswers:
    """Runs a graph once for equal requests: answers from the cache, or joins a running one.

    Requests are equal if their inputs, requested outputs (in any order) and the value of the plan's key condition are;
    headers and parameters do not count. Errors are not kept.
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
        """Return the outputs, and whether no own run was needed; response parameters are in the request of ``run``."""
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
        is_traced: Each call gets a trace context of its own span; else the client's is passed on.
    """
    forwarded: dict[str, str] = {}
    if not headers:
        return forwarded
    for key, value in headers.items():
        if key in _NOT_FORWARDED or key.startswith(("grpc-", ":")) or (is_traced and key in _TRACE_CONTEXT):
            continue
        forwarded[key] = value
    return forwarded
