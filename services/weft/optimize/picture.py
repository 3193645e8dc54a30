"""The report as a picture: what each candidate loses against what it costs."""

from weft.optimize.report import CandidateReport, Report
from weft.tools.chart import Line, Mark, Plot, render_svg

#: The axis of the loss ends at so many times the limit; what loses more is at its end, as a triangle.
_LIMITS_SHOWN = 3.0
_LEAST_SHOWN = 0.001


def draw(report: Report) -> str:
    """An SVG with a plot for each number of rows a request.

    The disc of a candidate is filled if the gate lets it through; the line beside it is the interval of its loss.
    """
    title = f"{report.model}: {report.meaning}, against CPU time"
    return render_svg(title, [_plot(report, rows) for rows in report.costs])


def _plot(report: Report, rows: int) -> Plot:
    limit = 100 * report.max_loss
    shown = [candidate for candidate in report.candidates if rows in candidate.costs]
    original = report.costs[rows].cpu_s_per_1000
    marks = [Mark("original", original, 0.0, 0.0, 0.0), *(_mark(candidate, rows, original) for candidate in shown)]
    right = max(mark.x for mark in marks)
    return Plot(
        f"{rows} {'row' if rows == 1 else 'rows'} a request",
        "CPU-seconds per 1000 rows",
        "loss, %",
        [Line(f"limit of the loss: {limit:g} %", [(0.0, limit), (right * 1.05, limit)], is_dashed=True)],
        marks,
        y_limit=max(limit * _LIMITS_SHOWN, 100 * _LEAST_SHOWN),
    )


def _mark(candidate: CandidateReport, rows: int, original: float) -> Mark:
    """A candidate where it would be had it been measured in one round with all others."""
    loss = candidate.loss
    value, low, high = (0.0, 0.0, 0.0) if loss is None else (100 * loss.value, 100 * loss.low, 100 * loss.high)
    x = candidate.costs[rows].ratio * original
    return Mark(candidate.method, x, value, low, high, is_filled=candidate.state == "passes")
