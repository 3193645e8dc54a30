"""A real router process over a real V2 server whose models answer with their own names."""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
from tests.processes import WAIT_S, Running, running
from tests.unit.mesh.serving import serving

from weft.base.core import CallContext, IndexEntry, InferCall, InferenceCore, InferResult
from weft.base.signature import VERSION_DIGEST_PARAMETER, ModelSignature, TensorSpec
from weft.base.statistics import ModelStatistics
from weft.base.tensors import bytes_tensor, encode_bytes, split_bytes
from weft.router.repository.config import config_of_signature
from weft_protos import graph_service_pb2 as graph_pb
from weft_protos import grpc_service_pb2 as pb
from weft_protos.graph_service_pb2_grpc import GraphServiceStub
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from weft_protos.model_config_pb2 import ModelConfig

MODELS = ("alpha", "beta", "gamma", "delta")


class NamingCore(InferenceCore):
    """Each model takes X and gives NAME: its own name behind what X says.

    Attributes:
        models: Names.
        dims: Of X, by model; [1] where nothing else is said.
        digests: Of the files, by model; none where nothing else is said.
        held: Name of a model whose answers wait until ``is_released``; once one does, ``is_holding``.
    """

    def __init__(self) -> None:
        self.models = MODELS
        self.dims: dict[str, int] = {}
        self.digests: dict[str, str] = {}
        self.held = ""
        self.is_holding = threading.Event()
        self.is_released = threading.Event()

    def is_ready(self) -> bool:
        return True

    def is_model_ready(self, name: str, version: str) -> bool:
        return True

    def signature(self, name: str, version: str) -> ModelSignature:
        text = TensorSpec("X", "BYTES", (self.dims.get(name, 1),))
        return ModelSignature(name, "1", "naming", 0, (text,), (TensorSpec("NAME", "BYTES", (1,)),))

    def config(self, name: str, version: str) -> ModelConfig:
        config = config_of_signature(self.signature(name, version))
        config.parameters[VERSION_DIGEST_PARAMETER].string_value = self.digests.get(name, "")
        return config

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        return [IndexEntry(name, "1", "READY", "") for name in self.models]

    def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        return []

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        (said,) = split_bytes(call.inputs["X"].data)
        await asyncio.sleep(0.001)
        if call.model_name == self.held:
            self.is_holding.set()
            await asyncio.to_thread(self.is_released.wait, 30)
        answer = b"%s,%s" % (said, call.model_name.encode())
        return InferResult(call.model_name, "1", call.request_id, {}, {"NAME": bytes_tensor([answer], (1,))})


def naming_service(core: InferenceCore | None = None) -> AbstractContextManager[str]:
    """Address of a V2 server with the naming models, or others, on a thread of its own."""
    return serving(core if core is not None else NamingCore())


def graph(name: str, root: str, *, tensors: str = "X NAME", more: str = "") -> str:
    """The text of a graph from a text to a text; where ``root`` is a name it is one step, of that model."""
    source, sink = tensors.split()
    node = f'node {{ name: "root" {root} }}'
    if root.isidentifier():
        node = f'node {{ name: "root" sequence {{ step {{ name: "{root}" model_name: "{root}" }} }} }}'
    return f"""name: "{name}" platform: "graph" {more}
input [ {{ name: "{source}" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "{sink}" data_type: TYPE_STRING dims: [ 1 ] }} ]
{node}
"""


def command_of(repository: Path, target: str) -> tuple[str, ...]:
    """Module and arguments of a router over one target."""
    return ("weft.services.router", "--repository", str(repository), "--target", f"model={target}")


def running_router(repository: Path, target: str, arguments: Sequence[str] = ()) -> AbstractContextManager[Running]:
    """A router over one target; it has ended by itself when the block is left."""
    return running(*command_of(repository, target), *arguments)


class Client:
    """A client of a router, or of one of its workers: requests by their paths, loads, and rewards of bandits."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.v2 = GRPCInferenceServiceStub(channel)
        self.graphs = GraphServiceStub(channel)

    def ask(self, name: str = "named", request_id: str = "") -> str:
        """The path of a request, or the status of its failure."""
        try:
            _, call = self.v2.ModelInfer.with_call(message(name, request_id), timeout=WAIT_S)
        except grpc.RpcError as error:
            return str(error.code().name)
        return str(dict(call.trailing_metadata())["x-graph-path"])

    def load(self, name: str = "named", *, rollback: bool = False) -> None:
        """The graph or model serves, as its file says or as before the last load."""
        request = pb.RepositoryModelLoadRequest(model_name=name)
        if rollback:
            request.parameters["rollback"].bool_param = True
        self.v2.RepositoryModelLoad(request, timeout=WAIT_S)

    def unload(self, name: str = "named") -> None:
        """It does not serve any more."""
        self.v2.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name=name), timeout=WAIT_S)

    def is_ready(self, name: str) -> bool:
        return bool(self.v2.ModelReady(pb.ModelReadyRequest(name=name), timeout=WAIT_S).ready)

    def reward(self, reward: float, **request: Any) -> str:
        """Status of the feedback to `ranked`."""
        feedback = graph_pb.GraphFeedbackRequest(graph="ranked", reward=reward, **request)
        try:
            self.graphs.GraphFeedback(feedback, timeout=WAIT_S)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"


def message(graph: str, request_id: str = "", text: bytes = b"x") -> pb.ModelInferRequest:
    """A request that says ``text``."""
    request = pb.ModelInferRequest(model_name=graph, id=request_id)
    request.inputs.add(name="X", datatype="BYTES", shape=(1,))
    request.raw_input_contents.append(encode_bytes([text]))
    return request


def write(root: Path, text: str, name: str, version: int = 1) -> None:
    """The graph's file, replaced as a whole."""
    path = root / name / str(version) / "graph.pbtxt"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.replace(path)
