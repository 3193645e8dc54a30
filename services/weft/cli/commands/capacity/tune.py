"""``weft tune``: the settings that serve a graph best on this machine."""

import argparse
import json
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from weft.base.errors import InvalidArgumentError, UnsupportedError, WeftError

if TYPE_CHECKING:
    from weft.capacity.tuning.space import SearchSpace
    from weft.capacity.tuning.trials import TrialRecord

_INTERRUPTED = 128 + signal.SIGINT


def run(options: argparse.Namespace) -> int:
    """Search, print what was found; 0 when the search has ended, 1 if it cannot begin or go on, 130 after Ctrl-C."""
    try:
        from weft.capacity.tuning.measurement import parse_limit  # noqa: PLC0415
        from weft.capacity.tuning.tune import (  # noqa: PLC0415  # Optuna is an extra
            TuneOptions,
            text,
            tune,
        )
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    if options.recorded and options.concurrency:
        raise InvalidArgumentError(
            "--recorded and --concurrency exclude each other; --data sends rows without their times"
        )
    is_open = bool(options.rate_per_s or options.recorded)
    study = options.study or Path(f"tune-{options.graph.replace('/', '-')}")
    given = {field.name: getattr(options, field.name) for field in fields(TuneOptions) if hasattr(options, field.name)}
    parsed = {
        "limits": tuple(parse_limit(limit) for limit in options.limits),
        "study": study,
        "objective": options.objective or ("cpu" if is_open else "throughput"),
        "column_of": dict(options.column_of),
    }
    tuned = TuneOptions(**given | parsed)
    try:
        outcome = tune(tuned, _show)
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    except KeyboardInterrupt:
        print(f"weft: interrupted; --study {study} --resume goes on", file=sys.stderr)
        return _INTERRUPTED
    if options.json:
        print(json.dumps(outcome.facts))
        return 0
    print(text(outcome.facts))
    if outcome.files:
        print(f"written: {', '.join(map(str, outcome.files))}")
    elif outcome.diff:
        print(f"\n{outcome.diff}\n--write puts it into the repository, --output DIR into a copy of it")
    return 0


def _show(record: "TrialRecord", space: "SearchSpace") -> None:
    """A trial that has ended, on standard error."""
    changes = ", ".join(f"{key} {new}" for key, (_, new) in space.changes(record.configuration).items())
    gains = ", ".join(f"{name} {gain:.2f}" for name, gain in record.gains.items())
    mark = "*" if record.is_incumbent else " "
    shown = f"times as good: {gains}" if gains else record.reason
    if gains and record.reason:
        shown += f"; {record.reason}"
    print(f"{mark} {record.outcome}: {changes or 'as it is shipped'}: {shown}", file=sys.stderr)


def _missing(error: ModuleNotFoundError) -> WeftError:
    return UnsupportedError(f"weft tune needs '{error.name}': pip install 'weft-mesh[tune]'")
