"""The report of a run: as values, JSON, and a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from weft.optimize.cost import VersionCost
from weft.optimize.gate import Loss
from weft.tools.chart import Line, Mark, Plot, render_svg

#: The axis of the loss ends at so many times the limit; what loses more is at its end, as a triangle.
_LIMITS_SHOWN = 3.0
_LEAST_SHOWN = 0.001


@dataclass
class CandidateReport:
    """Results for one candidate.

    Attributes:
        state: ``passes`` the gate; ``refused`` by it; ``unsuitable``: the method does not apply; ``failed``.
        reason: Why it does not pass; "" if it does.
        size_bytes: Of its weights.
        loss: None if it was not judged.
        costs: By rows of a request.
        original_costs: Of the original, measured in turn with it.
        num_failed_rows: Rows at which only it fails, not the original.
        parameters: Parameters of ``config.pbtxt`` that it needs in addition.
    """

    method: str
    state: str = "passes"
    reason: str = ""
    notes: str = ""
    size_bytes: int = 0
    loss: Loss | None = None
    costs: Mapping[int, VersionCost] = field(default_factory=dict)
    original_costs: Mapping[int, VersionCost] = field(default_factory=dict)
    num_failed_rows: int = 0
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Report:
    """Results for a model.

    Attributes:
        graph: The graph that the data went through; "" if straight to the model.
        metric, meaning: How answers were compared, and what a loss means.
        objective: What must improve.
        num_unanswered_rows: Held-out rows that the original does not answer; they are not judged.
        seed: Of the split and of the interval.
        size_bytes: Of the original's weights.
        costs: Of the original, by rows of a request.
        picked: Method of the best candidate; "" if there is none.
        why_none: Why nothing was picked; "" if something was.
        written: Number of the new version; 0 if none was written.
        advice: What the user should know about the new version, in sentences.
        created: Day and time, UTC.
        software: Versions by package.
    """

    model: str
    version: int
    graph: str
    metric: str
    meaning: str
    max_loss: float
    objective: str
    data: str
    data_sha256: str
    num_calibration_rows: int
    num_held_out_rows: int
    num_unanswered_rows: int
    seed: int
    size_bytes: int
    created: str
    software: Mapping[str, str]
    costs: Mapping[int, VersionCost] = field(default_factory=dict)
    candidates: list[CandidateReport] = field(default_factory=list)
    picked: str = ""
    why_none: str = ""
    written: int = 0
    advice: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON values; named tuples become objects."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, VersionCost | Loss):
        return value._asdict()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def draw(report: Report) -> str:
    """An SVG with a plot of loss against cost for each number of rows a request.

    The disc of a candidate is filled if the gate lets it through; the line beside it is the interval of its loss.
    """
    title = f"{report.model}: {report.meaning}, against CPU time"
    return render_svg(title, [_plot(report, rows) for rows in report.costs])


def _plot(report: Report, rows: int) -> Plot:
    limit = 100 * report.max_loss
    original = report.costs[rows].cpu_s_per_1000
    marks = [Mark("original", original, 0.0, 0.0, 0.0)]
    for candidate in report.candidates:
        if rows in candidate.costs:
            loss = candidate.loss or Loss(0.0, 0.0, 0.0, 0, 0)
            x = candidate.costs[rows].ratio * original  # as if it had been measured in one round with all others
            value, low, high = (100 * each for each in loss[:3])
            marks.append(Mark(candidate.method, x, value, low, high, is_filled=candidate.state == "passes"))
    right = max(mark.x for mark in marks)
    return Plot(
        f"{rows} {'row' if rows == 1 else 'rows'} a request",
        "CPU-seconds per 1000 rows",
        "loss, %",
        [Line(f"limit of the loss: {limit:g} %", [(0.0, limit), (right * 1.05, limit)], is_dashed=True)],
        marks,
        y_limit=max(limit * _LIMITS_SHOWN, 100 * _LEAST_SHOWN),
    )
