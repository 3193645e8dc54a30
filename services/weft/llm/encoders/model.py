"""``EncoderModel``: an encoder with its weights, from token ids to vectors or scores."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from weft.llm.encoders.bert import Bert, ModernBert, Roberta
from weft.llm.encoders.folder import EncoderFolder
from weft.llm.encoders.layers import Layer, Texts, Weights
from weft.llm.weights.checkpoint import Checkpoint

#: A new family is a module beside this one, its class here, and its name in ``folder``.
FAMILIES: dict[str, type[Bert] | type[ModernBert]] = {
    "Bert": Bert,
    "Roberta": Roberta,
    "XLMRoberta": Roberta,
    "Camembert": Roberta,
    "ModernBert": ModernBert,
}

#: Texts that are computed together, and padded for attention alone, have at most twice the tokens of the shortest, and
#: so many more.
_SLACK_TOKENS = 16


class EncoderModel:
    """Computes texts together, at most ``max_tokens`` of them at once, those of similar length together.

    Raises:
        NotFoundError: A file is missing.
        InvalidArgumentError: The weights are not those of ``config.json``, or a field of it is not supported.
    """

    def __init__(
        self, folder: EncoderFolder, dtype: torch.dtype, device: torch.device, *, max_tokens: int, num_bits: int = 0
    ) -> None:
        family, fields = FAMILIES[folder.family], folder.fields
        self._folder, self._device, self._max_tokens = folder, device, max_tokens
        with Checkpoint.open(folder.path) as checkpoint:
            weights = Weights(checkpoint, family.prefix, dtype, device, num_bits)
            self._encoder = family(fields, weights, folder.num_labels)
            weights.finish()
        fields.check_unread(fields, folder.family, family.ignored)
        self._layers = [_dense(*each, device) for each in folder.layers]

    def run(
        self, ids: Sequence[Sequence[int]], type_ids: Sequence[Sequence[int]], is_wanted: Callable[[int], bool]
    ) -> npt.NDArray[np.float32]:
        """Vectors or scores ``[n, width]`` of texts of at least one token; of those no longer wanted, zeros."""
        results = np.zeros((len(ids), self._folder.width), np.float32)
        with torch.inference_mode():
            for chosen in self._batches([len(one) for one in ids]):
                if rows := [row for row in chosen if is_wanted(row)]:
                    texts = Texts([ids[row] for row in rows], [type_ids[row] for row in rows], self._device)
                    results[rows] = self._answers(texts).float().cpu().numpy()
        return results

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        rows: list[int] = []
        num_tokens = 0
        for row in sorted(range(len(lengths)), key=lengths.__getitem__):
            is_longer = rows and lengths[row] > 2 * lengths[rows[0]] + _SLACK_TOKENS
            if is_longer or (rows and num_tokens + lengths[row] > self._max_tokens):
                yield rows
                rows, num_tokens = [], 0
            rows.append(row)
            num_tokens += lengths[row]
        yield rows

    def _answers(self, texts: Texts) -> Tensor:
        hidden, folder = self._encoder.hidden(texts), self._folder
        if folder.num_labels:
            scores = self._encoder.scores(texts, hidden).float()
            return scores.sigmoid() if folder.has_sigmoid else scores
        vectors = texts.pool(hidden, folder.pooling)
        for layer in self._layers:
            vectors = layer(vectors)
        return functional.normalize(vectors) if folder.normalizes else vectors


def _dense(path: Path, config: Mapping[str, Any], device: torch.device) -> Layer:
    with Checkpoint.open(path) as checkpoint:
        weights = Weights(checkpoint, "", torch.float32, device)
        layer = weights.linear("linear", config["out_features"], config["in_features"], has_bias=config["bias"])
    activation = getattr(torch.nn, config["activation"])()
    return lambda x: activation(layer(x))
