"""``weft explain`` of what serves, in a process of its own, as it may take long."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from google.protobuf import text_format

from weft.gateway.errors import RequestError
from weft_protos import graph_service_pb2 as pb

_TIMEOUT_S = 30.0
_one_at_once = asyncio.Semaphore(1)


async def explained(
    source: pb.GraphSourceResponse, signatures: pb.TargetSignaturesResponse, body: dict[str, Any]
) -> str:
    """The text for a request that is not sent. Raises RequestError, with what ``weft explain`` says of it."""
    async with _one_at_once:
        with TemporaryDirectory(prefix="weft-explain-") as folder:
            return await _explained(Path(folder), source, signatures, body)


async def _explained(
    folder: Path, source: pb.GraphSourceResponse, signatures: pb.TargetSignaturesResponse, body: dict[str, Any]
) -> str:
    lock = folder / "weft.lock"
    lock.write_text(text_format.MessageToString(pb.SignatureLock(model=signatures.model)), encoding="utf-8")
    for one in source.graph:
        home, name = folder / "graphs" / one.graph, Path(one.file).name
        path = home / name if name == "config.pbtxt" else home / str(one.version) / name
        path.parent.mkdir(parents=True)
        path.write_bytes(one.text)
    arguments = [f"{source.graph[0].graph}/{source.graph[0].version}", f"--repository={folder}", f"--lock={lock}"]
    for number, (name, value) in enumerate(dict(body.get("inputs") or {}).items()):
        (folder / f"{number}.json").write_text(json.dumps(value), encoding="utf-8")
        arguments.append(f"--input={name}=@{folder / f'{number}.json'}")
    for option, field in (("param", "parameters"), ("header", "headers")):
        for name, value in dict(body.get(field) or {}).items():
            arguments.append(f"--{option}={name}={value if isinstance(value, str) else json.dumps(value)}")
    for name in ("priority", "remaining_ms"):
        if body.get(name) is not None:
            arguments.append(f"--{name.replace('_', '-')}={body[name]}")
    command = (sys.executable, "-P", "-m", "weft.cli", "explain", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            text, told = await process.communicate()
    except TimeoutError:
        raise RequestError(f"the request has too many ways to be followed within {_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RequestError(told.decode(errors="replace").strip())
    return text.decode()
