"""Weft: a mesh of gRPC services that serves machine-learning models over a typed graph.

The names of ``__all__`` are public. Each is imported when it is first used, so ``import weft`` itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.base.core import InferCall, InferResult
    from weft.base.errors import WeftError
    from weft.mesh.running import running_mesh
    from weft.v2.client.v2_client import V2Client

__version__ = "0.1.0"

__all__ = ["InferCall", "InferResult", "V2Client", "WeftError", "__version__", "running_mesh"]

#: Public name -> the module that defines it.
_MODULES = {
    "InferCall": "weft.base.core",
    "InferResult": "weft.base.core",
    "V2Client": "weft.v2.client.v2_client",
    "WeftError": "weft.base.errors",
    "running_mesh": "weft.mesh.running",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
