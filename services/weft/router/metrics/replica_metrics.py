"""Prometheus figures of the replicas of targets, read at scrape time, on the metrics server's thread."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft.router.budgets.retry_budget import RetryBudget
from weft.router.targets.replica import Replica
from weft.router.targets.replicated import ReplicatedTarget

_LABELS = ("target", "endpoint")


class ReplicaCollector(Collector):
    """Families ``weft_endpoint_*`` of the replicas that are there now, and ``weft_target_*``.

    Args:
        targets: Those with replicas.
        budgets: By target.
    """

    def __init__(self, targets: Sequence[ReplicatedTarget], budgets: Mapping[str, RetryBudget]) -> None:
        self._targets = targets
        self._budgets = budgets

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        inflight = GaugeMetricFamily("weft_endpoint_inflight", "Calls that wait for an answer", labels=_LABELS)
        state = GaugeMetricFamily(
            "weft_endpoint_state", "1 for the state that the replica is in", labels=(*_LABELS, "state")
        )
        picks = CounterMetricFamily("weft_endpoint_picks", "Calls that the replica was chosen for", labels=_LABELS)
        ejections = CounterMetricFamily(
            "weft_endpoint_ejections", "Times that the replica was left out because it answered badly", labels=_LABELS
        )
        requests = CounterMetricFamily(
            "weft_endpoint_requests", "Calls that are over by gRPC status", labels=(*_LABELS, "status")
        )
        moved = CounterMetricFamily(
            "weft_target_moved_calls",
            "Calls that a replica had not begun and that another one was given",
            labels=("target",),
        )
        refused = CounterMetricFamily(
            "weft_target_retries_refused",
            "Retries, hedges and calls that a replica had not begun that the target's budget did not allow",
            labels=("target",),
        )
        for target in self._targets:
            moved.add_metric((target.name,), target.num_moved)
            for replica in target.replicas:
                labels = (target.name, replica.address)
                inflight.add_metric(labels, replica.num_inflight)
                state.add_metric((*labels, _state_of(target, replica)), 1)
                picks.add_metric(labels, replica.num_picks)
                ejections.add_metric(labels, replica.record.num_ejected)
                for status, count in list(replica.num_by_status.items()):
                    requests.add_metric((*labels, status), count)
        for name, budget in self._budgets.items():
            refused.add_metric((name,), budget.num_refused)
        yield from (inflight, state, picks, ejections, requests, moved, refused)


def _state_of(target: ReplicatedTarget, replica: Replica) -> str:
    if replica.is_leaving:
        return "leaving"
    return "ejected" if target.is_ejected(replica) else replica.health.value
