"""Policies and shadows whose values are out of range, or contradict one another (G025, G018)."""

from weft_common.text.pbtxt import suggestion
from weft_protos import graph_pb2 as pb
from weft_router.graph.checks.policies import RETRY_CODES
from weft_router.graph.syntax.parse import GraphFile
from weft_router.graph.syntax.report import GraphReport


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
    if policy.HasField("retry"):
        _check_retry(file, policy, f"{path}.retry", around, report)
    if policy.HasField("hedge"):
        _check_hedge(file, policy, f"{path}.hedge", report)
    if policy.cache.stale_if_error_ms and not policy.cache.ttl_ms:
        text = "'stale_if_error_ms' has no effect without 'ttl_ms': an answer that never expires is not stale"
        report.error("G018", file, f"{path}.cache.stale_if_error_ms", text, is_name=True)


def _check_retry(file: GraphFile, policy: pb.Policy, path: str, around: list[pb.Policy], report: GraphReport) -> None:
    retry = policy.retry
    overrides = any(other.HasField("retry") and other.retry.attempts > 1 for other in around)
    if retry.attempts < 2 and not (retry.attempts == 1 and overrides):
        has = f"'attempts: {retry.attempts}'" if f"{path}.attempts" in file.positions else "no 'attempts'"
        text = f"'retry' has {has}; give 2 or more: the first call counts"
        report.error("G025", file, f"{path}.attempts", text)
    elif retry.attempts == 1:
        for name in (field.name for field, _ in retry.ListFields() if field.name != "attempts"):
            text = f"'{name}' has no effect with 'attempts: 1', which switches the outer 'retry' off; leave it out"
            report.error("G018", file, f"{path}.{name}", text, is_name=True)
    for i, code in enumerate(retry.on):
        if code not in RETRY_CODES:
            report.error("G025", file, f"{path}.on[{i}]", _code_fault(code))
        elif code in retry.on[:i]:
            report.error("G025", file, f"{path}.on[{i}]", f"'{code}' is given twice; leave one out")
        elif code == "DEADLINE_EXCEEDED" and policy.timeout_ms:
            text = (
                "'DEADLINE_EXCEEDED' seldom helps here: all attempts share this 'timeout_ms', so no time is left when "
                "it has passed; to call again before that, use 'hedge'"
            )
            report.warning("G018", file, f"{path}.on[{i}]", text)
    if not 0 <= retry.budget_percent <= 100:
        text = f"'budget_percent' is {retry.budget_percent:g}; give 0 to 100, where 0 means the default, 20"
        report.error("G025", file, f"{path}.budget_percent", text)
    if 0 < 2 * policy.timeout_ms <= retry.backoff_ms:
        text = (
            f"'backoff_ms: {retry.backoff_ms}' leaves no time for a second attempt, because all attempts share the "
            f"'timeout_ms: {policy.timeout_ms}'; wait less"
        )
        report.error("G018", file, f"{path}.backoff_ms", text)


def _code_fault(code: str) -> str:
    if code == "CANCELLED":
        return "'CANCELLED' cannot be retried: it says that the client has gone"
    if code in ("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "FAILED_PRECONDITION", "PERMISSION_DENIED"):
        return f"'{code}' cannot be retried: the same call fails again; use one of: {', '.join(RETRY_CODES)}"
    return f"unknown status code '{code}'{suggestion(code, RETRY_CODES)}"


def _check_hedge(file: GraphFile, policy: pb.Policy, path: str, report: GraphReport) -> None:
    hedge = policy.hedge
    if not hedge.after_ms:
        text = "'hedge' has no 'after_ms'; give the time after which a call is late, for example its 95th percentile"
        report.error("G025", file, path, text, is_name=True)
    elif 0 < policy.timeout_ms <= hedge.after_ms:
        text = (
            f"'hedge' has no effect: 'after_ms: {hedge.after_ms}' is not before the 'timeout_ms: {policy.timeout_ms}' "
            "ends; make it less"
        )
        report.error("G018", file, f"{path}.after_ms", text)
