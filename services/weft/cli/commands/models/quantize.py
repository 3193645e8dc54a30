"""``weft quantize``: a language model with fewer bits per weight, and what that costs."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from weft.base.errors import WeftError

if TYPE_CHECKING:
    from weft.tools.quantize.quantize_folder import QuantizationReport


def run(options: argparse.Namespace) -> int:
    """Quantise and print the report; 0, or 1 if it cannot be done or costs more than ``--max-loss``."""
    try:
        # imports torch, which takes seconds
        from weft.tools.quantize.quantize_folder import LossAboveLimitError, quantize_folder  # noqa: PLC0415
    except ModuleNotFoundError as error:
        print(
            f"weft quantize: {error.name} is not installed; install it with pip install 'weft-mesh[model]'",
            file=sys.stderr,
        )
        return 1
    try:
        report = quantize_folder(
            options.folder,
            options.data,
            options.output,
            method=options.method,
            group_size=options.group_size,
            max_loss=options.max_loss,
        )
    except LossAboveLimitError as error:
        _print(error.report, as_json=options.json)
        print(f"weft quantize: {error.message}", file=sys.stderr)
        return 1
    except WeftError as error:
        print(f"weft quantize: {error.message}", file=sys.stderr)
        return 1
    _print(report, as_json=options.json)
    print(f"{options.output}: written", file=sys.stderr)
    return 0


def _print(report: "QuantizationReport", *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(report)))
        return
    groups = f"groups of {report.group_size}" if report.group_size else "one scale for each output"
    mib = [num_bytes / 2**20 for num_bytes in (report.bytes_before, report.bytes_after)]
    rows = [
        ("", "before", "after", ""),
        ("perplexity", f"{report.perplexity_before:.4g}", f"{report.perplexity_after:.4g}", f"{report.loss:+.2%}"),
        ("size, MiB", f"{mib[0]:.1f}", f"{mib[1]:.1f}", f"{mib[1] / mib[0] - 1:+.0%}"),
        ("greedy tokens that agree", "", f"{report.agreement:.1%}", ""),
        ("error of the weights", "", f"{report.weight_error:.2%}", ""),
        ("bits per quantised weight", "", f"{report.bits_per_weight:.2f}", ""),
    ]
    print(f"{report.method}, {groups}; measured on {report.num_held_out_tokens} held-out tokens")
    for name, before, after, change in rows:
        print(f"{name:<26}{before:>10}{after:>10}{change:>9}".rstrip())
