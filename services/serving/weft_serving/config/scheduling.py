"""``dynamic_batching`` as ``SchedulerSettings``."""

from weft_protos.model_config_pb2 import ModelConfig, ModelQueuePolicy
from weft_serving.config.report import Report
from weft_serving.scheduler.settings import QueuePolicy, SchedulerSettings


def scheduler_settings(config: ModelConfig, report: Report) -> SchedulerSettings:
    """Settings as configured.

    Args:
        config: Its ``max_batch_size`` is complete.
        report: Receives the faults.
    """
    batching = config.dynamic_batching
    settings = SchedulerSettings(
        max_batch_size=config.max_batch_size,
        is_batching=config.HasField("dynamic_batching"),
        preferred_batch_sizes=tuple(dict.fromkeys(batching.preferred_batch_size)),
        max_queue_delay_us=batching.max_queue_delay_microseconds,
        preserve_ordering=batching.preserve_ordering,
        priority_levels=batching.priority_levels,
        default_priority_level=batching.default_priority_level,
        default_policy=_policy(batching.default_queue_policy),
        policies={level: _policy(policy) for level, policy in sorted(batching.priority_queue_policy.items())},
    )
    for path, message in settings.faults():
        report.error(path, f"{path}: {message}")
    return settings


def _policy(policy: ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        timeout_action=ModelQueuePolicy.TimeoutAction.Name(policy.timeout_action),
        default_timeout_us=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
    )
