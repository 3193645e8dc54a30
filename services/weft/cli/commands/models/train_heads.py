"""``weft train-heads``: trains heads that guess further tokens of a language model, for ``speculation: medusa``."""

import argparse
import json
import sys

from weft.base.errors import WeftError
from weft.tools.train_heads import HeadReport, train_heads

_STEPS_BETWEEN_LINES = 100


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
