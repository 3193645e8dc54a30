"""The report for people."""

from weft.capacity.plan.render import render_device, render_estimates
from weft.capacity.plan.report import PlanReport


def render_report(report: PlanReport) -> str:
    """The device, a line for each model, and where they go."""
    text = [render_device(report.device), "", render_estimates(report.estimates)]
    if report.solution is not None and report.problem is not None:
        text += ["", "placement"]
        for device in report.problem.devices:
            held = [str(a.bin) + f": {a.workload}" for a in report.solution.assignments if a.bin.device == device.name]
            text += [f"  {line}" for line in held] or [f"  {device.name}: nothing"]
        for entry in report.solution.unplaced:
            text.append(f"  no place for {entry.num_replicas} of {entry.workload}: {entry.why}")
        text += [f"  {note}" for note in report.solution.notes]
    if report.checked is not None:
        text += ["", "change", *(f"  {line}" for line in report.checked.text().splitlines())]
    return "\n".join(text)
