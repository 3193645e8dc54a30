"""How far a batch job is, as a bar and as its end: rows, failures, speed, time left, what a million rows cost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from weft.jobs.batch import Progress as JobProgress

_HOUR_S = 3600.0


class BatchDisplay:
    """Shows a job.

    Args:
        graph: Its name.
        console: Where the bar is.
        cost_per_hour: Of the machines; None: not known.
        clock_s: Monotonic.
    """

    def __init__(self, graph: str, console: Console, cost_per_hour: float | None, clock_s: Callable[[], float]) -> None:
        self._graph = graph
        self._console = console
        self._cost_per_hour = cost_per_hour
        self._clock_s = clock_s
        self._start_s = clock_s()

    @contextmanager
    def bar(self) -> Iterator[Callable[["JobProgress"], None]]:
        """A bar for the length of the block; yields what shows a job's progress there."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f}%"),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as bar:
            task: TaskID = bar.add_task(self._graph, total=1.0, state="")

            def show(progress: "JobProgress") -> None:
                bar.update(task, completed=progress.share + progress.share_open, state=self.state(progress))

            yield show

    def state(self, progress: "JobProgress") -> str:
        """Rows, failures, speed, time left and cost as one text."""
        facts = self.facts(progress)
        parts = [
            f"{progress.num_rows + progress.num_open:,} rows",
            f"{progress.num_failed:,} failed",
            f"{facts['rows_per_s']:,.0f} rows/s",
        ]
        remaining_s = progress.remaining_s(facts["duration_s"])
        if remaining_s is not None:
            parts.append(f"{timedelta(seconds=round(remaining_s))} left")
        return ", ".join([*parts, *self._cost(facts)])

    def end(self, progress: "JobProgress", output: str) -> str:
        """The last line of a job."""
        facts = self.facts(progress)
        failed = f"{progress.num_failed} of them failed{' (failed/ says why)' if progress.num_failed else ''}"
        if progress.num_bad_files:
            failed += f", {progress.num_bad_files} files were passed over"
        own = progress.num_rows - progress.num_skipped
        pace = [f"{own} in {facts['duration_s']:.1f} s", f"{facts['rows_per_s']:,.0f} rows/s", *self._cost(facts)]
        return f"{progress.num_rows} rows in '{output}', {failed}; {', '.join(pace)}"

    def facts(self, progress: "JobProgress") -> dict[str, Any]:
        """The numbers: counts of rows, seconds, rows a second, and what a million rows cost if that is known."""
        duration_s = max(self._clock_s() - self._start_s, 1e-9)
        own = progress.num_rows + progress.num_open - progress.num_skipped
        facts: dict[str, Any] = {
            "num_rows": progress.num_rows,
            "num_failed": progress.num_failed,
            "num_skipped": progress.num_skipped,
            "num_bad_files": progress.num_bad_files,
            "window": progress.window,
            "duration_s": round(duration_s, 3),
            "rows_per_s": round(own / duration_s, 3),
        }
        if self._cost_per_hour is not None:
            cost = self._cost_per_hour * duration_s / _HOUR_S
            facts |= {"cost": cost, "cost_per_million_rows": cost / own * 1e6 if own else None}
        return facts

    @staticmethod
    def _cost(facts: dict[str, Any]) -> list[str]:
        cost = facts.get("cost_per_million_rows")
        return [] if cost is None else [f"{cost:,.4g} per million rows"]
