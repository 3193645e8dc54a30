"""Adds a version to a model's repository folder, atomically, without replacing any.

A note on its origin is appended to ``config.pbtxt``; every other character stays.
"""

import contextlib
import json
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

from weft.base.errors import AlreadyExistsError, InvalidArgumentError, UnavailableError
from weft.base.repository.layout import CONFIG_FILENAME, is_version
from weft.base.signature import PROVENANCE_PARAMETER
from weft.base.text.pbtxt import parse
from weft.base.text.pbtxt_writer import quoted
from weft.jobs.atomic_files import check_writable, locked, replace_file, sync
from weft.optimize.report import CandidateReport, Report
from weft.optimize.source import RepositoryModel, sha256_of
from weft_protos.model_config_pb2 import ModelConfig

_VERSION = re.compile(re.escape(PROVENANCE_PARAMETER) + r"([1-9][0-9]*)")


def check_publishable(folder: Path) -> None:
    """Check that a version could be added to a model. Raises PermissionDeniedError."""
    config = (folder / CONFIG_FILENAME).resolve()
    check_writable((folder.parent, folder, config.parent), "--dry-run does all but that")


@contextlib.contextmanager
def held_model(folder: Path) -> Iterator[None]:
    """Lock a model's folder, so that no other run writes a version meanwhile.

    Leftovers of a killed run are removed.

    Raises:
        UnavailableError: Another run holds it.
        OSError: The folder cannot be read.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except BlockingIOError:
            raise UnavailableError(f"another `weft optimize` works on '{folder.name}'; wait for it") from None
        for entry in folder.parent.iterdir():
            if re.fullmatch(rf"\.{re.escape(folder.name)}\.version\.[0-9]+", entry.name):
                shutil.rmtree(entry, ignore_errors=True)
        yield


def publish(folder: Path, version: int, files: Path, config_text: str) -> None:
    """Add a version to a model.

    The files are copied to a hidden folder beside the model, which no service reads, and synced. Then ``config.pbtxt``
    is replaced and the folder renamed, each atomically. If the second fails, the first is undone.

    Raises:
        AlreadyExistsError: The version exists.
        OSError: The files cannot be written; the model is as it was.
    """
    target = folder / str(version)
    if target.exists() or target.is_symlink():
        raise AlreadyExistsError(f"'{folder.name}' has a version {version} already; nothing was written")
    hidden = folder.parent / f".{folder.name}.version.{version}"
    config = (folder / CONFIG_FILENAME).resolve()
    before = config.read_bytes()
    mode = config.stat().st_mode
    try:
        shutil.copytree(files, hidden)
        like = next(entry for entry in folder.iterdir() if is_version(entry.name) and entry.is_dir())
        shutil.copymode(like, hidden)
        for path in hidden.rglob("*"):
            sync(path)
        sync(hidden)
        # Ctrl-C and a request to end wait until both are done.
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            replace_file(config, config_text.encode())
            config.chmod(mode)
            hidden.rename(target)
        except OSError:
            replace_file(config, before)
            config.chmod(mode)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        sync(folder)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def noted_versions(config: ModelConfig) -> list[int]:
    """Versions with a note on their origin in the configuration."""
    return [int(match[1]) for key in config.parameters if (match := _VERSION.fullmatch(key))]


def needed_parameters(config: ModelConfig, wanted: Mapping[str, str]) -> dict[str, str]:
    """The parameters that a configuration lacks.

    Raises:
        InvalidArgumentError: It has one with another value, which its other versions use.
    """
    for key, value in wanted.items():
        if key in config.parameters and config.parameters[key].string_value != value:
            raise InvalidArgumentError(
                f"it needs the parameter {key}: '{value}', and {CONFIG_FILENAME} has "
                f"'{config.parameters[key].string_value}', which holds for all versions"
            )
    return {key: value for key, value in wanted.items() if key not in config.parameters}


def config_with_note(model: RepositoryModel, number: int, report: Report, best: CandidateReport, files: Path) -> str:
    """Text of ``config.pbtxt`` with a note on the new version. Raises as ``with_provenance``, and OSError."""
    loss = best.loss
    facts = {
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
    origin = f"from version {model.version} by {best.method}, {report.created[:10]}; weft optimize wrote this note."
    return with_provenance(model.text, number, origin, facts, best.parameters)


def with_provenance(
    text: str, version: int, origin: str, facts: Mapping[str, object], parameters: Mapping[str, str]
) -> str:
    """Append a note on a version, and the parameters that it needs, to a configuration.

    Args:
        text: Of ``config.pbtxt``.
        origin: In words, for a comment.
        facts: JSON values.
        parameters: New ones, which hold for all versions.

    Raises:
        InvalidArgumentError: The extended text would not parse to the text and the note.
    """
    items = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in facts.items()]
    literals = [f"{'{' if not index else ' '}{item}" for index, item in enumerate(items)]
    strings = [quoted(literal + ("}" if index == len(literals) - 1 else ",")) for index, literal in enumerate(literals)]
    lines = [
        "",
        f"# Version {version}: {' '.join(origin.split())}",
        "parameters {",
        f'  key: "{PROVENANCE_PARAMETER}{version}"',
        "  value {",
        "    string_value:",
        *(f"      {literal}" for literal in strings),
        "  }",
        "}",
        *(
            f"parameters {{ key: {quoted(key)} value {{ string_value: {quoted(value)} }} }}  # for version {version}"
            for key, value in parameters.items()
        ),
        "",
    ]
    newline = "\r\n" if "\r\n" in text else "\n"
    edited = text + ("" if not text or text.endswith("\n") else newline) + newline.join(lines)
    before, _ = parse(text, ModelConfig(), file=CONFIG_FILENAME)
    after, _ = parse(edited, ModelConfig(), file=CONFIG_FILENAME)
    note = after.parameters[f"{PROVENANCE_PARAMETER}{version}"].string_value
    for key in (f"{PROVENANCE_PARAMETER}{version}", *parameters):
        del after.parameters[key]
    if before != after or json.loads(note) != json.loads(json.dumps(dict(facts))):
        raise InvalidArgumentError(f"{CONFIG_FILENAME} cannot be extended: what it says would change")
    return edited


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
