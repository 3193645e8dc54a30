"""Arguments of the commands about capacity: ``plan`` and ``tune``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from weft_cli.arguments.shared import add_json_argument
from weft_cli.arguments.types import pair
from weft_common.text.argument_types import not_negative, positive, positive_integer

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_commands(commands: "Commands") -> None:
    """Add them to the command line."""
    _add_plan(commands)


def _add_plan(commands: "Commands") -> None:
    parser = commands.add_parser(
        "plan",
        help="tell what models need, how fast a device runs them, and where they go",
        description="Work out, from the files of models, the memory that each needs, its time at batch 1 and at the "
        "largest, what bounds it, and the largest batch or context that fits, on a device of a table, of a file, or on "
        "this machine, which is measured once. Then place the models on devices. Nothing is served.",
        epilog="example: weft plan minilm --device H100 --shape input_ids=128 --shape attention_mask=128 "
        "--shape token_type_ids=128 --rate minilm=2000 --cost-per-hour 2.5",
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all of the model service")
    parser.add_argument(
        "--repository", type=Path, default=Path("model_repository"), metavar="DIR", help="default: model_repository"
    )
    parser.add_argument(
        "--device",
        default="this",
        metavar="NAME|FILE",
        help="a GPU such as H100, a TOML file with memory_gib, bandwidth_gb_per_s and tflops, or this machine: this "
        "(default)",
    )
    parser.add_argument("--num-devices", type=positive_integer, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--batch", type=positive_integer, default=0, metavar="N", help="largest batch; default: that of the model"
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        type=pair,
        metavar="[MODEL.]INPUT=1x128",
        help="dims of an input without the batch, where the configuration leaves some open; may be repeated",
    )
    parser.add_argument(
        "--rate",
        action="append",
        default=[],
        type=model_rate,
        metavar="MODEL=REQ_PER_S",
        help="requests to be planned for; may be repeated",
    )
    parser.add_argument(
        "--declare",
        action="append",
        default=[],
        type=pair,
        metavar="MODEL=MIB:MS",
        help="memory of an instance and time of a row of a model whose files do not tell, such as a Python model",
    )
    language = parser.add_argument_group("language models")
    language.add_argument(
        "--context",
        type=positive_integer,
        default=0,
        metavar="N",
        help="tokens of a prompt and its answer; default: a quarter of what the model can have",
    )
    language.add_argument(
        "--output-tokens", type=positive_integer, default=128, metavar="N", help="of them the answer's; default: 128"
    )
    parser.add_argument(
        "--cost-per-hour", type=not_negative, default=0.0, metavar="N", help="of a device, in any currency"
    )
    add_json_argument(parser)


def model_rate(text: str) -> tuple[str, float]:
    """MODEL=REQ_PER_S."""
    name, rate = pair(text)
    return name, positive(rate)
