"""BERT and RoBERTa: absolute positions, a norm behind each part of a layer. ModernBERT: rotary ones, gated products."""

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from weft.llm.encoders.folder import pad_token
from weft.llm.encoders.layers import Layer, Texts, Weights, activation, sizes
from weft.llm.models.fields import FULL, SLIDING, Fields, above_zero, choice, count, fault, flag, layer_types
from weft.llm.models.model import rope_tables
from weft.llm.models.rope import check_rotation, checked_rope


class Bert:
    """An encoder of the class ``BertModel``; ``num_labels`` of 0: it has no head for scores."""

    prefix: ClassVar[str] = "bert."
    ignored: ClassVar[tuple[str, ...]] = ("chunk_size_feed_forward",)
    has_types: ClassVar[bool] = True

    def __init__(self, fields: Fields, weights: Weights, num_labels: int) -> None:
        width, inner, self._num_heads, num_layers = sizes(fields)
        choice(fields, "position_embedding_type", ("absolute",), "absolute")
        if fields.get("is_decoder"):
            raise fault("is_decoder", "false", fields["is_decoder"])
        eps, self._act = above_zero(fields, "layer_norm_eps", 1e-12), activation(fields, "hidden_act")
        tables = {
            "word": count(fields, "vocab_size"),
            "position": count(fields, "max_position_embeddings"),
            "token_type": count(fields, "type_vocab_size", 2),
        }
        self._tables = [
            weights.tensor(f"embeddings.{name}_embeddings.weight", size, width) for name, size in tables.items()
        ]
        self._norm = weights.norm("embeddings.LayerNorm", width, eps)
        self._layers = []
        for index in range(num_layers):
            name = f"encoder.layer.{index}"
            qkv = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
            self._layers.append(
                (
                    weights.linear(qkv, width, width),
                    weights.linear(f"{name}.attention.output.dense", width, width),
                    weights.norm(f"{name}.attention.output.LayerNorm", width, eps),
                    weights.linear(f"{name}.intermediate.dense", inner, width),
                    weights.linear(f"{name}.output.dense", width, inner),
                    weights.norm(f"{name}.output.LayerNorm", width, eps),
                )
            )
        if num_labels:
            self._head = self.head(weights, width, num_labels)

    def head(self, weights: Weights, width: int, num_labels: int) -> tuple[Layer, Layer]:
        """The products that make scores of the first token, with tanh between them."""
        return weights.linear("pooler.dense", width, width), weights.linear("classifier", num_labels, width)

    def positions(self, texts: Texts) -> Tensor:
        """Row of each token in the table of positions."""
        return texts.positions

    def hidden(self, texts: Texts) -> Tensor:
        """Hidden states ``[T, width]`` of the last layer."""
        words, places, types = self._tables
        kinds = types[texts.type_ids] if self.has_types else types[0]
        x = self._norm(words[texts.token_ids] + places[self.positions(texts)] + kinds)
        for qkv, out, norm, up, down, last_norm in self._layers:
            x = norm(x + out(texts.attend(qkv(x).unflatten(1, (3, self._num_heads, -1)))))
            x = last_norm(x + down(self._act(up(x))))
        return x

    def scores(self, texts: Texts, hidden: Tensor) -> Tensor:
        """Scores ``[B, num_labels]``, before any activation."""
        first, last = self._head
        return last(torch.tanh(first(hidden[texts.starts])))


class Roberta(Bert):
    """An encoder of the class ``RobertaModel``: positions count from behind that of padding."""

    prefix = "roberta."
    has_types = False

    def __init__(self, fields: Fields, weights: Weights, num_labels: int) -> None:
        self._pad_id = pad_token(fields)
        super().__init__(fields, weights, num_labels)

    @override
    def head(self, weights: Weights, width: int, num_labels: int) -> tuple[Layer, Layer]:
        first = weights.linear("classifier.dense", width, width)
        return first, weights.linear("classifier.out_proj", num_labels, width)

    @override
    def positions(self, texts: Texts) -> Tensor:
        is_token = texts.token_ids != self._pad_id  # one in a text has no position, and those behind it count on
        num_before = is_token.cumsum(0)
        num_before = num_before - (num_before - is_token.long())[texts.starts][texts.owners]
        return num_before * is_token + self._pad_id


class ModernBert:
    """An encoder of the class ``ModernBertModel``; ``num_labels`` of 0: it has no head for scores."""

    prefix: ClassVar[str] = "model."
    ignored: ClassVar[tuple[str, ...]] = (
        "position_embedding_type",
        "decoder_bias",
        "sparse_prediction",
        "sparse_pred_ignore_index",
        "classifier_bias",
    )

    def __init__(self, fields: Fields, weights: Weights, num_labels: int) -> None:
        width, inner, self._num_heads, num_layers = sizes(fields)
        eps, act = above_zero(fields, "norm_eps", 1e-5), activation(fields, "hidden_activation")
        norm_bias, bias, mlp_bias = (flag(fields, name) for name in ("norm_bias", "attention_bias", "mlp_bias"))
        every = count(fields, "global_attn_every_n_layers", 3)
        types = layer_types(fields) or [SLIDING if index % every else FULL for index in range(num_layers)]
        self._window = count(fields, "local_attention", 128) // 2
        self._ropes = _ropes(fields, width // self._num_heads, weights.device)
        self._words = weights.tensor("embeddings.tok_embeddings.weight", count(fields, "vocab_size"), width)
        self._act, self._layers = act, []

        def norm(name: str) -> Layer:
            return weights.norm(name, width, eps, has_bias=norm_bias)

        self._first_norm, self._last_norm = norm("embeddings.norm"), norm("final_norm")
        for index, kind in enumerate(types):
            name = f"layers.{index}."
            self._layers.append(
                (
                    kind,
                    norm(name + "attn_norm") if index else lambda x: x,
                    weights.linear(name + "attn.Wqkv", 3 * width, width, has_bias=bias),
                    weights.linear(name + "attn.Wo", width, width, has_bias=bias),
                    norm(name + "mlp_norm"),
                    weights.linear(name + "mlp.Wi", 2 * inner, width, has_bias=mlp_bias),
                    weights.linear(name + "mlp.Wo", width, inner, has_bias=mlp_bias),
                )
            )
        if num_labels:
            self._pooling = choice(fields, "classifier_pooling", ("cls", "mean"), "cls")
            self._head_act = activation(fields, "classifier_activation")
            self._head = (
                weights.linear("head.dense", width, width, has_bias=flag(fields, "classifier_bias")),
                norm("head.norm"),
                weights.linear("classifier", num_labels, width),
            )

    def hidden(self, texts: Texts) -> Tensor:
        """Hidden states ``[T, width]`` behind the final norm."""
        x = self._first_norm(self._words[texts.token_ids])
        turns = {kind: [table[texts.positions][:, None, None] for table in rope] for kind, rope in self._ropes.items()}
        for kind, norm, qkv, out, mlp_norm, up, down in self._layers:
            heads = qkv(norm(x)).unflatten(1, (3, self._num_heads, -1))
            heads[:, :2] = _rotated(heads[:, :2], *turns[kind])
            x = x + out(texts.attend(heads, self._window if kind == SLIDING else 0))
            left, gate = up(mlp_norm(x)).chunk(2, -1)
            x = x + down(self._act(left) * gate)
        return self._last_norm(x)

    def scores(self, texts: Texts, hidden: Tensor) -> Tensor:
        """Scores ``[B, num_labels]``, before any activation."""
        dense, norm, last = self._head
        return last(norm(self._head_act(dense(texts.pool(hidden, self._pooling).to(hidden.dtype)))))


def _ropes(fields: Fields, head_dim: int, device: torch.device) -> dict[str, list[Tensor]]:
    """Tables of cosines and sines by position for both kinds of layers."""
    given, longest = fields.get("rope_parameters") or {}, count(fields, "max_position_embeddings")
    if fields.get("rope_scaling"):
        raise fault("rope_scaling", "absent", fields["rope_scaling"])
    if not isinstance(given, dict) or not all(isinstance(given.get(kind) or {}, dict) for kind in (FULL, SLIDING)):
        raise fault("rope_parameters", f"an object with one for {FULL} and for {SLIDING}", given)
    wide, ropes = fields.get("global_rope_theta", 160000.0), {}
    for kind, theta in ((FULL, wide), (SLIDING, fields.get("local_rope_theta", 10000.0) or wide)):
        own = {"rope_theta": theta, **(given.get(kind) or {})}
        rope = checked_rope(own, where=f"config.json: rope_parameters.{kind}")
        check_rotation(rope, head_dim, may_be_partial=False)
        ropes[kind] = [table.to(device) for table in rope_tables(rope, head_dim, longest)]
    return ropes


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
