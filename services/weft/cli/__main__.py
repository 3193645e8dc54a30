"""Entry point of ``weft`` and ``python -m weft.cli``."""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn

import argcomplete

from weft import __version__
from weft.base.errors import UnsupportedError, WeftError
from weft.base.text.suggestion import printable, suggestion

#: Commands that need more packages than a mesh: the extras that install them.
_EXTRAS = {
    "batch": "jobs",
    "convert": "convert",
    "stream": "jobs",
    "optimize": "plan,torch,transforms",
    "quantize": "torch",
    "plan": "plan,torch",
    "replay": "jobs",
    "tune": "plan",
    "lsp": "lsp",
}
#: Commands that warn if both distributions of ONNX Runtime are installed.
_WARNING = {"up", "edge", "check"}
#: Commands that read from the kernel which cores there are, and what processes used.
_LINUX = {"plan", "tune"}
#: Commands whose errors are told without the status that a server would give.
_WITHOUT_STATUS = {"lock", "key", "plan", "quantize"}


class CommandParser(argparse.ArgumentParser):
    """Parses the arguments of ``weft`` or of one of its commands.

    Args:
        module: Of a command, with ``add_arguments`` and ``run``; imported when the command's arguments are parsed, so
            that ``weft --help`` loads neither gRPC nor numpy.
        **kwargs: Of argparse.
    """

    def __init__(self, module: str = "", **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | kwargs)
        self._module = module

    def load(self) -> None:
        """Add the command's arguments, once. Raises UnsupportedError if a required package is not installed."""
        if not self._module:
            return
        try:
            module = import_module(self._module)
        except ModuleNotFoundError as error:
            raise _missing(self.prog.rpartition(" ")[2], error) from error
        module.add_arguments(self)
        self.set_defaults(run=module.run)
        self._module = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Like argparse, but report unknown arguments here, with the command's usage, not in the parent parser."""
        self.load()
        options, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self._hint(rest)}")
        return options, rest

    def error(self, message: str) -> NoReturn:
        """Print usage and message; exit with status 2."""
        _, quote, rest = message.partition("COMMAND: invalid choice: '")
        if quote:
            message += suggestion(rest.partition("'")[0], self._commands()).partition("; use one of")[0]
        super().error(message)

    def _hint(self, arguments: Sequence[str]) -> str:
        for argument in arguments:
            option = argument.partition("=")[0]
            if option.startswith("--"):
                return suggestion(option, self._option_string_actions).partition("; use one of")[0]
        return ""

    def _commands(self) -> Iterable[str]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action.choices


#: Every command: what it does. The module of its name in ``weft.cli.commands`` has its arguments and runs it.
COMMANDS = {
    "up": "start the mesh on this machine",
    "dev": "serve what a Python file defines, and again when a file changes",
    "edge": "serve graphs and models in this one process, on a small machine",
    "restart": "replace the services of a mesh on this machine without a gap",
    "top": "show services, queues, rates and latencies as they are now",
    "infer": "send one request to a graph or model",
    "feedback": "tell a graph's bandits how good an answer was",
    "rollout": "show and steer rollouts, or set the weights of a splitter",
    "rollback": "put back what a graph served before",
    "record": "record a share of a graph's requests and answers",
    "replay": "send recorded requests again, and compare the answers",
    "lock": "write the signatures of the models that run",
    "stubs": "write the types of models and graphs for mypy, pyright and editors",
    "key": "make a key for a client",
    "check": "check graph.pbtxt and config.pbtxt files",
    "test": "run the cases beside graphs, on a fake clock",
    "draw": "draw a graph",
    "diff": "show what a change of a graph means for its clients, its users and its costs",
    "explain": "show which path a request takes through a graph",
    "convert": "make graphs of KServe's InferenceGraphs and Seldon's deployments, pipelines and experiments",
    "lsp": "tell an editor errors, completions and documentation, as a language server",
    "init": "write a small working repository, or add a model of Hugging Face to one",
    "completion": "print what makes a shell complete the arguments of weft",
    "batch": "run a data set through a graph, into files",
    "stream": "run messages of a broker through a graph",
    "optimize": "make a model smaller and faster, behind an accuracy gate",
    "quantize": "make a language model smaller, and measure what that costs",
    "plan": "tell what models need, how fast a device runs them, and where they go",
    "tune": "find the settings that serve a graph best on this machine",
}

#: What ``weft --help`` shows: for each section an example and its commands.
SECTIONS = {
    "start": ("weft init mine && weft up --repository mine", ("init", "up", "dev", "edge", "restart")),
    "ask": ("weft infer quadruple --input X='[3]' --trace", ("infer", "feedback", "batch", "stream")),
    "change": (
        "weft check mine --repository mine",
        (
            *("check", "test", "draw", "diff", "explain", "lsp", "lock", "stubs", "rollout", "rollback", "record"),
            *("replay", "key"),
        ),
    ),
    "measure": ("weft top --url 127.0.0.1:8002", ("top", "plan", "tune")),
    "convert": ("weft convert inference-graph.yaml -o mine/graphs", ("convert", "optimize", "quantize")),
    "shell": ('eval "$(weft completion bash)"', ("completion",)),
}


class _Overview(CommandParser):
    """The parser of ``weft`` itself, whose help has the commands in sections."""

    def format_help(self) -> str:
        """Usage, and for each section what its commands do, and an example."""
        lines = [f"{self.format_usage()}\n{self.description}"]
        for section, (example, names) in SECTIONS.items():
            lines += [f"\n{section}:", *(f"  {name:<12}{COMMANDS[name]}" for name in names), f"    $ {example}"]
        return "\n".join([*lines, "\n`weft COMMAND --help` shows its options, with an example.", ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0 done, 1 failed, 2 wrong usage."""
    parser = make_parser()
    argcomplete.autocomplete(parser)  # does nothing unless a shell asks
    command = ""
    try:
        options = parser.parse_args(argv)
        command = options.command
        if command in _WARNING and (clash := _clash()):
            print(f"weft: {clash}", file=sys.stderr)
        if command in _LINUX and sys.platform != "linux":
            print(f"weft {command} needs Linux, whose kernel tells it cores and costs of processes", file=sys.stderr)
            return 1
        try:
            status: int = options.run(options)
        except ModuleNotFoundError as error:
            raise _missing(command, error) from error
        if sys.stdout is not None:
            sys.stdout.flush()
    except WeftError as error:
        is_short = command in _WITHOUT_STATUS and not isinstance(error.__cause__, ModuleNotFoundError)
        print(
            printable(f"weft {command}: {error.message}" if is_short else f"weft: {error.code}: {error.message}"),
            file=sys.stderr,
        )
        return 1
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # the reader has left, as in `weft check | head`
            what = f"'{error.filename}': {error.strerror}" if error.filename else error
            print(f"weft {command}: {what}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more at its end
        return 1
    return status


def _missing(command: str, error: ModuleNotFoundError) -> Exception:
    """Message for a missing package; a missing module of Weft itself is a defect."""
    if error.name is None or error.name.startswith("weft"):
        return error
    extra = {"onnxruntime": "onnx", "ray": "ray"}.get(error.name) or _EXTRAS.get(command, "all")
    return UnsupportedError(f"weft {command} needs '{error.name}': pip install 'weft-mesh[{extra}]'")


def _clash() -> str:
    """Warning that both distributions of ONNX Runtime are installed, "" if they are not."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  # `weft --help` does without

    try:
        cpu, gpu = version("onnxruntime"), version("onnxruntime-gpu")
    except PackageNotFoundError:
        return ""
    return (
        f"onnxruntime {cpu} and onnxruntime-gpu {gpu} are both installed and overwrite each other's files; pip "
        "uninstall both, then pip install 'weft-mesh[onnx]', or 'weft-mesh[gpu]' for GPUs of NVIDIA"
    )


def make_parser() -> CommandParser:
    """The parser of ``weft``; a command's parser gets its arguments when it is used, or by its ``load``."""
    parser = _Overview(prog="weft", description="Serve models as a mesh of gRPC services.")
    parser.add_argument("--version", action="version", version=f"weft-mesh {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, module=f"weft.cli.commands.{name.replace('-', '_')}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
