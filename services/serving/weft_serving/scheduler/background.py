"""Which requests of a model run in the background: beside the others, and only on processors that those leave idle."""

from weft_serving.scheduler.settings import SchedulerSettings


def background_level(settings: SchedulerSettings) -> int:
    """The level whose requests may run in the background; 0: none.

    It is the lowest of several, unless requests that name no priority have it. With ``priority_aging_us`` none must
    wait for ever, and with ``execution_timeout_us`` one that waits for a processor would count as hung.
    """
    is_apart = 0 < settings.default_priority_level < settings.priority_levels
    has_limit = settings.priority_aging_us or settings.execution_timeout_us or settings.sequences is not None
    return settings.priority_levels if settings.is_batching and is_apart and not has_limit else 0
