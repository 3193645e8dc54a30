"""``detokenize``: token ids to text, by a Hugging Face ``tokenizer.json``."""

import json
from typing import Any

import numpy as np

from weft.backends.contract import only_output
from weft.backends.tokenizers import load_tokenizer, tokenizer_at
from weft.base.tensors import Array
from weft.serving.backends.base import ModelContext, RowBackend, check_rows
from weft.serving.backends.loading import model_file, only_input
from weft.serving.backends.parameters import ParameterReader
from weft.serving.detokenizer import StopStrings


class DetokenizeBackend(RowBackend):
    """Decodes each row of token ids into text.

    ::

        output_ids INT64 or INT32 [n, L]  ->  TEXT BYTES [n, 1]

    Input and output may have any name. Ids below 0 are padding. The text equals that of the tokenizer's own ``decode``;
    bytes that form no character become U+FFFD. For incremental text during generation, see
    ``detokenize_stream``: its texts concatenate to this one.

    The version folder holds ``tokenizer.json`` (or ``default_model_filename``).

    Parameters (all optional):
        skip_special_tokens: Whether to omit tokens such as [SEP] and </s>. Default true.
        stop: JSON list of strings; the text ends before the first of them that is complete. Default [].

    An id that the vocabulary does not have is INVALID_ARGUMENT for its own request alone.
    """

    def load(self) -> None:
        """Read the tokenizer and the parameters."""
        self._input = only_input(self.model, ("INT64", "INT32"), (None,)).name
        self._output = only_output(self.model, ("BYTES",), (1,)).name
        parameters = ParameterReader(self.model)
        self._skips_special_tokens = parameters.flag("skip_special_tokens", True)
        text = parameters.text("stop", "[]")
        parameters.finish()
        try:
            self._stop = json.loads(text)
        except ValueError:
            self._stop = None
        if not isinstance(self._stop, list) or not all(isinstance(stop, str) and stop for stop in self._stop):
            raise parameters.fault("stop", text, 'a JSON list of strings that are not empty, such as ["\\n\\n", "###"]')
        self._tokenizer = read_tokenizer(self.model)
        self._max_id = max(self._tokenizer.get_vocab().values(), default=-1)

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Decode the rows."""
        ids = inputs[self._input]
        largest = ids.max(axis=1, initial=-1)
        check_rows(
            largest <= self._max_id,
            self._input,
            lambda row: f"token id {largest[row]}; the ids of this tokenizer end at {self._max_id}",
        )
        rows = [row[row >= 0].tolist() for row in ids] if ids.min(initial=0) < 0 else ids.tolist()
        texts = self._tokenizer.decode_batch(rows, skip_special_tokens=self._skips_special_tokens)
        if self._stop:
            texts = [self._stopped(text) for text in texts]
        answers = np.empty((len(ids), 1), np.object_)
        answers[:, 0] = [text.encode() for text in texts]
        return {self._output: answers}

    def _stopped(self, text: str) -> str:
        stop = StopStrings(self._stop)
        return stop.push(text) + stop.finish()


def read_tokenizer(model: ModelContext) -> Any:
    """Load the ``tokenizers.Tokenizer`` in the version folder: ``tokenizer.json``, or ``default_model_filename``.

    Raises:
        InvalidArgumentError: The file is not a tokenizer.
        NotFoundError: It does not exist.
        UnavailableError: The package is not installed.
    """
    return load_tokenizer(tokenizer_at(model_file(model, "tokenizer.json")), "transforms")
