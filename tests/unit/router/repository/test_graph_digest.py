"""The digest in a graph's configuration: what counts of the models that it calls."""

from weft.base.signature import GRAPH_DIGEST_PARAMETER, VERSION_DIGEST_PARAMETER, ModelSignature, TensorSpec
from weft.router.repository.config import config_of_signature, with_models
from weft_protos.model_config_pb2 import ModelConfig

GRAPH = ModelConfig(name="graph")
GRAPH.parameters[GRAPH_DIGEST_PARAMETER].string_value = "of its files"


def _model(name: str, digest: str = "of its files", num_instances: int = 1) -> tuple[ModelSignature, ModelConfig]:
    spec = TensorSpec("X", "FP32", (2,))
    signature = ModelSignature(name, "1", "onnx", 8, (spec,), (spec,))
    config = config_of_signature(signature)
    config.instance_group.add(count=num_instances)
    config.dynamic_batching.max_queue_delay_microseconds = num_instances
    config.parameters[VERSION_DIGEST_PARAMETER].string_value = digest
    return signature, config


def _digest(*models: tuple[ModelSignature, ModelConfig | None], graph: ModelConfig = GRAPH) -> str:
    return str(with_models(graph, models).parameters[GRAPH_DIGEST_PARAMETER].string_value)


def test_the_models_count_as_far_as_answers_depend_on_them() -> None:
    """Order, calls of the same model again, instances and batching do not."""
    first = _digest(_model("a"), _model("b"))
    assert first == _digest(_model("b"), _model("a"), _model("b"))
    assert first == _digest(_model("a", num_instances=4), _model("b"))
    assert "of its files" == GRAPH.parameters[GRAPH_DIGEST_PARAMETER].string_value


def test_other_files_signatures_and_graphs_are_other_digests() -> None:
    """Each of them alone."""
    edited = ModelConfig(name="graph")
    edited.parameters[GRAPH_DIGEST_PARAMETER].string_value = "of others"
    signature, _ = _model("a")
    digests = [
        _digest(_model("a")),
        _digest(_model("a", "of other files")),
        _digest(_model("b")),
        _digest((signature, None)),
        _digest(_model("a"), _model("b")),
        _digest(_model("a"), graph=edited),
        _digest(),
    ]
    assert len(set(digests)) == len(digests)
