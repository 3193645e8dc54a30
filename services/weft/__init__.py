"""Weft: a mesh of gRPC services that serves machine-learning models over a typed graph.

The names of ``__all__`` are public. Each is imported when it is first used, so ``import weft`` itself costs nothing.

PYTEST_DONT_REWRITE: it has a plugin of pytest, which need not look for assertions in it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Annotated as Tensor

    from weft.authoring.expressions import cel, has, header, parameter, request, where
    from weft.authoring.fakes import fake
    from weft.authoring.graph import Graph, graph
    from weft.authoring.model import Batching, model
    from weft.authoring.models import models
    from weft.authoring.nodes import (
        answer_after,
        cascade,
        collect,
        construct,
        each,
        ensemble,
        loop,
        node,
        split,
        switch,
        weigh,
    )
    from weft.authoring.serving import serve
    from weft.authoring.steps import step
    from weft.authoring.tensors import (
        BF16,
        BOOL,
        FP16,
        FP32,
        FP64,
        INT8,
        INT16,
        INT32,
        INT64,
        STRING,
        UINT8,
        UINT16,
        UINT32,
        UINT64,
        Outputs,
    )
    from weft.authoring.writing import read, write
    from weft.base import errors
    from weft.base.core import InferCall, InferResult
    from weft.base.errors import WeftError
    from weft.language.syntax.file import GraphError
    from weft.mesh.running import running_mesh
    from weft.v2.client.aio import AsyncClient, CallOptions, ConnectOptions
    from weft.v2.client.answer import Answer
    from weft.v2.client.connect import Client, connect, connect_async
    from weft.v2.client.v2_client import V2Client

__version__ = "0.1.0"

#: Module -> the public names that it defines, or has as a module.
_NAMES = {
    "authoring.expressions": "cel has header parameter request where",
    "authoring.fakes": "fake",
    "authoring.graph": "Graph graph",
    "authoring.model": "Batching model",
    "authoring.models": "models",
    "authoring.nodes": "answer_after cascade collect construct each ensemble loop node split switch weigh",
    "authoring.serving": "serve",
    "authoring.steps": "step",
    "authoring.tensors": "BF16 BOOL FP16 FP32 FP64 INT8 INT16 INT32 INT64 STRING UINT8 UINT16 UINT32 UINT64 Outputs "
    "Tensor",
    "base": "errors",
    "authoring.writing": "read write",
    "base.core": "InferCall InferResult",
    "base.errors": "WeftError",
    "language.syntax.file": "GraphError",
    "mesh.running": "running_mesh",
    "v2.client.aio": "AsyncClient CallOptions ConnectOptions",
    "v2.client.answer": "Answer",
    "v2.client.connect": "Client connect connect_async",
    "v2.client.v2_client": "V2Client",
}
_MODULES = {name: f"weft.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "BF16", "BOOL", "FP16", "FP32", "FP64", "INT8", "INT16", "INT32", "INT64", "STRING", "UINT8", "UINT16", "UINT32",
    "UINT64", "Answer", "AsyncClient", "Batching", "CallOptions", "Client", "ConnectOptions", "Graph", "GraphError",
    "InferCall", "InferResult", "Outputs", "Tensor", "V2Client", "WeftError", "__version__", "answer_after", "cascade",
    "cel", "collect", "connect", "connect_async", "construct", "each", "ensemble", "errors", "fake", "graph", "has",
    "header", "loop", "model", "models", "node", "parameter", "read", "request", "running_mesh", "serve", "split",
    "step", "switch", "weigh", "where", "write",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    module = import_module(_MODULES[name])
    value = globals()[name] = vars(module)[name] if name in vars(module) else import_module(f"{module.__name__}.{name}")
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
