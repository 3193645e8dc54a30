"""Weft: a mesh of gRPC services that serves machine-learning models over a typed graph.

The names of ``__all__`` are public. Each is imported when it is first used, so ``import weft`` itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.base import errors
    from weft.base.core import InferCall, InferResult
    from weft.base.errors import WeftError
    from weft.mesh.running import running_mesh
    from weft.v2.client.aio import AsyncClient, CallOptions, ConnectOptions
    from weft.v2.client.answer import Answer
    from weft.v2.client.connect import Client, connect, connect_async
    from weft.v2.client.v2_client import V2Client

__version__ = "0.1.0"

__all__ = [
    "Answer", "AsyncClient", "CallOptions", "Client", "ConnectOptions", "InferCall", "InferResult", "V2Client",
    "WeftError", "__version__", "connect", "connect_async", "errors", "running_mesh",
]  # fmt: skip

#: The modules that define the public names; one that is a public name itself is found in its package.
_MODULES = {
    "weft.base": ("errors",),
    "weft.base.core": ("InferCall", "InferResult"),
    "weft.base.errors": ("WeftError",),
    "weft.mesh.running": ("running_mesh",),
    "weft.v2.client.aio": ("AsyncClient", "CallOptions", "ConnectOptions"),
    "weft.v2.client.answer": ("Answer",),
    "weft.v2.client.connect": ("Client", "connect", "connect_async"),
    "weft.v2.client.v2_client": ("V2Client",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = vars(import_module(module)).get(name) or import_module(f"{module}.{name}")
            globals()[name] = value
            return value
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
