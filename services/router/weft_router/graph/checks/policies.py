"""What of the policies of graph, node and step holds for one step: the inner one wins."""

from dataclasses import dataclass

from weft_protos import graph_pb2 as pb
from weft_router.graph.plan import HedgePlan, RetryPlan
from weft_router.graph.syntax.parse import GraphFile
from weft_router.graph.syntax.report import GraphReport

#: gRPC status codes that may be worth another attempt. The others say that the same call fails again, or, CANCELLED,
#: that nobody waits any more.
RETRY_CODES = (
    "UNAVAILABLE",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "ABORTED",
    "INTERNAL",
    "UNKNOWN",
    "DATA_LOSS",
)
_DEFAULT_CODES = frozenset({"UNAVAILABLE"})
_DEFAULT_BUDGET_PERCENT = 20.0
_DEFAULT_CACHE_MIB = 64


@dataclass(frozen=True, slots=True)
class StepPolicies:
    """Limits of one step, those of its node and graph worked in; fields as in ``StepPlan``."""

    timeout_ms: int = 0
    max_inflight: int = 0
    min_remaining_ms: int = 0
    retry: RetryPlan | None = None
    hedge: HedgePlan | None = None


def step_policies(
    file: GraphFile,
    graph_policy: pb.Policy,
    node_policy: pb.Policy,
    step: pb.Step,
    path: str,
    *,
    is_call: bool,
    report: GraphReport,
) -> StepPolicies:
    """What holds for one step, a fallback or a combining model among them.

    ``timeout_ms`` and ``max_inflight`` are the step's own: graph and node have theirs for themselves. ``retry``,
    ``hedge`` and ``min_remaining_ms`` of the node, or else of the graph, are defaults of the steps that call a model.
    A ``retry`` of one attempt switches the outer one off. A shadow inherits neither ``retry`` nor ``hedge``.

    Args:
        file: Where the step stands.
        graph_policy: That of ``file``'s graph.
        node_policy: That of the node around the step.
        step: The step.
        path: Of the step, for positions.
        is_call: Whether the step calls a model, not a node or a graph.
        report: Receives limits that contradict each other (G021); values that are wrong alone are reported by
            ``check_limits``.
    """
    policies = [step.policy, *((node_policy, graph_policy) if is_call else ())]
    can_repeat = policies[:1] if step.HasField("shadow") else policies
    retry = next((policy.retry for policy in can_repeat if policy.HasField("retry")), None)
    hedge = next((policy.hedge for policy in can_repeat if policy.HasField("hedge")), None)
    min_remaining_ms = next((policy.min_remaining_ms for policy in policies if policy.min_remaining_ms), 0)
    _check_remaining(file, step, path, min_remaining_ms, [graph_policy, node_policy], report)
    return StepPolicies(
        timeout_ms=step.policy.timeout_ms,
        max_inflight=step.policy.max_inflight,
        min_remaining_ms=min_remaining_ms,
        retry=_retry_plan(retry) if retry is not None and retry.attempts > 1 else None,
        hedge=HedgePlan(hedge.after_ms, hedge.max_extra or 1) if hedge is not None else None,
    )


def cache_limits(cache: pb.Cache) -> tuple[int, int]:
    """(``ttl_ms``, 0 meaning until evicted; memory in bytes) of a cache, defaults filled in."""
    return cache.ttl_ms, (cache.max_mib or _DEFAULT_CACHE_MIB) << 20


def _retry_plan(retry: pb.Retry) -> RetryPlan:
    return RetryPlan(
        attempts=retry.attempts,
        backoff_ms=retry.backoff_ms,
        codes=frozenset(retry.on) or _DEFAULT_CODES,
        budget_percent=retry.budget_percent or _DEFAULT_BUDGET_PERCENT,
    )


def _check_remaining(
    file: GraphFile, step: pb.Step, path: str, min_remaining_ms: int, around: list[pb.Policy], report: GraphReport
) -> None:
    """A step that wants more time than there ever is never runs."""
    limit_ms = min((policy.timeout_ms for policy in around if policy.timeout_ms), default=0)
    if 0 < limit_ms <= min_remaining_ms:
        text = (
            f"the step never runs: it wants 'min_remaining_ms: {min_remaining_ms}', but all the time there is, the "
            f"'timeout_ms' around it, is {limit_ms}; make the first less than the second"
        )
        report.error("G021", file, f"{path}.policy.min_remaining_ms", text)
