"""``python -m weft.mesh.fused``: the router as a process that has model services in it."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import NamedTuple, NoReturn

from typing_extensions import override

from weft.mesh.fused.core import FusedCore
from weft.services.router import fault_of, make_parser
from weft.services.router import make_core as make_router
from weft.serving.calls import Callee
from weft.serving.core import ServingCore
from weft.serving.main import add_arguments, make_core, usage_fault
from weft.v2.client.wires import WireName
from weft.v2.server import server

#: Module with the backends of each service; imported when the service is to run here, as it may not be installed.
_BACKENDS = {
    "preprocess": "weft.backends.preprocess",
    "model": "weft.backends",
    "postprocess": "weft.backends.postprocess",
}


class _Service(NamedTuple):
    """A service to run in this process."""

    name: str
    options: argparse.Namespace

    def maker(self, wire: WireName) -> Callable[[Callee], ServingCore]:
        """A function that makes its core, with this wire for its calls. Raises ImportError if it is not installed."""
        return partial(make_core, self.options, import_module(_BACKENDS[self.name]).BACKENDS, wire=wire)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve graphs and models until a signal stops it; the exit status is that of ``weft.services.router.main``.

    Args:
        argv: Arguments; those of the process when None.
    """
    parser = make_parser("weft.mesh.fused", "Serve graphs over model services, some of them in this process.")
    parser.add_argument(
        "--in-process",
        type=_service,
        action="append",
        required=True,
        metavar="'NAME ARGUMENTS'",
        help="run this service here, with its own arguments but those of its ports, for example "
        "'model --repository models'; may be repeated; before every --target",
    )
    options = parser.parse_args(argv)
    services: list[_Service] = options.in_process
    if fault := fault_of(options, [service.name for service in services]):
        print(f"weft.mesh.fused: error: {fault}", file=sys.stderr)
        return 2
    makers = {service.name: service.maker(options.wire) for service in services}
    return server.run(
        "router", lambda: FusedCore(makers, partial(make_router, options)), options, extend=FusedCore.extension
    )


class _Parser(argparse.ArgumentParser):
    """A parser that raises its errors; an ordinary one ends the process."""

    @override
    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentTypeError(message)


def _service(text: str) -> _Service:
    try:
        name, *arguments = shlex.split(text) or [""]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}': {error}") from None
    if name not in _BACKENDS:
        raise argparse.ArgumentTypeError(f"'{text}' must begin with one of {', '.join(_BACKENDS)}")
    parser = _Parser(add_help=False)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    if fault := usage_fault(options):
        raise argparse.ArgumentTypeError(fault)
    return _Service(name, options)


if __name__ == "__main__":
    sys.exit(main())
