"""A report as files and values: the saved plan, manifests of Kubernetes, instance groups, JSON."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft.base.errors import InvalidArgumentError
from weft.capacity.placement.kubernetes import kubernetes_text
from weft.capacity.placement.outputs import instance_groups, save, to_json
from weft.capacity.plan.report import PlanReport
from weft.jobs.atomic_files import replace_file


def write_outputs(report: PlanReport, saved: Path | None, kubernetes: Path | None) -> list[Path]:
    """Write the files that are asked for; returns them.

    Raises:
        InvalidArgumentError: A model could not be estimated, or none was placed, so there is nothing to write; or a
            folder is named, not a file.
        OSError: A file cannot be written.
    """
    if (saved or kubernetes) and report.fault:
        raise InvalidArgumentError(f"the plan lacks a model, so nothing is written: {report.fault}")
    if (saved or kubernetes) and (report.problem is None or report.solution is None):
        raise InvalidArgumentError("no model could be placed, so nothing is written; declare its needs with --declare")
    for path in filter(None, (saved, kubernetes)):
        if path.is_dir():
            raise InvalidArgumentError(f"'{path}' is a folder; name a file to be written")
    written = []
    if saved and report.problem and report.solution:
        save(saved, report.problem, report.solution)
        written.append(saved)
    if kubernetes and report.problem and report.solution:
        replace_file(kubernetes, kubernetes_text(report.problem, report.solution).encode())
        written.append(kubernetes)
    return written


def render_instance_groups(report: PlanReport) -> str:
    """The text for each host and model, with a line that names them."""
    if report.problem is None or report.solution is None:
        return ""
    groups = instance_groups(report.problem, report.solution)
    return "\n".join(f"# {model} on {host}\n{text}" for (host, model), text in groups.items()).rstrip()


def plan_values(report: PlanReport) -> dict[str, Any]:
    """Plain values for ``json``."""
    values: dict[str, Any] = {"device": asdict(report.device), "estimates": [asdict(each) for each in report.estimates]}
    if report.problem is not None and report.solution is not None:
        values["placement"] = to_json(report.problem, report.solution)
    if report.checked is not None:
        values["change"] = {
            "differences": report.checked.differences,
            "changes": [
                {
                    "model": change.workload,
                    "replica": change.replica,
                    "from": None if change.before is None else str(change.before),
                    "to": None if change.after is None else str(change.after),
                    "why": why,
                }
                for change, why in report.checked.changes
            ],
            "cost_per_hour_before": report.checked.cost_before,
            "cost_per_hour_after": report.checked.cost_after,
        }
    return values
