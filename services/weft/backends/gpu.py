"""Helpers shared by the GPU backends."""

from collections.abc import Mapping
from typing import Any

from weft.backends.pinned import PinnedPool
from weft.base.errors import UnavailableError, UnsupportedError
from weft.base.observing.logs import get_logger
from weft.serving.backends.base import InstanceContext
from weft.v2.protocol.cuda_memory import find_cuda

_log = get_logger("weft.model")


def use_cpu_instead(instance: InstanceContext, reason: str) -> None:
    """Log why an instance that was placed on a GPU runs on the CPU.

    Args:
        instance: The instance.
        reason: Why its library cannot use the GPU, and the cure.

    Raises:
        UnavailableError: The configuration requires KIND_GPU.
    """
    if not instance.may_use_cpu:
        raise UnavailableError(
            f"instance '{instance.name}' asks for GPU {instance.device_id}, but {reason}, or set instance_group "
            "{ kind: KIND_CPU }"
        )
    _log.warning("instance '%s' of KIND_AUTO runs on the CPU, although there is a GPU: %s", instance.name, reason)


def is_pinning_enabled(config: Mapping[str, Any], way: str) -> bool:
    """Whether ``optimization { <way>_pinned_memory }`` is absent or has ``enable: true``; way is input or output."""
    setting = config.get("optimization", {}).get(f"{way}_pinned_memory")
    return setting is None or bool(setting.get("enable", False))


def make_pinned_pool(instance: InstanceContext) -> PinnedPool | None:
    """Pinned memory for one instance; None, with a warning in the log, if the CUDA runtime is not found."""
    try:
        cuda = find_cuda()
    except UnsupportedError as error:
        _log.warning("instance '%s' copies without pinned memory: %s", instance.name, error.message)
        return None
    device_id = instance.device_id
    return PinnedPool(
        lambda num_bytes: cuda.allocate_pinned(num_bytes, device_id),
        lambda address: cuda.free_pinned(address, device_id),
    )
