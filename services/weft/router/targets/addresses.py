"""The addresses behind the name of a target, as DNS says."""

import asyncio
import socket


async def resolve(host_and_port: str) -> list[str]:
    """Every address of ``host:port``, sorted, as ``ip:port``.

    Raises:
        OSError: The name cannot be resolved now.
    """
    host, _, port = host_and_port.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label of more than 63 characters
        raise OSError(f"'{host}' is no name: {error}") from None
    return sorted({_text(family, place[0], port) for family, _, _, _, place in found})


def _text(family: int, host: str | int, port: str) -> str:
    return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
