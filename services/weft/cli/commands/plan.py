"""``weft plan``: what models need on a device, how fast they are there, and where to place them."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from weft.base.text.argument_types import add, not_negative, positive, positive_integer
from weft.cli.arguments import add_json_argument, made, pair


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft plan``."""
    option = partial(add, parser)
    parser.description = (
        "Work out, from the files of models, the memory that each needs, its time at batch 1 and at the "
        "largest, what bounds it, and the largest batch or context that fits, on a device of a table, of a file, or on "
        "this machine, which is measured once. Then place the models on devices. Nothing is served."
    )
    parser.epilog = (
        "example: weft plan minilm --device H100 --shape input_ids=128 --shape attention_mask=128 "
        "--shape token_type_ids=128 --rate minilm=2000 --cost-per-hour 2.5"
    )
    option("models MODEL", "or a graph, for the models that it calls; default: all of the model service", nargs="*")
    option("--repository DIR (model_repository)", kind=Path)
    option(
        "--device NAME|FILE",
        "a GPU such as H100, a TOML file with memory_gib, bandwidth_gb_per_s and tflops, or this machine: this "
        "(default)",
        default="this",
    )
    option("--num-devices N (1)", kind=positive_integer)
    option("--batch N", "largest batch; default: that of the model", positive_integer, 0)
    option(
        "--shape [MODEL.]INPUT=1x128 ...",
        "dims of an input without the batch, where the configuration leaves some open; may be repeated",
        pair,
        dest="shapes",
    )
    option("--rate MODEL=REQ_PER_S ...", "requests to be planned for; may be repeated", model_rate, dest="rates")
    option(
        "--declare MODEL=MIB:MS ...",
        "memory of an instance and time of a row of a model whose files do not tell, such as a Python model",
        pair,
        dest="declared",
    )
    language = partial(add, parser.add_argument_group("language models"))
    language(
        "--context N",
        "tokens of a prompt and its answer; default: a quarter of what the model can have",
        positive_integer,
        0,
    )
    language("--output-tokens N (128)", "of them the answer's", positive_integer, dest="num_output_tokens")
    language(
        "--link NAME",
        "between the ranks of a model on several devices: nvlink4, pcie5, ethernet-400g, ...; default: the device's",
        default="",
    )
    option("--cost-per-hour N", "of a device, in any currency", not_negative, 0.0)
    _add_placement(parser)
    add_json_argument(parser)


def _add_placement(parser: argparse.ArgumentParser) -> None:
    group = partial(add, parser.add_argument_group("placement"))
    group("--fleet FILE", "TOML file of the hosts that have the device, in place of --num-devices", Path)
    group("--replicas MODEL=N ...", "at least so many, in different failure domains; may be repeated", model_replicas)
    group(
        "--max-models N",
        "replicas that may share a device or a MIG slice by turns; default: 8, or all models if they are more",
        positive_integer,
        0,
    )
    group("--save FILE", "keep models, devices and placement in a JSON file", Path)
    group("--check FILE", "tell what moves of a saved plan; status 1 if something does, or does not fit", Path)
    group("--instance-groups", "print the instance_group of config.pbtxt for each host and model")


def model_replicas(text: str) -> tuple[str, int]:
    """MODEL=N."""
    name, number = pair(text)
    return name, positive_integer(number)


def model_rate(text: str) -> tuple[str, float]:
    """MODEL=REQ_PER_S."""
    name, rate = pair(text)
    return name, positive(rate)


def run(options: argparse.Namespace) -> int:
    """Print the report; 0, or 1 if a model cannot be planned, does not fit or has no place."""
    # optional packages, and slow to import
    from weft.capacity import report as plan  # noqa: PLC0415
    from weft.capacity.estimates import PlanOptions  # noqa: PLC0415
    from weft.capacity.subjects import shapes_of  # noqa: PLC0415

    parsed: dict[str, Any] = {name: dict(getattr(options, name)) for name in ("declared", "rates", "replicas")}
    parsed["shapes"] = shapes_of(dict(options.shapes))
    report = plan.make_report(
        made(PlanOptions, options, **parsed), announce=lambda text: print(f"weft plan: {text}", file=sys.stderr)
    )
    if options.save:
        plan.write_output(report, options.save)
    if options.json:
        print(json.dumps(plan.plan_values(report)))
    else:
        print(plan.render_report(report))
        if options.instance_groups:
            print("\n" + plan.render_instance_groups(report))
        if options.save:
            print(f"wrote {options.save}")
    return 0 if report.fits else 1
