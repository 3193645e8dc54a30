"""``simple`` (sum and difference) and ``identity``: models that cost next to nothing, to see what serving costs."""

from pathlib import Path

from onnx import TensorProto, helper

from recipes.catalog import IDENTITY_MODEL, SIMPLE_MODEL
from recipes.onnx_file import save_graph, tensor
from recipes.recipe import Figures


def build(repository: Path, stage: Path) -> Figures:
    """Both files are written.

    ``simple``: ``OUTPUT0 = INPUT0 + INPUT1`` and ``OUTPUT1 = INPUT0 - INPUT1``, INT32 ``[batch, 16]``.
    ``identity``: ``OUTPUT0 = INPUT0``, FP32 ``[batch, 16]``.
    """
    inputs, outputs = ("INPUT0", "INPUT1"), ("OUTPUT0", "OUTPUT1")
    save_graph(
        stage / SIMPLE_MODEL,
        [helper.make_node("Add", inputs, outputs[:1]), helper.make_node("Sub", inputs, outputs[1:])],
        inputs=[tensor(name, TensorProto.INT32, "batch", 16) for name in inputs],
        outputs=[tensor(name, TensorProto.INT32, "batch", 16) for name in outputs],
    )
    save_graph(
        stage / IDENTITY_MODEL,
        [helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])],
        inputs=[tensor("INPUT0", TensorProto.FLOAT, "batch", 16)],
        outputs=[tensor("OUTPUT0", TensorProto.FLOAT, "batch", 16)],
    )
    return {}
