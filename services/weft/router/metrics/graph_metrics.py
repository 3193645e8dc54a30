"""What a router tells Prometheus beside the figures of models and graphs; runs on the metrics server's thread."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft.language.bandit_algorithms import Arm
from weft.router.repository.files import GraphRepository
from weft.router.repository.table import GraphTable


class RouterCollector(Collector):
    """Loads that failed, graphs that lack a model, and what the bandits of graphs that serve have learned.

    Args:
        graphs: What is served.
        repository: Where it was found; a folder that is left out counts as a graph without a version.
    """

    def __init__(self, graphs: GraphTable, repository: GraphRepository) -> None:
        self._graphs = graphs
        self._repository = repository

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        failures = CounterMetricFamily(
            "weft_graph_load_failures", "Graph files that could not be loaded", labels=("graph", "version")
        )
        failed = GaugeMetricFamily(
            "weft_graph_load_failed",
            "1: its file could not be loaded, for another reason than a target that does not answer yet",
            labels=("graph", "version"),
        )
        degraded = GaugeMetricFamily(
            "weft_graph_degraded", "1: ready, but answers without a model that is not", labels=("graph", "version")
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
        labels = ("graph", "node", "step")
        pulls = CounterMetricFamily("weft_bandit_pulls", "Requests that a bandit sent to the step", labels=labels)
        rewards = CounterMetricFamily("weft_bandit_rewards", "Rewards that the step was given", labels=labels)
        sums = CounterMetricFamily("weft_bandit_reward_sum", "Sum of the rewards", labels=labels)
        for key, arm in arms.items():
            for family, value in ((pulls, arm.num_pulls), (rewards, arm.num_rewards), (sums, arm.reward_sum)):
                family.add_metric(key, value)
        yield from (pulls, rewards, sums)
