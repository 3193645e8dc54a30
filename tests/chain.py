"""A small repository of three Python models on three services, and a graph over them."""

from pathlib import Path

from tests.repositories import NUMBER_BATCHES, write_graph, write_model

MODEL = '''
"""Adds 1, after a pause of 10 ms; hangs if there is a FIFO `hang` beside this file."""
import json
import pathlib
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        batches = pb_utils.MetricFamily("chain_batches", "Batches of the chain", pb_utils.MetricFamily.COUNTER)
        self.batches = batches.Metric(labels={"model": args["model_name"]})
        self.source, self.sink = config["input"][0]["name"], config["output"][0]["name"]

    def execute(self, requests):
        time.sleep(0.01)
        self.batches.increment(1)
        hang = pathlib.Path(__file__).with_name("hang")
        if hang.exists():
            hang.open("w").close()  # a FIFO: goes on when the test has opened it too
            time.sleep(3600)
        arrays = [pb_utils.get_input_tensor_by_name(request, self.source).as_numpy() for request in requests]
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(self.sink, a + 1)]) for a in arrays]
'''
GRAPH = """
name: "chain"
platform: "graph"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
node { name: "root" sequence {
  step { name: "pre" model_name: "prepare" }
  step { name: "run" model_name: "work" }
  step { name: "post" model_name: "finish" }
} }
"""


def config_of(source: str, sink: str) -> str:
    """The configuration of a model of the chain, by its input and its output."""
    return NUMBER_BATCHES.replace('"X"', f'"{source}"').replace('"Y"', f'"{sink}"')


def write_repository(root: Path, graph: str = GRAPH) -> Path:
    """A repository with the graph `chain`: prepare (preprocess), work (model), finish (postprocess), each adds 1."""
    for service, name, source, sink in (
        ("preprocess", "prepare", "X", "A"),
        ("model", "work", "A", "B"),
        ("postprocess", "finish", "B", "Y"),
    ):
        write_model(root / service, name, MODEL, config_of(source, sink))
    write_graph(root / "graphs", "chain", graph)
    return root
