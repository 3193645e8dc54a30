"""``python lying_service.py weft.services.model --host HOST --grpc-port PORT ...``: `work` answers a wrong shape."""

import argparse
import sys

import numpy as np

from weft.base.core import CallContext, IndexEntry, InferCall, InferenceCore, InferResult
from weft.base.signature import ModelSignature
from weft.base.statistics import ModelStatistics
from weft.base.tensors import encode
from weft.v2.server import server
from weft_protos.model_config_pb2 import TYPE_FP32, ModelConfig, ModelInput, ModelOutput


class LyingCore(InferenceCore):
    """Says that `work` gives one number a row, and gives two."""

    async def start(self) -> None:
        """Nothing to load."""

    async def close(self, *, grace_s: float) -> None:
        """Nothing to release."""

    def is_ready(self) -> bool:
        return True

    def is_model_ready(self, name: str, version: str) -> bool:
        return True

    def signature(self, name: str, version: str) -> ModelSignature:
        return ModelSignature.from_config(self.config(name, version), "1")

    def config(self, name: str, version: str) -> ModelConfig:
        source = ModelInput(name="A", data_type=TYPE_FP32, dims=[1])
        sink = ModelOutput(name="B", data_type=TYPE_FP32, dims=[1])
        return ModelConfig(name="work", backend="python", max_batch_size=8, input=[source], output=[sink])

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        return [IndexEntry("work", "1", "READY", "")]

    def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        return []

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        lie = encode(np.zeros((1, 2), np.float32))
        return InferResult("work", "1", call.request_id, {}, {"B": lie})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("--repository")
    server.add_arguments(parser, grpc_port=0, metrics_port=0)
    sys.exit(server.run("model", LyingCore, parser.parse_args()))
