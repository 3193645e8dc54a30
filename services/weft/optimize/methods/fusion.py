"""``fusion``: replaces the operators of transformer blocks by ONNX Runtime's fused ones."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from onnxruntime.transformers.fusion_options import AttentionMaskFormat, FusionOptions
from onnxruntime.transformers.optimizer import optimize_by_fusion

from weft.base.errors import UnsupportedError
from weft.optimize.methods.method import Inputs, SourceModel
from weft.optimize.methods.onnx_model import keep_layer_norms, onnx_method

_BLOCK = frozenset({"MatMul", "Softmax"})
_FUSED_ANYWAY = frozenset({"BiasGelu", "FastGelu", "Gelu", "LayerNormalization", "SkipLayerNormalization", "Sum"})


def _why_not(model: Any, source: SourceModel) -> str:
    if not {node.op_type for node in model.graph.node} >= _BLOCK:
        return "it is no transformer; what else fuses, ONNX Runtime fuses as it loads the file"
    return ""


def _rewrite(model: Any, source: SourceModel, calibration: Sequence[Inputs]) -> tuple[Any, str]:
    before = Counter(node.op_type for node in model.graph.node)
    signature = [_described(model.graph.input), _described(model.graph.output)]
    options, has_gpu = FusionOptions("bert"), source.has_gpu_instances()
    model.producer_name = "pytorch"  # it warns of any other
    options.attention_mask_format = AttentionMaskFormat.AttentionMask
    options.enable_skip_layer_norm = options.enable_bias_skip_layer_norm = has_gpu
    options.enable_embed_layer_norm = has_gpu  # it makes the mask an INT32 input of its own form
    # 0 heads, 0 wide: the optimizer reads both from the graph.
    fused = optimize_by_fusion(model, "bert", num_heads=0, hidden_size=0, optimization_options=options).model
    if not has_gpu:
        keep_layer_norms(fused)
    after = Counter(node.op_type for node in fused.graph.node)
    new = Counter({kind: count for kind, count in (after - before).items() if kind not in _FUSED_ANYWAY})
    if not new:
        raise UnsupportedError(
            "no attention is as ONNX Runtime's optimizer for transformers knows it; what else fuses, ONNX Runtime "
            "fuses as it loads the file"
        )
    if [_described(fused.graph.input), _described(fused.graph.output)] != signature:
        raise UnsupportedError("ONNX Runtime's optimizer for transformers changes the model's inputs or outputs")
    parts = ", ".join(f"{count} {kind}" for kind, count in sorted(new.items()))
    return fused, f"{before.total()} operators fused to {after.total()}: {parts}"


def _described(values: Any) -> list[bytes]:
    return [value.SerializeToString(deterministic=True) for value in values]


#: ONNX Runtime's optimizer for BERT, which knows the patterns that torch's exporter writes for the models of Hugging
#: Face. Names, shapes and dynamic dimensions of inputs and outputs stay. On CPUs a layer norm stays apart from the
#: residual before it, see ``keep_layer_norms``.
FUSION = onnx_method("fusion", _why_not, _rewrite)
