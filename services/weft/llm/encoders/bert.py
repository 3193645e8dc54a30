"""BERT and RoBERTa: absolute positions, and a norm behind each part of a layer."""

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from weft.llm.encoders.folder import pad_token
from weft.llm.encoders.layers import Layer, Texts, Weights, activation, sizes
from weft.llm.models.fields import Fields, above_zero, choice, count, fault


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
