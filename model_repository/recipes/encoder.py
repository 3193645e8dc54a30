"""The built MiniLM tokenizer and model, run in this process."""

from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tokenizers import Tokenizer

from recipes.catalog import MINILM_MODEL, MINILM_TOKENIZER

MAX_LENGTH = 256  # tokens, as in the package's sentence_bert_config.json


class Encoder:
    """Texts to sentence embeddings, one text at a time: padding would cost more than batching saves.

    Args:
        repository: Where both are built.
    """

    def __init__(self, repository: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        self._session = onnxruntime.InferenceSession(
            repository / MINILM_MODEL, options, providers=["CPUExecutionProvider"]
        )
        self._tokenizer = Tokenizer.from_file(str(repository / MINILM_TOKENIZER))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(MAX_LENGTH)

    def tokenize(self, text: str) -> dict[str, NDArray[np.int64]]:
        """Inputs of the model, each of shape ``[1, num_tokens]``."""
        encoding = self._tokenizer.encode(text)
        fields = {
            "input_ids": encoding.ids,
            "attention_mask": encoding.attention_mask,
            "token_type_ids": encoding.type_ids,
        }
        return {name: np.array([values], dtype=np.int64) for name, values in fields.items()}

    def hidden(self, text: str) -> NDArray[np.float32]:
        """State of each token, shape ``[num_tokens, 384]``."""
        state: NDArray[np.float32] = self._session.run(["last_hidden_state"], self.tokenize(text))[0][0]
        return state

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        """Mean over the tokens, scaled to length 1; shape ``[len(texts), 384]``."""
        return unit_rows(np.stack([self.hidden(text).mean(axis=0) for text in texts]))


def unit_rows(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each row divided by its Euclidean norm."""
    scaled: NDArray[np.float32] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return scaled
