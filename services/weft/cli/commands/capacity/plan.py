"""``weft plan``: what models need on a device, how fast they are there, and where they go."""

import argparse
import json
import sys
from dataclasses import fields
from typing import Any

from weft.base.errors import UnsupportedError, WeftError


def run(options: argparse.Namespace) -> int:
    """Print the report; 0, or 1 if a model cannot be planned, fits nowhere or has no place."""
    try:
        # optional packages, and slow to import
        from weft.capacity.plan import report as plan  # noqa: PLC0415
        from weft.capacity.plan.estimates import PlanOptions  # noqa: PLC0415
        from weft.capacity.plan.report_text import render_report  # noqa: PLC0415
        from weft.capacity.plan.subjects import shapes_of  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{error.name} is not installed; install it with pip install 'weft-mesh[plan,model]'"
        ) from error
    given = {field.name: getattr(options, field.name) for field in fields(PlanOptions) if hasattr(options, field.name)}
    parsed: dict[str, Any] = {name: dict(getattr(options, name)) for name in ("declared", "rates", "replicas")}
    try:
        parsed["shapes"] = shapes_of(dict(options.shapes))
        report = plan.make_report(
            PlanOptions(**given | parsed),
            announce=lambda text: print(f"weft plan: {text}", file=sys.stderr),
        )
        written = plan.write_outputs(report, options.save, options.kubernetes)
    except OSError as error:
        print(f"weft plan: '{error.filename}': {error.strerror}", file=sys.stderr)
        return 1
    except WeftError as error:
        print(f"weft plan: {error.message}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(plan.plan_values(report)))
    else:
        print(render_report(report))
        if options.instance_groups:
            print("\n" + plan.render_instance_groups(report))
        for path in written:
            print(f"wrote {path}")
    return 0 if report.fits else 1
