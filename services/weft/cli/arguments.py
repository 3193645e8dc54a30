"""Arguments shared by several commands, and value types that raise argparse's usage errors."""

import argparse
import dataclasses
import math
import shlex
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from weft.base.repository.layout import folders_of_models, is_graph_folder, is_version
from weft.base.security.arguments import add_channel_arguments
from weft.base.text.argument_types import add, is_metadata_name, time_s
from weft.mesh.service_names import GATEWAY, MODEL_SERVICES, PAGE, ROUTER

Made = TypeVar("Made")

#: Default gRPC port of a router.
ROUTER_PORT = 8001
#: Processes of one service on this machine.
MAX_REPLICAS = 64


def port(text: str) -> int:
    """A port, 0 for any free one."""
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is no port; give 0 (any free one) to 65535")
    return port


def message_bytes(text: str) -> int:
    """The size of a message in bytes, which gRPC counts in 31 bits."""
    size_bytes = int(text)
    if not 0 < size_bytes < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text} is no size of a message; give 1 to {(1 << 31) - 1} bytes")
    return size_bytes


def pair(text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form NAME=VALUE")
    return name, value


def header(text: str) -> tuple[str, str]:
    """NAME=VALUE of ASCII metadata, the name in lower case."""
    name, value = pair(text)
    if not is_metadata_name(name.lower()) or not (value.isascii() and value.isprintable()):
        raise argparse.ArgumentTypeError(
            f"'{text}' cannot be sent as metadata; a name is of letters, digits, '_', '-' and '.', a value is ASCII"
        )
    return name.lower(), value


def named_file(text: str) -> tuple[str, Path]:
    """[NAME=]PATH as input and file; without a name the input is "". The path may contain "="."""
    name, separator, path = text.partition("=")
    return (name, Path(path)) if separator and path and not Path(text).exists() else ("", Path(text))


def reward(text: str) -> float:
    """A number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no reward; give a number from 0 (worst) to 1 (best)")
    return value


def services(text: str) -> tuple[str, ...]:
    """Names of services, separated by commas, each once."""
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in MODEL_SERVICES]:
        raise argparse.ArgumentTypeError(f"'{unknown[0]}' is no service; give some of {','.join(MODEL_SERVICES)}")
    return names


def replicas(text: str) -> tuple[str, int]:
    """NAME=COUNT of a service."""
    name, _, count = text.partition("=")
    if name not in MODEL_SERVICES or not (count.isdecimal() and 1 <= int(count) <= MAX_REPLICAS):
        raise argparse.ArgumentTypeError(
            f"'{text}' is not of the form NAME=COUNT with a NAME of {', '.join(MODEL_SERVICES)} and a COUNT of 1 to "
            f"{MAX_REPLICAS}"
        )
    return name, int(count)


def service_arguments(text: str) -> tuple[str, list[str]]:
    """NAME='ARGUMENTS' of a service."""
    name, separator, arguments = text.partition("=")
    names = (ROUTER, *MODEL_SERVICES, GATEWAY, PAGE)
    if name not in names or not separator:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not of the form NAME='ARGUMENTS' with a NAME of {', '.join(names)}"
        )
    try:
        return name, shlex.split(arguments)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}': {error}") from None


def graph_version(text: str) -> str:
    """NAME or NAME/VERSION."""
    name, slash, version = text.partition("/")
    if not name or (slash and not is_version(version)):
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form NAME or NAME/VERSION")
    return text


def seconds(text: str) -> float:
    """A time above 0, as ``time_s``."""
    if not (value := time_s(text)):
        raise argparse.ArgumentTypeError(f"'{text}' is no time above 0 with its unit; write for example 90s, 10m or 2h")
    return value


def share(text: str) -> float:
    """A share such as 0.01 or 1%, 0 or more; from 1 on a percent sign is required, since 1 may mean 1%."""
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if 1 <= value < math.inf and not text.endswith("%"):
        raise argparse.ArgumentTypeError(f"'{text}' would be {value:.0%}; write {text}% or {value:.0%}")
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is no share; give a number from 0 on such as 0.01, or 1%")
    return value


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments that describe a request."""
    option = partial(add, parser)
    option("--input NAME=JSON ...", "an input's value; @FILE reads it", pair)
    option("--param NAME=VALUE ...", "request parameter", pair)
    option("--header NAME=VALUE ...", "metadata", header)
    option("--output NAME ...", "ask for this output only; may be repeated")
    option("--request-id ID", "", default="")


def add_router_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the router's address and security options."""
    add(parser, "--url URL", f"default: 127.0.0.1:{ROUTER_PORT}", default=f"127.0.0.1:{ROUTER_PORT}")
    add_channel_arguments(parser.add_argument_group("security"))


def made(kind: type[Made], options: argparse.Namespace, **parsed: Any) -> Made:
    """Make a dataclass from the options named like its fields, and from ``parsed``."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in vars(options).items() if name in names} | parsed)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, for commands that print facts."""
    add(parser, "--json", "print facts as JSON")


def add_graph_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a graph, and the source of its models' signatures."""
    option = partial(add, parser)
    option("graph GRAPH", "a graph file, or a graph's name; NAME/VERSION for one version")
    option(
        "--repository DIR",
        "models and other graphs; default: the repository that the file is in, else ./model_repository",
        Path,
    )
    option("--lock FILE", "take the signatures of models from this file of weft lock", Path)


def loaded_models(options: argparse.Namespace) -> list[str]:
    """What model services load in mode explicit: all; of a repository of Triton Inference Server, what is asked for.

    Raises OSError: a folder cannot be read.
    """
    repository: Path = options.repository
    if folders_of_models(repository, MODEL_SERVICES):
        return ["*"]
    folders = {name: repository / name for name in options.load_model}
    return [name for name, at in folders.items() if name == "*" or (at.is_dir() and not is_graph_folder(at))]


def model_control(options: argparse.Namespace) -> list[str]:
    """Arguments for model services about loading and completing models, from those of ``weft up`` and ``edge``."""
    control = {
        "poll": ["--model-control-mode=poll", f"--repository-poll-secs={options.repository_poll_secs}"],
        "explicit": ["--model-control-mode=explicit", *(f"--load-model={name}" for name in loaded_models(options))],
    }
    completion = ["--disable-auto-complete-config"] if options.disable_auto_complete_config else []
    return [*control.get(options.model_control_mode, []), *completion]
