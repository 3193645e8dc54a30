"""docs/configuration.md lists every argument with its default, and no other."""

import argparse
import re
from pathlib import Path

import pytest

from weft.cli.commands import edge, up
from weft.gateway.main import make_parser as make_gateway_parser
from weft.router.arguments import add_arguments as add_router_arguments
from weft.services.router import make_parser as make_router_parser
from weft.serving.main import add_arguments as add_serving_arguments
from weft.v2.server.server import add_arguments as add_service_arguments
from weft.v2.workers.link import add_worker_arguments

PAGE = (Path(__file__).parents[3] / "docs/configuration.md").read_text()
Defaults = dict[str, str]


def listed(section: str) -> Defaults:
    """Arguments of one section's table, with their defaults as written; a row may list several of each."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| (`--.*?`) \| ([^|]*) \| ", text)
    found: Defaults = {}
    for names, defaults in rows:
        flags = re.findall(r"`(--[\w-]+)", names)
        values = [value.strip("` ") for value in defaults.split(",")]
        found |= dict(zip(flags, values, strict=True))
    return found


def expected(parser: argparse.ArgumentParser) -> Defaults:
    """The same, of a parser."""
    return {
        action.option_strings[0]: _default(action)
        for action in parser._actions
        if action.option_strings and "--help" not in action.option_strings and action.help != argparse.SUPPRESS
    }


def _default(action: argparse.Action) -> str:
    if action.required:
        return "required"
    if action.const is True:
        return "off"
    if action.default is True:
        return "true"
    is_switched_off = action.default == 0 and ("port" in action.dest or action.dest.endswith("_abort_s"))
    if action.default in (None, [], (), "", 0) and not is_switched_off:
        return "none"
    return f"{action.default:g}" if isinstance(action.default, float) else str(action.default)


def service_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_service_arguments(parser, grpc_port=0, metrics_port=0)
    return parser


def serving_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_serving_arguments(parser)
    return parser


def mesh_parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    {"up": up, "edge": edge}[name].add_arguments(parser)
    return parser


def test_every_service() -> None:
    """What all services share; the ports are those of each."""
    assert expected(service_parser()) | {"--grpc-port": "by service", "--metrics-port": "by service"} == listed(
        "Every service"
    )


def test_router() -> None:
    """The router's own; --target is asked for when none is given."""
    parser = make_router_parser("weft.router", "")
    add_worker_arguments(parser)
    own = expected(parser)
    for shared in expected(service_parser()):
        del own[shared]
    assert own | {"--target": "required"} == listed("Router")


def test_serving() -> None:
    """What preprocess, model and postprocess have beside."""
    assert expected(serving_parser()) == listed("Preprocess, model and postprocess")


def test_gateway() -> None:
    """The gateway's, which shares some with every service."""
    assert expected(make_gateway_parser()) == listed("Gateway")


@pytest.mark.parametrize("name", ["up", "edge"])
def test_commands_that_serve(name: str) -> None:
    """Those of ``weft up`` and ``weft edge``; what they give the router is listed there."""
    parser = argparse.ArgumentParser()
    add_router_arguments(parser)
    own = {name: default for name, default in expected(mesh_parser(name)).items() if name not in expected(parser)}
    assert own == listed(f"weft {name}")


@pytest.mark.parametrize("name", re.findall(r"(?m)^\| `([A-Z_]+)`", PAGE))
def test_environment_variables_are_read(name: str) -> None:
    """Every variable of the page stands in the code, or is one that OpenTelemetry's SDK reads itself."""
    services = (Path(__file__).parents[3] / "services").rglob("*.py")
    assert name.startswith("OTEL_") or any(f'"{name}"' in path.read_text() for path in services)
