"""``weft quantize``: a language model with fewer bits per weight, and the loss."""

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weft.base.text.argument_types import add, not_negative_integer
from weft.cli.arguments import add_json_argument, share

#: As ``weft.tools.quantize.quantize_folder`` knows them, which takes torch to import.
QUANTIZATION_METHODS = ("int8", "int4", "nf4", "gptq")

if TYPE_CHECKING:
    from weft.tools.quantize.quantize_folder import QuantizationReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft quantize``."""
    option = partial(add, parser)
    parser.description = (
        "Write a copy of a language model with fewer bits per weight, and report what it costs; if that is "
        "more than --max-loss, write nothing."
    )
    parser.epilog = "example: weft quantize FOLDER --output SMALLER --method int4 --data texts.jsonl --max-loss 1%%"
    option("folder FOLDER", "a Hugging Face folder with tokenizer.json", Path)
    option("--output FOLDER", "must not exist", Path, required=True)
    option(
        "--method",
        "8 or 4 bits, each weight rounded alone; gptq: 4 bits, chosen by what the data gives each layer",
        choices=QUANTIZATION_METHODS,
        required=True,
    )
    option(
        "--data FILE",
        "text like that which the model is for, or .jsonl with 'text' on each line; the last fifth is held out",
        Path,
        required=True,
    )
    option("--max-loss 1%", "most that the perplexity may rise; default: 5%%", share, 0.05)
    option(
        "--group-size N",
        "inputs that share a scale, 0 for all; default: int8 all, int4 and gptq 32, nf4 64",
        not_negative_integer,
    )
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Quantise and print the report; 0, or 1 if it cannot be done or costs more than ``--max-loss``."""
    # imports torch, which takes seconds
    from weft.tools.quantize.quantize_folder import LossAboveLimitError, quantize_folder  # noqa: PLC0415

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
        raise
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
