"""Prometheus metrics of the router, its graphs and models, read at scrape time on the metrics server's thread."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft.language.bandit_algorithms import Arm
from weft.router.admission.controller import AdmissionController
from weft.router.policies import POLICIES
from weft.router.reporting.counters import StepCounters
from weft.router.repository.files import GraphRepository
from weft.router.repository.table import GraphTable
from weft.router.rollouts.machine import ABORTED, PAUSED, PROMOTED, ROLLED_BACK, RUNNING, share_now
from weft.router.rollouts.owner import RolloutMember
from weft.router.steps.step import FALLBACK_COUNTERS, SHADOW_COUNTERS
from weft.router.targets.catalog import TargetCatalog
from weft.router.targets.replicas import Health
from weft.router.targets.replicated import ReplicatedTarget
from weft.v2.server.metrics import cumulative_buckets

_TARGET = ("target",)
_ENDPOINT = (*_TARGET, "endpoint")
_STATES = (*(health.value for health in Health), "ejected", "leaving")
PHASES = (RUNNING, PAUSED, PROMOTED, ROLLED_BACK, ABORTED)
_GRAPH = ("graph", "version")
_STEP = ("graph", "version", "step")
_TENSOR = (*_STEP, "tensor")
_ARM = ("graph", "node", "step")
#: (name, help) of what steps count beside their runs.
_COUNTERS = (
    *FALLBACK_COUNTERS,
    *(counter for policy in POLICIES.values() for counter in policy.counters),
    *SHADOW_COUNTERS,
)
#: (name, help, value) of what targets with replicas count, besides ``prefixes``.
_CALLS: tuple[tuple[str, str, Callable[[ReplicatedTarget], int]], ...] = (
    ("moved_calls", "Calls that a replica had not begun and that another one was given", lambda one: one.num_moved),
    ("repeated_calls", "Calls that were made again because their replica was lost", lambda one: one.num_repeated),
    (
        "migrated_streams",
        "Times that a stream of a language model went on at another replica",
        lambda one: one.num_migrated,
    ),
)


class RouterCollector(Collector):
    """Failed loads, degraded graphs, and the statistics of bandits in service."""

    def __init__(self, graphs: GraphTable, repository: GraphRepository) -> None:
        self._graphs = graphs
        self._repository = repository

    def collect(self) -> Iterator[Metric]:
        """Every family; a skipped folder of the repository counts as a graph without a version."""
        failures = CounterMetricFamily(
            "weft_graph_load_failures", "Graph files that could not be loaded", labels=_GRAPH
        )
        failed = GaugeMetricFamily(
            "weft_graph_load_failed",
            "1: its file could not be loaded, for another reason than a target that does not answer yet",
            labels=_GRAPH,
        )
        degraded = GaugeMetricFamily(
            "weft_graph_degraded", "1: ready, but answers without a model that is not", labels=_GRAPH
        )
        arms: dict[tuple[str, str, str], Arm] = {}
        for entry in self._graphs:
            if entry.is_wanted:
                names = (entry.file.name, entry.file.version)
                failures.add_metric(names, entry.num_load_failures)
                failed.add_metric(names, entry.is_failing)
                degraded.add_metric(names, bool(self._graphs.why_degraded(entry)))
            if (serving := entry.serving) is not None:
                arms |= {(graph, node, step): arm for graph, node, step, arm in serving.arms}
        for name in self._repository.faults:
            failed.add_metric((name, ""), 1)
        yield from (failures, failed, degraded)
        pulls = CounterMetricFamily("weft_bandit_pulls", "Requests that a bandit sent to the step", labels=_ARM)
        rewards = CounterMetricFamily("weft_bandit_rewards", "Rewards that the step was given", labels=_ARM)
        sums = CounterMetricFamily("weft_bandit_reward_sum", "Sum of the rewards", labels=_ARM)
        for key, arm in arms.items():
            for family, value in ((pulls, arm.num_pulls), (rewards, arm.num_rewards), (sums, arm.reward_sum)):
                family.add_metric(key, value)
        yield from (pulls, rewards, sums)


class RolloutCollector(Collector):
    """Families ``weft_rollout_*``: how each rollout stands, and what this router counted of both of its sides."""

    def __init__(self, member: RolloutMember) -> None:
        self._member = member

    def collect(self) -> Iterator[Metric]:
        """Every family; of rollouts of one node and candidate the state of the one that changed last."""
        labels = ("graph", "node", "candidate")
        percent = GaugeMetricFamily("weft_rollout_percent", "Share of the candidate; NaN with a bandit", labels=labels)
        step = GaugeMetricFamily("weft_rollout_step", "Index of that share", labels=labels)
        phase = GaugeMetricFamily("weft_rollout_phase", "1: it is in this phase", labels=(*labels, "phase"))
        requests = CounterMetricFamily("weft_rollout_requests", "Runs of a side", labels=(*labels, "arm"))
        errors = CounterMetricFamily("weft_rollout_errors", "Runs of a side that failed", labels=(*labels, "arm"))
        rollouts = sorted(self._member.known, key=lambda one: one.state.changed_unix_ns)
        for key, one in {(one.graph, one.name, one.plan.candidate): one for one in rollouts}.items():
            percent.add_metric(key, 100 * share_now(one.plan, one.state))
            step.add_metric(key, one.state.step)
            for name in PHASES:
                phase.add_metric((*key, name), name == one.state.phase)
            same = [other for other in rollouts if key == (other.graph, other.name, other.plan.candidate)]
            for arm in ("candidate", "baseline"):
                counts = [getattr(other, arm) for other in same]
                requests.add_metric((*key, arm), sum(count.num_requests for count in counts))
                errors.add_metric((*key, arm), sum(count.num_errors for count in counts))
        yield from (percent, step, phase, requests, errors)


class TargetCollector(Collector):
    """Families ``weft_target_*``, and ``weft_endpoint_*`` of the current replicas.

    Every series of a target exists from the start, so that ``rate()`` sees the first event. Of a target that is one
    server only the state is known.
    """

    def __init__(self, catalog: TargetCatalog) -> None:
        self._catalog = catalog

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        catalog = self._catalog
        serving = GaugeMetricFamily(
            "weft_target_serving_replicas",
            "Replicas that take calls; of a target that is one server 1 while it answers",
            labels=_TARGET,
        )
        unavailable = CounterMetricFamily(
            "weft_target_unavailable",
            "Requests that the target was not there for: calls that ended UNAVAILABLE, and, while it does not answer, "
            "requests for graphs and models that are not known",
            labels=_TARGET,
        )
        refused = CounterMetricFamily(
            "weft_target_retries_refused",
            "Retries, hedges and calls of lost replicas, or that a replica had not begun, beyond the target's budget",
            labels=_TARGET,
        )
        for name, target in catalog.targets.items():
            serving.add_metric((name,), target.num_serving)
            unavailable.add_metric((name,), target.num_unavailable)
            refused.add_metric((name,), target.budget.num_refused)
        yield from (serving, unavailable, refused)
        for family, text, count in _CALLS:
            calls = CounterMetricFamily(f"weft_target_{family}", text, labels=_TARGET)
            for one in catalog.replicated:
                calls.add_metric((one.name,), count(one))
            yield calls
        prefixes = CounterMetricFamily(
            "weft_target_prefix_picks",
            "Prompts that went to a replica with most of their prefix, elsewhere because of load, or were new",
            labels=(*_TARGET, "outcome"),
        )
        for one in catalog.replicated:
            for outcome, number in list(one.prefixes.outcomes.items()) if one.prefixes is not None else ():
                prefixes.add_metric((one.name, outcome), number)
        yield prefixes
        yield from self._endpoints()

    def _endpoints(self) -> Iterator[Metric]:
        inflight = GaugeMetricFamily("weft_endpoint_inflight", "Calls that wait for an answer", labels=_ENDPOINT)
        state = GaugeMetricFamily(
            "weft_endpoint_state", "1 for the state that the replica is in, 0 for others", labels=(*_ENDPOINT, "state")
        )
        picks = CounterMetricFamily("weft_endpoint_picks", "Calls that the replica was chosen for", labels=_ENDPOINT)
        ejections = CounterMetricFamily(
            "weft_endpoint_ejections", "Times that the replica was left out because it answered badly", labels=_ENDPOINT
        )
        requests = CounterMetricFamily(
            "weft_endpoint_requests", "Calls that are over by gRPC status", labels=(*_ENDPOINT, "status")
        )
        for target in self._catalog.replicated:
            for replica in target.replicas:
                labels = (target.name, replica.address)
                inflight.add_metric(labels, replica.num_inflight)
                is_in = "ejected" if target.is_ejected(replica) else replica.health.value
                is_in = "leaving" if replica.is_leaving else is_in
                for name in _STATES:
                    state.add_metric((*labels, name), name == is_in)
                picks.add_metric(labels, replica.num_picks)
                ejections.add_metric(labels, replica.record.num_ejected)
                for status, count in list(replica.num_by_status.items()):
                    requests.add_metric((*labels, status), count)
        for server in self._catalog.servers:
            for name, is_so in (("serving", server.is_reachable), ("unreachable", not server.is_reachable)):
                state.add_metric((server.name, server.address, name), is_so)
        yield from (inflight, state, picks, ejections, requests)


class StepCollector(Collector):
    """Families ``weft_graph_step_*`` with the labels graph, version and step, the step's path.

    A step has counters only of policies that it has used.
    """

    def __init__(self, counters: Callable[[], Iterable[StepCounters]]) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        steps = [(one, labels) for labels, one in {(o.graph, o.version, o.path): o for o in self._counters()}.items()]
        requests = CounterMetricFamily(
            "weft_graph_step_requests",
            "Runs by gRPC status; SKIPPED where 'when' does not hold",
            labels=(*_STEP, "status"),
        )
        latency = HistogramMetricFamily(
            "weft_graph_step_latency_seconds", "Time of the runs with status OK, attempts included", labels=_STEP
        )
        for one, labels in steps:
            num_ok = sum(one.latency.counts)
            requests.add_metric((*labels, "OK"), num_ok)
            for status, count in ({"UNAVAILABLE": 0} | one.failures).items():
                requests.add_metric((*labels, status), count)
            latency.add_metric(labels, cumulative_buckets(one.latency), one.latency.sum_s)
        yield from (requests, latency)
        for name, text in _COUNTERS:
            family = CounterMetricFamily(f"weft_graph_step_{name}", text, labels=_STEP)
            for one, labels in steps:
                if num_events := one.events[name]:
                    family.add_metric(labels, num_events)
            yield family
        tensors = {(labels, tensor): one.compared for one, labels in steps for tensor, _ in list(one.compared)}
        compared = CounterMetricFamily("weft_shadow_compared", "Answers compared with the node's", labels=_TENSOR)
        agreed = CounterMetricFamily("weft_shadow_agreed", "Compared answers that agree", labels=_TENSOR)
        for (labels, tensor), counts in tensors.items():
            compared.add_metric((*labels, tensor), counts[tensor, True] + counts[tensor, False])
            agreed.add_metric((*labels, tensor), counts[tensor, True])
        yield from (compared, agreed)


class AdmissionCollector(Collector):
    """Families ``weft_admission_*`` by graph, or by model called by its name; "" is the whole router.

    A refusal counts for the requested graph, whatever limit caused it.
    """

    def __init__(self, admission: AdmissionController) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        inflight = GaugeMetricFamily("weft_admission_inflight", "Requests in flight", labels=("graph",))
        limits = GaugeMetricFamily("weft_admission_limit", "Requests that may be in flight", labels=("graph",))
        waiting = GaugeMetricFamily("weft_admission_waiting", "Requests that wait for a place", labels=("graph",))
        refusals = CounterMetricFamily(
            "weft_admission_refusals", "Requests refused before any work", labels=("graph", "reason", "priority")
        )
        for name, limit in [("", self._admission.router), *self._admission.limits.items()]:
            inflight.add_metric((name,), limit.num_inflight)
            if limit.is_adaptive:
                waiting.add_metric((name,), limit.queue.num_waiting)
            if limit.limit:
                limits.add_metric((name,), limit.limit)
            for (reason, level), count in list(limit.refusals.items()):
                refusals.add_metric((name, reason, str(level)), count)
        yield from (inflight, limits, waiting, refusals)
