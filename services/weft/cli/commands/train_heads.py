"""``weft train-heads``: trains heads that guess further tokens of a language model, for ``speculation: medusa``."""

import argparse
import json
import sys
from pathlib import Path

from weft.base.errors import WeftError
from weft.base.text.argument_types import not_negative_integer, positive, positive_integer
from weft.cli.arguments import add_json_argument
from weft.tools.train_heads import HeadReport, train_heads

_STEPS_BETWEEN_LINES = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft train-heads``."""
    parser.description = (
        "Train Medusa heads for a language model on a text, for the engine's parameter `speculation`: "
        "medusa. The model is not changed. Prints how often each head is right on the last tenth of the text, which is "
        "not trained on."
    )
    parser.epilog = "example: weft train-heads model_repository/model/writer/1 --data my.txt --output heads"
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the model: config.json, *.safetensors")
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="UTF-8 text like that to be served, or token ids: a 1-D array in a .npy file",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FOLDER", help="gets the heads; made if it is not there"
    )
    parser.add_argument("--force", action="store_true", help="write over heads that exist")
    parser.add_argument(
        "--num-heads", type=positive_integer, default=4, metavar="N", help="most drafts of a step; default: 4"
    )
    parser.add_argument(
        "--num-steps", type=positive_integer, default=600, metavar="N", help="of the optimizer; default: 600"
    )
    parser.add_argument("--learning-rate", type=positive, default=0.008, metavar="RATE", help="largest; default: 0.008")
    parser.add_argument(
        "--max-tokens", type=positive_integer, default=131072, metavar="N", help="of the text; default: 131072"
    )
    parser.add_argument("--seed", type=not_negative_integer, default=0, metavar="N", help="default: 0")
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu, cuda or cuda:N; default: cpu")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Train, write and print how often each head is right; 0, or 1 if it cannot be done."""

    def on_step(step: int, loss: float) -> None:
        if step % _STEPS_BETWEEN_LINES == 0 or step == options.num_steps:
            print(f"step {step} of {options.num_steps}: {loss:.3f} nats per token", file=sys.stderr, flush=True)

    try:
        report = train_heads(
            options.folder,
            options.data,
            options.output,
            max_tokens=options.max_tokens,
            device=options.device,
            force=options.force,
            on_step=on_step,
            num_heads=options.num_heads,
            num_steps=options.num_steps,
            learning_rate=options.learning_rate,
            seed=options.seed,
        )
    except WeftError as error:
        print(f"weft train-heads: {error.message}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(
            f"weft train-heads: {error.name} is not installed; install it with: pip install 'weft-mesh[model]'",
            file=sys.stderr,
        )
        return 1
    print(_as_json(report) if options.json else _as_table(report))
    return 0


def _as_json(report: HeadReport) -> str:
    heads = [row._asdict() for row in report.heads]
    return json.dumps({"output": str(report.output), "num_tokens": report.num_tokens, "heads": heads})


def _as_table(report: HeadReport) -> str:
    lines = ["head  top-1  top-3  top-5  as the model  overlap     (held-out text)"]
    for number, row in enumerate(report.heads, 1):
        top = "  ".join(f"{share:5.1%}" for share in (row.top_1, row.top_3, row.top_5))
        lines.append(f"{number:4}  {top}  {row.agreement:12.1%}  {row.overlap:7.1%}")
    return "\n".join([*lines, f"wrote {report.output}, trained on {report.num_tokens} tokens"])
