"""``weft stubs``: writes the types of models and graphs for type checkers and editors."""

import argparse
import asyncio
import sys
from functools import partial
from pathlib import Path

from weft.authoring.models import models
from weft.authoring.stubs import stubs_text
from weft.base.errors import NotFoundError, WeftError
from weft.base.security.arguments import add_channel_arguments
from weft.base.signature import ModelSignature
from weft.base.text.argument_types import add
from weft.base.text.suggestion import printable
from weft.jobs.atomic_files import replace_file
from weft.language.syntax.file import GraphError
from weft.v2.client.v2_client import V2Client
from weft.v2.security.channel import ChannelSecurity, channel_security

_TIMEOUT_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft stubs``."""
    option = partial(add, parser)
    parser.description = "Write the types of models and graphs, for mypy, pyright and editors."
    parser.epilog = "example: weft stubs model_repository -o models.pyi"
    option("repository DIR", "default: ./model_repository", Path, nargs="?")
    source = partial(add, parser.add_mutually_exclusive_group())
    source("--lock FILE", "take the signatures of models from this file of weft lock", Path)
    source("--url ADDRESS", "ask this router, or another server, in place of a repository")
    option("-o --output FILE (models.pyi)", "of Python, too: models.py can be imported by programs", Path)
    add_channel_arguments(parser.add_argument_group("security"))


def run(options: argparse.Namespace) -> int:
    """Write the file; 0 written, 1 written without models or graphs that have errors. Raises WeftError, OSError."""
    security = channel_security(options)
    if options.url:
        found, faults = asyncio.run(_ask(options.url, security))
    else:
        found, faults = _read(options.repository, options.lock)
    for fault in faults:
        print(printable(f"weft stubs: left out: {fault}"), file=sys.stderr)
    source = options.url or options.lock or options.repository or "model_repository"
    replace_file(options.output, stubs_text(found, str(source)).encode())
    print(f"{options.output}: {len(found)} models and graphs", file=sys.stderr)
    return 1 if faults else 0


def _read(repository: Path | None, lock: Path | None) -> tuple[list[ModelSignature], list[str]]:
    try:
        known = models(repository, lock)
    except GraphError as error:  # its place is a line of this file
        raise NotFoundError(error.diagnostics[0].message) from None
    found, faults = [], []
    for name in known.names():
        try:
            found.append(known.find(name)[1])
        except WeftError as error:
            faults.append(f"'{name}': {error.message}")
    return found, faults


async def _ask(address: str, security: ChannelSecurity | None) -> tuple[list[ModelSignature], list[str]]:
    async with V2Client(address, security=security) as client:
        index = await client.index(timeout_s=_TIMEOUT_S)
        ready = sorted({model.name for model in index if model.state == "READY"})
        faults = [f"'{model.name}': {model.reason}" for model in index if model.name not in ready]
        return [await client.signature(name, timeout_s=_TIMEOUT_S) for name in ready], faults
