"""``weft lock``: writes the signatures of all targets' models to a file that graphs are checked against."""

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from google.protobuf.json_format import MessageToDict

from weft.base.errors import UnavailableError, UnsupportedError
from weft.base.security.arguments import add_channel_arguments
from weft.base.text.argument_types import add
from weft.base.text.pbtxt import PbtxtError, render
from weft.base.text.suggestion import printable
from weft.cli.arguments import ROUTER_PORT, add_json_argument, pair
from weft.jobs.atomic_files import replace_file
from weft.router.repository.config import signatures_of
from weft.router.targets.catalog import TargetCatalog
from weft.router.targets.grpc_target import GrpcTarget
from weft.tools.lock import drift, lock_text, read_lock
from weft.v2.client.v2_client import V2Client
from weft.v2.security.channel import ChannelSecurity, channel_security
from weft_protos import graph_service_pb2 as pb

_TIMEOUT_S = 10.0


async def signatures_of_router(address: str, security: ChannelSecurity | None) -> pb.TargetSignaturesResponse:
    """Signatures of the models of a router's targets.

    Raises:
        UnsupportedError: The server at the address is not a Weft router.
        RemoteError: It does not answer, or refuses.
    """
    async with V2Client(address, security=security) as router:
        try:
            response: pb.TargetSignaturesResponse = await router.graph_service(
                "TargetSignatures", pb.TargetSignaturesRequest(), timeout_s=_TIMEOUT_S
            )
        except UnsupportedError as error:
            text = f"'{address}' is no router of Weft; give each service with --target NAME=ADDRESS"
            raise UnsupportedError(text) from error
        return response


async def signatures_of_targets(
    targets: Iterable[tuple[str, str]], security: ChannelSecurity | None
) -> pb.TargetSignaturesResponse:
    """Signatures of the models of these targets, each given by name and address."""
    catalog = TargetCatalog([GrpcTarget(name, address, security=security) for name, address in targets])
    try:
        await catalog.start()
        return signatures_of(catalog)
    finally:
        await catalog.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft lock``."""
    parser.description = "Write what the models of all targets take and give to a file, or compare them with one."
    parser.epilog = "example: weft lock --url 127.0.0.1:8001 -o signatures.lock"
    source = partial(add, parser.add_mutually_exclusive_group())
    source(
        "--url ADDRESS",
        f"whose targets are asked; default: 127.0.0.1:{ROUTER_PORT}",
        default=f"127.0.0.1:{ROUTER_PORT}",
    )
    source(
        "--target NAME=ADDRESS ...", "ask this service, in place of a router; may be repeated, as for the router", pair
    )
    action = partial(add, parser.add_mutually_exclusive_group())
    action("-o --output FILE", "default: standard output", Path)
    action("--check FILE", "print how the models differ from this file", Path)
    add_json_argument(parser)
    add_channel_arguments(parser.add_argument_group("security"))


def run(options: argparse.Namespace) -> int:
    """Write the signatures, or compare them with a file: 0 written or equal, 1 different or not available."""
    try:
        locked = read_lock(options.check) if options.check is not None else None
        found = asyncio.run(_signatures(options))
        if locked is not None:
            return _compare(options.check, locked, found, as_json=options.json)
        _write(options, found)
    except PbtxtError as error:
        print(render(error.diagnostics), file=sys.stderr)
        return 1
    return 0


async def _signatures(options: argparse.Namespace) -> pb.TargetSignaturesResponse:
    """Signatures of all ready models of all targets; lists the others on standard error.

    Raises:
        WeftError: The router or a target does not answer, or no model is ready.
    """
    security = channel_security(options)
    found = await (
        signatures_of_targets(options.target, security)
        if options.target
        else signatures_of_router(options.url, security)
    )
    if found.unreachable_target:
        raise UnavailableError(f"no answer from {', '.join(found.unreachable_target)}; nothing was locked or compared")
    if not found.model:
        raise UnavailableError("no model is ready on any target; nothing was locked or compared")
    for model in found.not_ready:
        print(printable(f"weft lock: left out, because it is not ready: {model}"), file=sys.stderr)
    return found


def _compare(path: Path, locked: list[pb.ModelSignature], found: pb.TargetSignaturesResponse, *, as_json: bool) -> int:
    lines = drift(locked, found.model)
    if as_json:
        print(json.dumps({"file": str(path), "differences": lines}))
        return 1 if lines else 0
    for line in lines:
        print(printable(line))
    print(f"{path}: {len(lines) or 'no'} difference{'' if len(lines) == 1 else 's'}", file=sys.stderr)
    return 1 if lines else 0


def _write(options: argparse.Namespace, found: pb.TargetSignaturesResponse) -> None:
    """Write the signatures; on failure the file stays unchanged."""
    given = [f"--target {shlex.quote(f'{name}={address}')}" for name, address in options.target]
    source = " ".join(given) or f"--url {shlex.quote(options.url)}"
    if options.json:
        print(json.dumps({"models": [MessageToDict(model, preserving_proto_field_name=True) for model in found.model]}))
        if options.output is None:
            return
    text = lock_text(found.model, shlex.quote(str(options.output or "FILE")), source)
    if options.output is None:
        print(text, end="")
        return
    replace_file(options.output, text.encode())
    print(f"{options.output}: {len(found.model)} models", file=sys.stderr)
