"""Policies and shadows whose values are out of range, or contradict one another (G025, G018)."""

from weft.language.syntax.file import GraphFile, GraphReport, has_field
from weft_protos import graph_pb2 as pb


def check_limits(file: GraphFile, report: GraphReport) -> None:
    """Report every value of a policy or a shadow that can only be a mistake."""
    graph = file.message.policy
    _check_policy(file, graph, "policy", [], report)
    for node in file.all_nodes:
        own = node.message.policy
        _check_policy(file, own, f"{node.path}.policy", [graph], report)
        for step in node.every_step():
            _check_policy(file, step.message.policy, f"{step.path}.policy", [own, graph], report)
            if step.message.HasField("shadow"):
                percent = step.message.shadow.percent
                if not 0 < percent <= 100:
                    text = f"the shadow has 'percent: {percent:g}'; give the share of requests it gets, above 0 to 100"
                    report.error("G025", file, f"{step.path}.shadow.percent", text)
        for custom in node.customs.values():
            _check_policy(file, custom.message.policy, f"{custom.path}.policy", [own, graph], report)


def _check_policy(file: GraphFile, policy: pb.Policy, path: str, around: list[pb.Policy], report: GraphReport) -> None:
    """One policy; ``around`` are those of node and graph, which it overrides."""
    for kind in file.policies.values():
        if has_field(policy, kind.field):
            kind.check(file, policy, f"{path}.{kind.field}", around, report)
