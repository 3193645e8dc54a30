"""Refuses requests that cannot be answered within their deadline."""

from weft.base.errors import DeadlineExceededError
from weft.serving.queues.queue import RequestQueue
from weft.serving.queues.settings import SchedulerSettings
from weft.serving.request.request import InferenceRequest
from weft.serving.scheduler.execution_times import ExecutionTimes


class DeadlineAdmission:
    """Compares the deadline of a request with the durations of recent executions.

    Every estimate favours the request: running batches end at once, batches before it are full, and with too few
    measurements nothing is refused.

    Args:
        settings: Of the model.
        num_instances: That execute batches at once.
        times: How long executions took lately.
    """

    def __init__(self, settings: SchedulerSettings, num_instances: int, times: ExecutionTimes) -> None:
        self._settings = settings
        self._num_instances = num_instances
        self._max_rows = max(settings.max_batch_size, 1)
        self._times = times

    def check(self, request: InferenceRequest, queue: RequestQueue, now_ns: int) -> None:
        """Check that the request can meet its deadline, if it has one, and set its ``expected_ns``.

        Raises:
            DeadlineExceededError: By the measured medians it cannot.
        """
        deadline_ns = request.context.deadline_ns
        if deadline_ns is None or deadline_ns <= now_ns:  # the queue refuses the latter
            return
        num_before = queue.num_rows_before(request)
        num_full, num_left = divmod(num_before, self._max_rows)
        num_rows = request.num_rows
        if self._settings.is_batching and num_left + num_rows <= self._max_rows:
            num_rows += num_left
        expected_ns = request.expected_ns = self._times.median_ns(num_rows, now_ns)
        num_rounds = num_full // self._num_instances
        wait_ns = num_rounds and num_rounds * self._times.median_ns(self._max_rows, now_ns)
        left_ns = deadline_ns - now_ns
        if expected_ns + wait_ns > left_ns:
            raise DeadlineExceededError(
                f"cannot finish inside its deadline: {left_ns / 1e6:.1f} ms are left, and by the median of the latest "
                f"executions it takes {(expected_ns + wait_ns) / 1e6:.1f} ms, of which {wait_ns / 1e6:.1f} ms go to "
                f"the {num_before} rows that wait before it; allow more time, or send it when less is waiting"
            )
