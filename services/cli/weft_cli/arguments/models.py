"""Arguments of the commands that work on the folders of language models; imports nothing heavy."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from weft_cli.arguments.shared import add_json_argument
from weft_cli.arguments.types import share
from weft_common.text.argument_types import not_negative_integer, positive, positive_integer

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

#: As ``weft_tools.quantize.quantize_folder`` knows them, which takes torch to import.
QUANTIZATION_METHODS = ("int8", "int4", "nf4", "gptq")


def add_commands(commands: "Commands") -> None:
    """Add ``weft train-heads`` and ``quantize``."""
    _add_train_heads(commands)
    _add_quantize(commands)


def _add_train_heads(commands: "Commands") -> None:
    parser = commands.add_parser(
        "train-heads",
        help="train heads that guess further tokens of a language model",
        description="Train Medusa heads for a language model on a text, for the engine's parameter `speculation`: "
        "medusa. The model is not changed. Prints how often each head is right on the last tenth of the text, which is "
        "not trained on.",
        epilog="example: weft train-heads model_repository/model/writer/1 --data my.txt --output heads",
    )
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


def _add_quantize(commands: "Commands") -> None:
    parser = commands.add_parser(
        "quantize",
        help="make a language model smaller, and measure what that costs",
        description="Write a copy of a language model with fewer bits per weight, and report what it costs; if that is "
        "more than --max-loss, write nothing.",
        epilog="example: weft quantize FOLDER --output SMALLER --method int4 --data texts.jsonl --max-loss 1%%",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a Hugging Face folder with tokenizer.json")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="must not exist")
    parser.add_argument(
        "--method",
        choices=QUANTIZATION_METHODS,
        required=True,
        help="8 or 4 bits, each weight rounded alone; gptq: 4 bits, chosen by what the data gives each layer",
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="text like that which the model is for, or .jsonl with 'text' on each line; the last fifth is held out",
    )
    parser.add_argument(
        "--max-loss", type=share, default=0.05, metavar="1%", help="most that the perplexity may rise; default: 5%%"
    )
    parser.add_argument(
        "--group-size",
        type=not_negative_integer,
        metavar="N",
        help="inputs that share a scale, 0 for all; default: int8 all, int4 and gptq 32, nf4 64",
    )
    add_json_argument(parser)
