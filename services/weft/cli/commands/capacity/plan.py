"""``weft plan``: what models need on a device, how fast they are there, and where they go."""

import argparse
import json
import sys

from weft.base.errors import UnsupportedError, WeftError


def run(options: argparse.Namespace) -> int:
    """Print the report; 0, or 1 if a model cannot be planned, fits nowhere or has no place."""
    try:
        # optional packages, and slow to import
        from weft.capacity.plan.report import PlanOptions, make_report  # noqa: PLC0415
        from weft.capacity.plan.report_text import render_report  # noqa: PLC0415
        from weft.capacity.plan.written import plan_values, render_instance_groups, write_outputs  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{error.name} is not installed; install it with pip install 'weft-mesh[plan,model]'"
        ) from error
    try:
        report = make_report(
            PlanOptions(
                repository=options.repository,
                models=tuple(options.models),
                device=options.device,
                num_devices=options.num_devices,
                batch=options.batch,
                shapes=dict(options.shape),
                declared=dict(options.declare),
                rates=dict(options.rate),
                context=options.context,
                num_output_tokens=options.output_tokens,
                cost_per_hour=options.cost_per_hour,
                fleet=options.fleet,
                replicas=dict(options.replicas),
                max_models=options.max_models,
                check=options.check,
            ),
            announce=lambda text: print(f"weft plan: {text}", file=sys.stderr),
        )
        written = write_outputs(report, options.save, options.kubernetes)
    except OSError as error:
        print(f"weft plan: '{error.filename}': {error.strerror}", file=sys.stderr)
        return 1
    except WeftError as error:
        print(f"weft plan: {error.message}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(plan_values(report)))
    else:
        print(render_report(report))
        if options.instance_groups:
            print("\n" + render_instance_groups(report))
        for path in written:
            print(f"wrote {path}")
    return 0 if report.fits else 1
