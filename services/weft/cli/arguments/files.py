"""Arguments of the commands that work on files, without a server; imports nothing heavy."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from weft.base.text.argument_types import positive
from weft.cli.arguments.shared import add_json_argument, add_request_arguments
from weft.cli.arguments.types import pair

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_commands(commands: "Commands") -> None:
    """Add ``weft check``, ``draw``, ``explain``, ``convert``, ``init`` and ``completion``."""
    _add_check(commands)
    _add_draw(commands)
    _add_explain(commands)
    _add_convert(commands)
    _add_init(commands)
    _add_completion(commands)


def _add_check(commands: "Commands") -> None:
    parser = commands.add_parser(
        "check",
        help="check graph.pbtxt and config.pbtxt files",
        description="Report every error of graph and configuration files, without a server.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file, or a folder to search")
    parser.add_argument(
        "--repository",
        type=Path,
        metavar="DIR",
        help="models and other graphs; default: the repository that a graph is in, else ./model_repository",
    )
    parser.add_argument(
        "--lock", type=Path, metavar="FILE", help="check graphs against the signatures in this file of weft lock"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_const", const="json", dest="format", default="text", help="print facts as JSON"
    )
    form.add_argument(
        "--github", action="store_const", const="github", dest="format", help="print annotations of GitHub's CI"
    )


def _add_draw(commands: "Commands") -> None:
    parser = commands.add_parser(
        "draw",
        help="draw a graph",
        description="Draw a graph: its nodes as nested boxes, its tensors as edges. No server is needed.",
        epilog="example: weft draw digits -o digits.svg",
    )
    _add_graph(parser)
    parser.add_argument(
        "--format", choices=("mermaid", "dot", "svg", "text"), help="default: as the suffix of -o says, else mermaid"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: standard output")


def _add_explain(commands: "Commands") -> None:
    parser = commands.add_parser(
        "explain",
        help="show which path a request takes through a graph",
        description="Show which path a request takes through a graph, as far as it is known before a model answers.",
        epilog="example: weft explain triage --param team=shipping --input TEXT='\"The parcel never came.\"'",
    )
    _add_graph(parser)
    add_request_arguments(parser)
    parser.add_argument(
        "--shape", action="append", default=[], type=pair, metavar="NAME=1,3", help="an input's shape, values unknown"
    )
    for option, what in (("--gives", "there"), ("--lacks", "left out")):
        parser.add_argument(
            option,
            action="append",
            default=[],
            metavar="STEP/OUTPUT",
            help=f"an optional output of a model's answer is {what}; default: unknown",
        )
    parser.add_argument("--priority", type=int, metavar="N", help="the request parameter of that name")
    parser.add_argument("--remaining-ms", type=positive, metavar="N", help="the client's deadline; default: none")
    add_json_argument(parser)


def _add_convert(commands: "Commands") -> None:
    parser = commands.add_parser(
        "convert",
        help="make graphs of KServe's InferenceGraphs and Seldon's deployments, pipelines and experiments",
        description="Write graph.pbtxt for each InferenceGraph of KServe, SeldonDeployment of Seldon Core 1, and "
        "Pipeline and Experiment of Seldon Core 2 in the file. What a person has to look at is a comment there that "
        "begins with CHECK, and a warning. Ends with status 1 if the file has errors, or if something that changes "
        'answers was left out: "CHECK: answers may differ".',
        epilog="example: weft convert inference-graph.yaml --repository model_repository -o model_repository/graphs",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML or JSON; - is standard input")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="PATH",
        help="a .pbtxt file, or a folder for FOLDER/NAME/1/graph.pbtxt; default: standard output",
    )
    parser.add_argument("--force", action="store_true", help="write over graphs that exist")
    types = parser.add_mutually_exclusive_group()
    types.add_argument(
        "--lock",
        type=Path,
        metavar="FILE",
        help="take the signatures of models from this file of weft lock",
    )
    types.add_argument(
        "--repository", type=Path, metavar="DIR", help="take those of models and graphs from this repository"
    )


def _add_init(commands: "Commands") -> None:
    parser = commands.add_parser(
        "init",
        help="write a small working repository",
        description="Write a repository with a model, a graph and their configuration into a new or empty folder.",
        epilog="example: weft init mine && weft up --repository mine",
    )
    parser.add_argument("folder", type=Path, metavar="DIR")


def _add_completion(commands: "Commands") -> None:
    parser = commands.add_parser(
        "completion",
        help="print what makes a shell complete the arguments of weft",
        description="Print a script that makes a shell complete the arguments of weft.",
        epilog='example: eval "$(weft completion bash)"',
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh", "powershell"))


def _add_graph(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", metavar="GRAPH", help="a graph file, or a graph's name; NAME/VERSION for one version")
    parser.add_argument(
        "--repository",
        type=Path,
        metavar="DIR",
        help="models and other graphs; default: the repository that the file is in, else ./model_repository",
    )
    parser.add_argument(
        "--lock", type=Path, metavar="FILE", help="take the signatures of models from this file of weft lock"
    )
