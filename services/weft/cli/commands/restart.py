"""``weft restart``: makes a running ``weft up`` replace its services."""

import argparse
import json
import os
import signal
import sys

from weft.base.text.argument_types import add
from weft.cli.arguments import add_json_argument
from weft.mesh.registry import SeveralMeshesError, the_mesh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft restart``."""
    parser.description = (
        "Tell a running weft up of this user to replace every service by a new process, one after another."
    )
    add(parser, "--url ADDRESS", "whose router listens there, HOST:PORT; default: the only one that runs")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Signal the mesh; 0 done, 1 there is none, or more than one and no address."""
    try:
        mesh = the_mesh(options.url, lambda mesh: mesh.router)
    except SeveralMeshesError as error:
        print(f"weft restart: {error}", file=sys.stderr)
        return 1
    if mesh is None:
        where = f" at {options.url}" if options.url else ""
        print(f"weft restart: no `weft up` of this user runs{where}", file=sys.stderr)
        return 1
    os.kill(mesh.pid, signal.SIGUSR1)
    if options.json:
        print(json.dumps({"router": mesh.router, "pid": mesh.pid}))
        return 0
    print(f"The mesh at {mesh.router} replaces its services one after another; its log tells.")
    return 0
