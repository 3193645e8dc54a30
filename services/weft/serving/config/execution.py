"""Where the instances of a model execute, as the parameter ``EXECUTION`` says."""

from collections.abc import Sequence

from weft.serving.config.report import ConfigReport
from weft.serving.queues.settings import SchedulerSettings
from weft_protos.model_config_pb2 import ModelConfig, ModelInstanceGroup

EXECUTION = "EXECUTION"
#: On the thread of the instance; on the event loop; in a process of the instance's own.
THREAD, INLINE, PROCESS = "thread", "inline", "process"

_PATH = f"parameters[{EXECUTION}].string_value"


def execution_of(config: ModelConfig, modes: Sequence[str]) -> str:
    """The parameter ``EXECUTION``; the first of ``modes``, which the backend allows, where it is not given."""
    return config.parameters[EXECUTION].string_value if EXECUTION in config.parameters else modes[0]


def check_execution(
    config: ModelConfig, settings: SchedulerSettings, modes: Sequence[str], report: ConfigReport
) -> None:
    """Check that the model can execute where its configuration says.

    Args:
        config: Its instances are placed.
        settings: Of its scheduler.
        modes: Values of the parameter that the backend allows.
        report: Receives the faults.
    """
    mode = execution_of(config, modes)
    if mode not in modes:
        allowed = f"{', '.join(modes[:-1])} or {modes[-1]}"
        report.error(_PATH, f"model '{config.name}': parameter '{EXECUTION}' must be {allowed}, got '{mode}'")
    if mode != INLINE:
        return
    kinds = {group.kind for group in config.instance_group}
    obstacles = (
        ("a decoupled model", config.model_transaction_policy.decoupled),
        ("sequence_batching", config.HasField("sequence_batching")),
        ("an instance on a GPU", ModelInstanceGroup.KIND_GPU in kinds),
        ("rate_limiter", any(group.HasField("rate_limiter") for group in config.instance_group)),
        ("execution_timeout_us", settings.execution_timeout_us > 0),
    )
    for obstacle, is_there in obstacles:
        if is_there:
            report.error(_PATH, f"'{EXECUTION}' inline is not possible with {obstacle}; remove one of them")
