"""The pick as a new version of the model, with a note on its origin, and what its user should know."""

from pathlib import Path

from weft.optimize.report import CandidateReport, Report
from weft.optimize.repository.provenance import with_provenance
from weft.optimize.repository.source import RepositoryModel, sha256_of


def config_with_note(model: RepositoryModel, number: int, report: Report, best: CandidateReport, files: Path) -> str:
    """Text of ``config.pbtxt`` with the new version's note.

    Raises:
        InvalidArgumentError: The text cannot be extended.
        OSError: A file cannot be read.
    """
    return with_provenance(
        model.text,
        number,
        f"from version {model.version} by {best.method}, {report.created[:10]}; weft optimize wrote this note.",
        _facts(model, report, best, files),
        best.parameters,
    )


def _facts(model: RepositoryModel, report: Report, best: CandidateReport, files: Path) -> dict[str, object]:
    loss = best.loss
    return {
        "method": best.method,
        "notes": best.notes,
        "source_version": report.version,
        "source_sha256": sha256_of(model.source.file),
        "sha256": sha256_of(files / model.source.file.name),
        "data": report.data,
        "data_sha256": report.data_sha256,
        "calibration_rows": report.num_calibration_rows,
        "held_out_rows": report.num_held_out_rows,
        "seed": report.seed,
        "graph": report.graph,
        "metric": report.metric,
        "loss": None if loss is None else round(loss.value, 6),
        "loss_interval_95": None if loss is None else [round(loss.low, 6), round(loss.high, 6)],
        "max_loss": report.max_loss,
        "objective": report.objective,
        "time_ratio": {str(rows): round(cost.time_ratio, 3) for rows, cost in best.costs.items()},
        "busy_time_ratio": {str(rows): round(cost.busy_time_ratio, 3) for rows, cost in best.costs.items()},
        "cpu_time_ratio": {str(rows): round(cost.ratio, 3) for rows, cost in best.costs.items()},
        "created": report.created,
        "software": dict(report.software),
    }


def advice(model: RepositoryModel, number: int, best: CandidateReport) -> list[str]:
    """Sentences on who gets the new version, when, and how to go back."""
    before, after = model.serves(model.versions), model.serves([*model.versions, number])
    if number not in after:
        first = f"version_policy does not name version {number}: it is not served until you add it."
    elif gone := [str(version) for version in before if version not in after]:
        first = (
            f"By version_policy, version {number} is served in place of version {', '.join(gone)}; "
            "version_policy { all { } } keeps both."
        )
    else:
        kept = ", ".join(map(str, before))
        first = f"Version {number} answers requests that name no version; version {kept} is served too."
    sentences = [
        first,
        "A mesh with --model-control-mode poll takes it over by itself, any other after `weft restart`. To go back, "
        f"remove the folder {model.folder / str(number)}.",
    ]
    if best.parameters:
        names = ", ".join(f"{key} = {value}" for key, value in best.parameters.items())
        sentences.append(f"config.pbtxt gets {names}, which holds for all versions of the model.")
    return sentences
