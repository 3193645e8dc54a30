"""Checks ``instance_group.rate_limiter``."""

from weft.serving.config.report import ConfigReport
from weft.serving.scheduler.rate_limiter import RateLimit
from weft_protos.model_config_pb2 import ModelInstanceGroup


def rate_limit(path: str, group: ModelInstanceGroup, report: ConfigReport) -> RateLimit | None:
    """Resources of an execution of an instance of the group; None if it names none.

    Args:
        path: Of the field, for faults.
        group: Of the configuration.
        report: Receives the faults.
    """
    if not group.HasField("rate_limiter"):
        return None
    scoped: dict[bool, dict[str, int]] = {False: {}, True: {}}
    names: set[str] = set()
    for i, resource in enumerate(group.rate_limiter.resources):
        called = f"{path}.resources[{i}]"
        if not resource.name:
            report.error(called, "a resource must specify 'name'")
        if not resource.count:
            report.error(called, f"resource '{resource.name}' must specify a count of at least 1, got 0")
        if resource.name in names:
            report.error(f"{called}.name", f"resource '{resource.name}' is named twice; add the counts up in one")
        names.add(resource.name)
        scoped[getattr(resource, "global")][resource.name] = resource.count
    return RateLimit(max(group.rate_limiter.priority, 1), tuple(scoped[False].items()), tuple(scoped[True].items()))
