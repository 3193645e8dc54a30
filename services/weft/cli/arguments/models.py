"""Arguments of the commands that make models smaller or faster; imports nothing heavy."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from weft.base.text.argument_types import not_negative_integer, positive, positive_integer
from weft.cli.arguments.shared import add_json_argument
from weft.cli.arguments.types import graph_version, pair, share

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

#: As ``weft.tools.quantize.quantize_folder`` knows them, which takes torch to import.
QUANTIZATION_METHODS = ("int8", "int4", "nf4", "gptq")


def add_commands(commands: "Commands") -> None:
    """Add ``weft optimize``, ``train-heads`` and ``quantize``."""
    _add_optimize(commands)
    _add_train_heads(commands)
    _add_quantize(commands)


def _add_optimize(commands: "Commands") -> None:
    parser = commands.add_parser(
        "optimize",
        help="make a model smaller and faster, behind an accuracy gate",
        description="Build smaller and faster versions of an ONNX or torch model, send held-out rows of your data "
        "through the graph with each, and write the fastest that loses no more than --max-loss as a new version "
        "beside the old one. Ends with status 0 if one was written (or would be: --dry-run), 1 if the run failed, 2 if "
        "the call is wrong, 3 if no candidate passes the gate and is faster.",
        epilog="example: weft optimize minilm --graph embed --data texts.jsonl --max-loss 0.5%% --report report",
    )
    parser.add_argument("model", type=graph_version, metavar="MODEL", help="NAME/VERSION for one version")
    parser.add_argument(
        "--data",
        required=True,
        metavar="PATH",
        help="rows such as the graph gets: Parquet, JSON Lines or CSV, a file, folder or pattern",
    )
    parser.add_argument(
        "--max-loss",
        type=share,
        required=True,
        metavar="0.5%",
        help="most that the upper end of the loss's 95%% interval may be; 0.005 is 0.5%%",
    )
    parser.add_argument(
        "--objective",
        default="latency",
        choices=("latency", "throughput"),
        help="what has to be faster: a request with 1 row (default), or rows a second in requests of 32, 4 at once",
    )
    parser.add_argument(
        "--graph",
        type=graph_version,
        metavar="GRAPH",
        help="graph that the data goes through; default: the one that calls the model",
    )
    parser.add_argument(
        "--method", action="append", default=[], metavar="NAME", help="try only this; may be repeated; default: all"
    )
    parser.add_argument(
        "--repository",
        type=Path,
        default=Path("model_repository"),
        metavar="DIR",
        help="model repository; default: model_repository",
    )
    parser.add_argument("--dry-run", action="store_true", help="do all but write the version")
    parser.add_argument("--report", type=Path, metavar="DIR", help="gets report.json, report.svg and mesh.log")
    _add_judgement(parser)
    add_json_argument(parser)


def _add_judgement(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument("--format", default="", choices=("parquet", "jsonl", "csv"), help="default: by suffix")
    data.add_argument(
        "--column",
        action="append",
        default=[],
        type=pair,
        metavar="INPUT=COLUMN",
        help="column of an input; default: that of the same name",
    )
    data.add_argument(
        "--calibration-rows", type=positive_integer, default=256, metavar="N", help="at most; default: 256"
    )
    data.add_argument(
        "--held-out-rows", type=positive_integer, default=1000, metavar="N", help="at most; default: 1000"
    )
    data.add_argument(
        "--seed", type=not_negative_integer, default=0, metavar="N", help="of the split into both; default: 0"
    )
    judgement = parser.add_argument_group("judgement")
    judgement.add_argument(
        "--metric",
        default="",
        metavar="NAME",
        help="cosine, agreement, loss, retrieval, or FILE.py:function; default: agreement where an output is a class, "
        "else cosine",
    )
    judgement.add_argument("--output", default="", metavar="OUTPUT", help="of the graph, that is judged")
    judgement.add_argument(
        "--label", default="", metavar="COLUMN", help="with the right class; default: the original's own"
    )
    judgement.add_argument(
        "--positive", default="positive", metavar="COLUMN", help="retrieval: the text to find; default: positive"
    )
    judgement.add_argument(
        "--rounds", type=positive_integer, default=5, metavar="N", help="of the measurement of the cost; default: 5"
    )
    judgement.add_argument(
        "--timeout-ms", type=positive, default=60_000.0, metavar="N", help="deadline of a request; default: 60000"
    )


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
