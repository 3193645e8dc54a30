"""``weft restart``: makes a running ``weft up`` replace its services."""

import argparse
import os
import signal
import sys

from weft_mesh.registry import SeveralMeshesError, the_mesh


def run(options: argparse.Namespace) -> int:
    """Signal the mesh; 0 done, 1 there is none, or more than one and no address."""
    try:
        mesh = the_mesh(options.router, lambda mesh: mesh.router)
    except SeveralMeshesError as error:
        print(f"weft restart: {error}", file=sys.stderr)
        return 1
    if mesh is None:
        where = f" at {options.router}" if options.router else ""
        print(f"weft restart: no `weft up` of this user runs{where}", file=sys.stderr)
        return 1
    os.kill(mesh.pid, signal.SIGUSR1)
    print(f"The mesh at {mesh.router} replaces its services one after another; its log tells.")
    return 0
