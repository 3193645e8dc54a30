"""``weft train-heads``: trains heads that guess further tokens of a language model, for ``speculation: medusa``."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from weft.base.text.argument_types import add, not_negative_integer, positive, positive_integer
from weft.cli.arguments import add_json_argument
from weft.tools.train_heads import HeadReport, train_heads

_STEPS_BETWEEN_LINES = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft train-heads``."""
    option = partial(add, parser)
    parser.description = (
        "Train Medusa heads for a language model on a text, for the engine's parameter `speculation`: "
        "medusa. The model is not changed. Prints how often each head is right on the last tenth of the text, which is "
        "not trained on."
    )
    parser.epilog = "example: weft train-heads model_repository/model/writer/1 --data my.txt --output heads"
    option("folder FOLDER", "of the model: config.json, *.safetensors", Path)
    option(
        "--data FILE",
        "UTF-8 text like that to be served, or token ids: a 1-D array in a .npy file",
        Path,
        required=True,
    )
    option("-o --output FOLDER", "gets the heads; made if it is not there", Path, required=True)
    option("--force", "write over heads that exist")
    option("--num-heads N (4)", "most drafts of a step", positive_integer)
    option("--num-steps N (600)", "of the optimizer", positive_integer)
    option("--learning-rate RATE (0.008)", "largest", positive)
    option("--max-tokens N (131072)", "of the text", positive_integer)
    option("--seed N (0)", kind=not_negative_integer)
    option("--device DEVICE (cpu)", "cpu, cuda or cuda:N")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Train, write and print the accuracy of each head; 0, or 1 on failure."""

    def on_step(step: int, loss: float) -> None:
        if step % _STEPS_BETWEEN_LINES == 0 or step == options.num_steps:
            print(f"step {step} of {options.num_steps}: {loss:.3f} nats per token", file=sys.stderr, flush=True)

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
