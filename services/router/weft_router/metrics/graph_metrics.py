"""What a router tells Prometheus beside the figures of models and graphs; runs on the metrics server's thread."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft_router.bandit_algorithms import Arm
from weft_router.repository.table import GraphTable


class RouterCollector(Collector):
    """Loads that failed, graphs that lack a model, and what the bandits of graphs that serve have learned.

    Args:
        graphs: What is served.
    """

    def __init__(self, graphs: GraphTable) -> None:
        self._graphs = graphs

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        failures = CounterMetricFamily(
            "weft_graph_load_failures", "Graph files that could not be loaded", labels=("graph", "version")
        )
        degraded = GaugeMetricFamily(
            "weft_graph_degraded", "1: ready, but answers without a model that is not", labels=("graph", "version")
        )
        arms: dict[tuple[str, str, str], Arm] = {}
        for entry in self._graphs:
            if entry.is_wanted:
                failures.add_metric((entry.file.name, entry.file.version), entry.num_load_failures)
                is_degraded = bool(self._graphs.why_degraded(entry))
                degraded.add_metric((entry.file.name, entry.file.version), float(is_degraded))
            if (serving := entry.serving) is not None:
                arms |= {(graph, node, step): arm for graph, node, step, arm in serving.arms}
        yield from (failures, degraded)
        labels = ("graph", "node", "step")
        pulls = CounterMetricFamily("weft_bandit_pulls", "Requests that a bandit sent to the step", labels=labels)
        rewards = CounterMetricFamily("weft_bandit_rewards", "Rewards that the step was given", labels=labels)
        sums = CounterMetricFamily("weft_bandit_reward_sum", "Sum of the rewards", labels=labels)
        for names, arm in arms.items():
            for family, value in ((pulls, arm.num_pulls), (rewards, arm.num_rewards), (sums, arm.reward_sum)):
                family.add_metric(names, value)
        yield from (pulls, rewards, sums)
