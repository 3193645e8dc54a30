"""What both ends of a Unix socket between services know."""

import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # process, user, group


def tensors_path(path: str) -> str:
    """Path of the socket over which the memory for tensors is passed, beside that of a service."""
    return f"{path}.tensors"


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to the user of this one."""
    if not hasattr(socket, "SO_PEERCRED"):
        return False
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.getuid())
