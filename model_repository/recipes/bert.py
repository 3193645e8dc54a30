"""A BERT encoder as an ONNX file, written from its weights.

The layers are those of Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2018
(https://arxiv.org/abs/1810.04805): post-layer-norm attention and feed-forward blocks, GELU in its exact (erf) form.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from recipes.onnx_file import save_graph, tensor

INPUT_NAMES = ("input_ids", "attention_mask", "token_type_ids")
_PADDING_SCORE = -1e4  # added to the scores of padding; exp(-1e4) is 0, and the number fits into FP16


class BertGraph:
    """Nodes and constants of the encoder, in the order of execution.

    Args:
        weights: By the names of Hugging Face's ``BertModel``; FP32.
        config: ``num_hidden_layers``, ``num_attention_heads``, ``hidden_size``, ``layer_norm_eps``.
    """

    def __init__(self, weights: Mapping[str, NDArray[Any]], config: Mapping[str, Any]) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, NDArray[Any]] = {}
        self._weights = weights
        self._num_heads = int(config["num_attention_heads"])
        self._hidden_size = int(config["hidden_size"])
        self._epsilon = float(config["layer_norm_eps"])
        self._mask = self._padding_scores()
        hidden = self._embed()
        for i in range(int(config["num_hidden_layers"])):
            hidden = self._layer(f"encoder.layer.{i}", hidden)
        self.nodes.append(helper.make_node("Identity", [hidden], ["last_hidden_state"]))

    def _op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        output = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def _constant(self, name: str, value: Any) -> str:
        self.constants.setdefault(name, np.asarray(value))
        return name

    def _weight(self, name: str) -> str:
        return self._constant(name, self._weights[name])

    def _linear(self, name: str, x: str) -> str:
        """``x @ W^T + b``; the constant is stored as W^T, which is what MatMul takes."""
        weight = self._constant(f"{name}.weight", self._weights[f"{name}.weight"].T)
        return self._op("Add", self._op("MatMul", x, weight), self._weight(f"{name}.bias"))

    def _layer_norm(self, name: str, x: str) -> str:
        weight, bias = self._weight(f"{name}.weight"), self._weight(f"{name}.bias")
        return self._op("LayerNormalization", x, weight, bias, axis=-1, epsilon=self._epsilon)

    def _padding_scores(self) -> str:
        """0 for a token, ``_PADDING_SCORE`` for padding; shape ``[batch, 1, 1, sequence]``."""
        one = self._constant("one", np.float32(1))
        is_padding = self._op("Sub", one, self._op("Cast", "attention_mask", to=TensorProto.FLOAT))
        scores = self._op("Mul", is_padding, self._constant("padding_score", np.float32(_PADDING_SCORE)))
        return self._op("Unsqueeze", scores, self._constant("head_and_query_axes", np.array([1, 2])))

    def _embed(self) -> str:
        """Sum of word, token type and position embeddings; shape ``[batch, sequence, hidden]``."""
        words = self._op("Gather", self._weight("embeddings.word_embeddings.weight"), "input_ids")
        types = self._op("Gather", self._weight("embeddings.token_type_embeddings.weight"), "token_type_ids")
        length = self._op("Shape", "input_ids", start=1, end=2)
        table = self._weight("embeddings.position_embeddings.weight")
        positions = self._op("Slice", table, self._constant("first", np.array([0])), length)
        return self._layer_norm("embeddings.LayerNorm", self._op("Add", self._op("Add", words, types), positions))

    def _layer(self, name: str, x: str) -> str:
        context = self._attention(f"{name}.attention.self", x)
        attended = self._op("Add", self._linear(f"{name}.attention.output.dense", context), x)
        x = self._layer_norm(f"{name}.attention.output.LayerNorm", attended)
        inner = self._op("Gelu", self._linear(f"{name}.intermediate.dense", x))
        return self._layer_norm(
            f"{name}.output.LayerNorm", self._op("Add", self._linear(f"{name}.output.dense", inner), x)
        )

    def _attention(self, name: str, x: str) -> str:
        """``softmax(Q K^T / sqrt(d) + mask) V`` for each head; shape ``[batch, sequence, hidden]``."""
        head_size = self._hidden_size // self._num_heads
        split = self._constant("split_heads", np.array([0, 0, self._num_heads, head_size]))
        query, key, value = (
            self._op("Transpose", self._op("Reshape", self._linear(f"{name}.{part}", x), split), perm=order)
            for part, order in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3]))
        )
        scale = self._constant("score_scale", np.float32(head_size**-0.5))
        scores = self._op("Add", self._op("Mul", self._op("MatMul", query, key), scale), self._mask)
        context = self._op("MatMul", self._op("Softmax", scores, axis=-1), value)
        merge = self._constant("merge_heads", np.array([0, 0, self._hidden_size]))
        return self._op("Reshape", self._op("Transpose", context, perm=[0, 2, 1, 3]), merge)


def save_bert(path: Path, weights: Mapping[str, NDArray[Any]], config: Mapping[str, Any]) -> None:
    """``path`` holds the encoder: three INT64 inputs ``[batch, sequence]``, FP32 ``last_hidden_state``."""
    graph = BertGraph(weights, config)
    save_graph(
        path,
        graph.nodes,
        inputs=[tensor(name, TensorProto.INT64, "batch", "sequence") for name in INPUT_NAMES],
        outputs=[tensor("last_hidden_state", TensorProto.FLOAT, "batch", "sequence", int(config["hidden_size"]))],
        weights=graph.constants,
    )
