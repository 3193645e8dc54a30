"""``weft restart``: makes a running ``weft up`` replace its services."""

import argparse
import json
import os
import signal
import sys
import time

from weft.base.text.argument_types import add
from weft.base.text.suggestion import printable
from weft.cli.arguments import add_json_argument
from weft.mesh.registry import Rolls, RunningMesh, SeveralMeshesError, the_mesh
from weft.mesh.supervised import Roll

_POLL_S = 0.1
#: A restart that has not begun by then will not, in seconds.
_BEGIN_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft restart``."""
    parser.description = (
        "Tell a running weft up of this user to replace every service by a new process, one after another."
    )
    parser.epilog = "example: weft restart --wait"
    add(parser, "--url ADDRESS", "whose router listens there, HOST:PORT; default: the only one that runs")
    add(parser, "--wait", "until it is over; tell how each service was replaced, and fail if one was not")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Signal the mesh; 0 done, 1 there is none, or several and no address, or with ``--wait`` a service stayed."""
    try:
        mesh = the_mesh(options.url, lambda mesh: mesh.router)
    except SeveralMeshesError as error:
        return _failed(str(error))
    if mesh is None:
        return _failed(f"no `weft up` of this user runs{f' at {options.url}' if options.url else ''}")
    before = mesh.rolls()
    os.kill(mesh.pid, signal.SIGUSR1)
    if options.wait:
        return _wait(mesh, before, is_json=options.json)
    if options.json:
        print(json.dumps({"router": mesh.router, "pid": mesh.pid}))
        return 0
    print(f"The mesh at {mesh.router} replaces its services one after another; its log tells.")
    return 0


def _failed(message: str) -> int:
    print(f"weft restart: {message}", file=sys.stderr)
    return 1


def _wait(mesh: RunningMesh, before: Rolls, *, is_json: bool) -> int:
    """Follow a restart to its end, one that was in progress already too."""
    number = before.number + before.is_over
    begin_by_s, num_shown = time.monotonic() + _BEGIN_S, 0
    while True:
        try:
            os.kill(mesh.pid, 0)
            now = mesh.rolls()
        except OSError:
            return _failed("`weft up` has ended meanwhile")
        if now.number >= number:
            for roll in [] if is_json else now.rolls[num_shown:]:
                print(_line(roll), flush=True)
            num_shown = len(now.rolls)
            if now.is_over:
                break
        elif time.monotonic() >= begin_by_s:
            return _failed(f"the restart has not begun after {_BEGIN_S:g} s; see the log of `weft up`")
        time.sleep(_POLL_S)
    if is_json:
        print(json.dumps({"router": mesh.router, "pid": mesh.pid, "services": [roll._asdict() for roll in now.rolls]}))
    return int(any(roll.error for roll in now.rolls))


def _line(roll: Roll) -> str:
    if roll.error:
        reason = printable(roll.error).replace("\n", "\n  ")
        return f"{roll.service:<12}pid {roll.old_pid} stays, {roll.duration_s:.1f} s: {reason}"
    how = f"pid {roll.old_pid} -> {roll.new_pid}, {roll.duration_s:.1f} s"
    return f"{roll.service:<12}{how}, lost {printable(roll.lost) or 'nothing'}"
