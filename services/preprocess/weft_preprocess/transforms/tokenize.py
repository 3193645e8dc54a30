"""``tokenize``: texts to token ids, by a Hugging Face ``tokenizer.json``."""

import os
import time
from typing import Any, ClassVar

import numpy as np

from weft_common.errors import InvalidArgumentError
from weft_common.tensors import NUMPY_BY_DATATYPE, Array
from weft_serving.backends.base import Backend, Batch
from weft_serving.backends.loading import model_file, only_input, outputs_among, require
from weft_serving.backends.parameters import ParameterReader
from weft_serving.request import InferenceRequest, InferenceResponse, Outcome

_INTEGERS = ("INT64", "INT32")
_ATTRIBUTES = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}


class TokenizeBackend(Backend):
    """Answers each text with its token ids, padded to the longest text of its own request.

    ::

        TEXT BYTES [n, 1]  ->  input_ids, attention_mask, token_type_ids  INT64 or INT32 [n, L]

    The input may have any name; of the outputs, those that are declared are computed. ``L`` is the number of tokens of
    the longest row of the request, rounded up to ``pad_to_multiple_of``, at least 1 and at most ``max_length``.
    Requests that share a batch do not lengthen one another. Padding is on the right: the tokenizer's pad id,
    mask 0, type 0.

    The version folder holds ``tokenizer.json`` (or ``default_model_filename``).

    Parameters (all optional):
        max_length: Longest row in tokens, special tokens included; longer texts are cut. Default: the truncation in
            ``tokenizer.json``; without one the parameter is required.
        add_special_tokens: Whether to add tokens such as [CLS] and [SEP]. Default true.
        pad_to_multiple_of: L is a multiple of this, so that fewer distinct shapes reach the model. Default 1.
        max_text_bytes: A longer text is refused, in bytes of UTF-8. Default 1048576.

    A text that is not UTF-8 or is too long is INVALID_ARGUMENT for its own request alone.
    """

    is_repeatable: ClassVar[bool] = True
    can_use_gpu: ClassVar[bool] = False

    def load(self) -> None:
        """Read the tokenizer and the parameters."""
        self._input = only_input(self.model, ("BYTES",), (1,)).name
        outputs = outputs_among(self.model, dict.fromkeys(_ATTRIBUTES, (_INTEGERS, (-1,))))
        self._outputs = {name: NUMPY_BY_DATATYPE[spec.datatype] for name, spec in outputs.items()}
        # Instance threads are the parallelism; the tokenizer's own thread pool would compete with them.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        path = model_file(self.model, "tokenizer.json")
        tokenizers = require("tokenizers", "preprocess")
        try:
            tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises nothing more special
            raise InvalidArgumentError(f"{path} is not a tokenizer: {error}") from error
        truncation, padding = tokenizer.truncation or {}, tokenizer.padding or {}
        parameters = ParameterReader(self.model)
        self._max_length = parameters.integer("max_length", truncation.get("max_length", 0), minimum=1)
        self._multiple = parameters.integer("pad_to_multiple_of", 1, minimum=1)
        self._max_text_bytes = parameters.integer("max_text_bytes", 2**20, minimum=1)
        self._adds_special_tokens = parameters.flag("add_special_tokens", True)
        parameters.finish()
        self._pad_id = padding.get("pad_id", tokenizer.token_to_id("[PAD]") or 0)
        num_special = tokenizer.num_special_tokens_to_add(False) if self._adds_special_tokens else 0
        if self._max_length < num_special:
            raise InvalidArgumentError(
                f"model '{self.model.signature.name}': max_length must be at least {num_special}, the number of "
                f"special tokens, got {self._max_length}"
            )
        tokenizer.enable_truncation(self._max_length, direction=truncation.get("direction", "right"))
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    def execute(self, batch: Batch) -> list[Outcome]:
        """Tokenize the texts of all requests at once, then give each request its own rows."""
        texts: list[str] = []
        pieces: list[slice | InvalidArgumentError] = []
        for request in batch.requests:
            try:
                rows = self._texts(request)
            except InvalidArgumentError as error:
                pieces.append(error)
            else:
                pieces.append(slice(len(texts), len(texts) + len(rows)))
                texts += rows
        batch.infer_start_ns = time.monotonic_ns()
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=self._adds_special_tokens)
        batch.infer_end_ns = time.monotonic_ns()
        return [
            InferenceResponse(self._padded(encodings[piece])) if isinstance(piece, slice) else piece for piece in pieces
        ]

    def _texts(self, request: InferenceRequest) -> list[str]:
        texts: list[str] = []
        for row, element in enumerate(request.array(self._input).ravel()):
            if len(element) > self._max_text_bytes:
                raise InvalidArgumentError(
                    f"input '{self._input}' row {row} has {len(element)} bytes; at most {self._max_text_bytes} are "
                    "allowed"
                )
            try:
                texts.append(element.decode())
            except UnicodeDecodeError as error:
                raise InvalidArgumentError(
                    f"input '{self._input}' row {row} is not UTF-8: {error.reason} at byte {error.start} of "
                    f"{len(element)}"
                ) from None
        return texts

    def _padded(self, encodings: list[Any]) -> dict[str, Array]:
        lengths = [len(encoding) for encoding in encodings]
        longest = max([1, *lengths])
        width = min(-(-longest // self._multiple) * self._multiple, self._max_length)
        outputs = {}
        for name, dtype in self._outputs.items():
            array = np.full((len(encodings), width), self._pad_id if name == "input_ids" else 0, dtype)
            for row, (encoding, length) in enumerate(zip(encodings, lengths, strict=True)):
                array[row, :length] = getattr(encoding, _ATTRIBUTES[name])
            outputs[name] = array if self.model.signature.max_batch_size else array[0]
        return outputs
