"""``tokenize``: texts to token ids, by a Hugging Face ``tokenizer.json``."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, TypeVar

import numpy as np

from weft.backends.tokenizers import load_tokenizer, tokenizer_at
from weft.base.errors import InvalidArgumentError
from weft.base.signature import TensorSpec
from weft.base.tensors import NUMPY_BY_DATATYPE, Array
from weft.serving.backends.base import Backend, Batch
from weft.serving.backends.loading import check_tensor, model_file, outputs_among
from weft.serving.backends.parameters import ParameterReader
from weft.serving.request.request import InferenceRequest, InferenceResponse, Outcome

Row = TypeVar("Row")
_INTEGERS = ("INT64", "INT32")
_SIDES = ("left", "right")
_STRATEGIES = ("longest_first", "only_first", "only_second")
_PAD_TOKENS = ("[PAD]", "<pad>")


#: The attribute of an encoding that provides an output.
_OUTPUTS = {
    "input_ids": "ids",
    "attention_mask": "attention_mask",
    "token_type_ids": "type_ids",
    "special_tokens_mask": "special_tokens_mask",
    "offset_mapping": "offsets",
    "num_tokens": "",
}


def rows_of_each(
    requests: Sequence[InferenceRequest], rows_of: Callable[[InferenceRequest], list[Row]]
) -> tuple[list[Row], list[slice | InvalidArgumentError]]:
    """The rows of all requests one after another, and for each request its part of them, or what is wrong with it."""
    rows: list[Row] = []
    pieces: list[slice | InvalidArgumentError] = []
    for request in requests:
        try:
            own = rows_of(request)
        except InvalidArgumentError as error:
            pieces.append(error)
        else:
            pieces.append(slice(len(rows), len(rows) + len(own)))
            rows += own
    return rows, pieces


def encodings_of(encode: Any, rows: Sequence[Any], name: str, *, adds_special_tokens: bool = True) -> list[Any]:
    """One encoding per text or pair, by a method of a tokenizer. Raises InvalidArgumentError with the row of ``name``.

    The row is known if all are of one request.
    """
    try:
        encodings: list[Any] = encode(rows, add_special_tokens=adds_special_tokens)
    except Exception as error:  # tokenizers raises nothing more specific; the caller retries with one request
        for row, text in enumerate(rows):
            try:
                encode([text], add_special_tokens=adds_special_tokens)
            except Exception as cause:
                raise InvalidArgumentError(
                    f"input '{name}' row {row}: the tokenizer refuses the text: {cause}"
                ) from None
        raise InvalidArgumentError(f"the tokenizer refuses the texts: {error}") from None
    return encodings


def texts_of(request: InferenceRequest, name: str, max_text_bytes: int) -> list[str]:
    """The texts of an input. Raises InvalidArgumentError: one is not UTF-8, or too long."""
    texts: list[str] = []
    for row, element in enumerate(request.array(name).ravel()):
        if len(element) > max_text_bytes:
            raise InvalidArgumentError(
                f"input '{name}' row {row} has {len(element)} bytes; at most {max_text_bytes} are allowed"
            )
        try:
            texts.append(element.decode())
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(
                f"input '{name}' row {row} is not UTF-8: {error.reason} at byte {error.start} of {len(element)}"
            ) from None
    return texts


class TokenizeBackend(Backend):
    """Tokenizes each text, or pair of texts, padded to the longest row of its own request.

    ::

        TEXT BYTES [n, 1] (, PAIR BYTES [n, 1])  ->  input_ids            INT64 or INT32 [n, L]
                                                     attention_mask       1 for a token, 0 for padding
                                                     token_type_ids       0 for the first text, 1 for the second
                                                     special_tokens_mask  1 for [CLS] and the like, and for padding
                                                     offset_mapping       [n, L, 2]
                                                     num_tokens           [n, 1], without padding

    The inputs may have any names; the first one declared is the text, the second its pair, and may be ``optional``.
    Only declared outputs are computed. ``offset_mapping`` is the start and end of a token in its text,
    in characters; 0, 0 for special tokens and padding. ``L`` is the number of tokens of the longest row of the request,
    rounded up to ``pad_to_multiple_of``, at least 1 and at most ``max_length``. Requests in one batch do not
    lengthen each other.

    The version folder holds ``tokenizer.json`` (or ``default_model_filename``); its truncation and
    padding settings are the defaults.

    Parameters (all optional, named as in transformers):
        max_length: Longest row in tokens, special tokens included. Default: the truncation in ``tokenizer.json``;
            without one the parameter is required.
        truncation: Which text of an overlong row is cut: ``longest_first``, ``only_first`` or ``only_second``;
            ``do_not_truncate`` rejects the row. Default longest_first.
        truncation_side: ``right`` cuts the end, ``left`` the beginning. Default right.
        padding: ``longest``, or ``max_length``: L is always max_length. Default longest.
        padding_side: ``right``, or ``left`` for generative models. Default right.
        pad_to_multiple_of: L is a multiple of this, so that fewer distinct shapes reach the model. Default 1.
        pad_token: Default: that of ``tokenizer.json``, else [PAD] or <pad>, else the token with id 0.
        add_special_tokens: Whether to add tokens such as [CLS] and [SEP]. Default true.
        max_text_bytes: Limit of a text, in bytes of UTF-8. Default 1048576.

    A text that is not UTF-8 or is too long is INVALID_ARGUMENT for its own request alone.

    Source:
        ``PreTrainedTokenizerFast.__call__`` of https://github.com/huggingface/transformers, the oracle of the tests.
    """

    is_repeatable: ClassVar[bool] = True
    has_no_effects: ClassVar[bool] = True
    can_use_gpu: ClassVar[bool] = False

    def load(self) -> None:
        """Read the tokenizer and the parameters."""
        self._inputs = self._input_names()
        tokenizer = load_tokenizer(tokenizer_at(model_file(self.model, "tokenizer.json")), "transforms")
        parameters = ParameterReader(self.model)
        self._adds_special_tokens = parameters.flag("add_special_tokens", True)
        self._max_text_bytes = parameters.integer("max_text_bytes", 2**20, minimum=1)
        self._read_padding(parameters, tokenizer)
        self._read_truncation(parameters, tokenizer)
        parameters.finish()
        outputs = self._declared_outputs()
        self._outputs = {name: NUMPY_BY_DATATYPE[spec.datatype] for name, spec in outputs.items()}
        # Without offsets the tokenizer need not count characters.
        self._encode = tokenizer.encode_batch if "offset_mapping" in outputs else tokenizer.encode_batch_fast

    def execute(self, batch: Batch) -> list[Outcome]:
        """Tokenize the texts of all requests at once, then give each request its own rows."""
        rows, pieces = rows_of_each(batch.requests, self._rows)
        batch.infer_start_ns = time.monotonic_ns()
        encodings = encodings_of(self._encode, rows, self._inputs[0], adds_special_tokens=self._adds_special_tokens)
        batch.infer_end_ns = time.monotonic_ns()
        return [
            piece if isinstance(piece, InvalidArgumentError) else self._answer(encodings[piece]) for piece in pieces
        ]

    def _rows(self, request: InferenceRequest) -> list[Any]:
        given = [name for name in self._inputs if name in request.call.inputs]
        texts = [texts_of(request, name, self._max_text_bytes) for name in given]
        return texts[0] if len(texts) == 1 else list(zip(*texts, strict=True))

    def _answer(self, encodings: Sequence[Any]) -> Outcome:
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        longest = int(lengths.max(initial=1))
        if longest > self._max_length:
            row = int(lengths.argmax())
            return InvalidArgumentError(
                f"input '{self._inputs[0]}' row {row} has {lengths[row]} tokens; at most {self._max_length} are allowed"
            )
        width = min(-(-longest // self._multiple) * self._multiple, self._max_length)
        if self._pads_to_max:
            width = self._max_length
        places = np.arange(width)
        is_token = places >= width - lengths[:, None] if self._pads_left else places < lengths[:, None]
        outputs = {name: self._padded(name, dtype, encodings, is_token) for name, dtype in self._outputs.items()}
        if not self.model.signature.max_batch_size:
            outputs = {name: array[0] for name, array in outputs.items()}
        return InferenceResponse(outputs)

    def _padded(self, name: str, dtype: np.dtype[Any], encodings: Sequence[Any], is_token: Array) -> Array:
        """One output of a request; ``is_token`` is bool ``[n, L]``."""
        if name == "attention_mask":
            return is_token.astype(dtype)
        if name == "num_tokens":
            return np.asarray(is_token.sum(axis=1, keepdims=True), dtype)
        values = chain.from_iterable(getattr(encoding, _OUTPUTS[name]) for encoding in encodings)
        if name == "offset_mapping":
            offsets = np.zeros((*is_token.shape, 2), dtype)
            offsets[is_token] = np.fromiter(chain.from_iterable(values), dtype).reshape(-1, 2)
            return offsets
        array = np.full(is_token.shape, self._paddings[name], dtype)
        array[is_token] = np.fromiter(values, dtype)
        return array

    def _input_names(self) -> list[str]:
        inputs = self.model.signature.inputs
        if len(inputs) not in (1, 2):
            names = ", ".join(spec.name for spec in inputs)
            raise self.model.fault(
                "input",
                f"model '{self.model.signature.name}' must have one input, the texts, or two, the texts and their "
                f"pairs, got {names}",
            )
        if inputs[0].is_optional:
            raise self.model.error("input[0]", f"'{inputs[0].name}' must not be optional, as pairs may be")
        return [check_tensor(self.model, spec, ("BYTES",), (1,)).name for spec in inputs]

    def _declared_outputs(self) -> Mapping[str, TensorSpec]:
        """Outputs of any length, or of ``max_length`` if every row is padded to it."""
        declared = {spec.dims[0] for spec in self.model.signature.outputs if spec.name != "num_tokens"}
        length = self._max_length if self._pads_to_max and declared == {self._max_length} else -1
        return outputs_among(
            self.model,
            {
                **dict.fromkeys(_OUTPUTS, (_INTEGERS, (length,))),
                "offset_mapping": (_INTEGERS, (length, 2)),
                "num_tokens": (_INTEGERS, (1,)),
            },
        )

    def _read_padding(self, parameters: ParameterReader, tokenizer: Any) -> None:
        own: Mapping[str, Any] = tokenizer.padding or {}
        self._pads_to_max = parameters.choice("padding", "longest", ("longest", "max_length")) == "max_length"
        self._pads_left = parameters.choice("padding_side", own.get("direction", "right"), _SIDES) == "left"
        self._multiple = parameters.integer("pad_to_multiple_of", own.get("pad_to_multiple_of") or 1, minimum=1)
        known = [token for token in _PAD_TOKENS if tokenizer.token_to_id(token) is not None]
        first = tokenizer.id_to_token(0) or ""
        pad_token = parameters.text("pad_token", own.get("pad_token", known[0] if known else first))
        pad_id = tokenizer.token_to_id(pad_token)
        if pad_id is None:
            raise parameters.fault("pad_token", pad_token, "a token of the vocabulary")
        self._paddings = {
            "input_ids": pad_id,
            "token_type_ids": own.get("pad_type_id", 0),
            "special_tokens_mask": 1,
        }
        tokenizer.no_padding()

    def _read_truncation(self, parameters: ParameterReader, tokenizer: Any) -> None:
        own: Mapping[str, Any] = tokenizer.truncation or {}
        self._max_length = parameters.integer("max_length", own.get("max_length", 0), minimum=1)
        default = own.get("strategy", "longest_first")
        strategy = parameters.choice("truncation", default, (*_STRATEGIES, "do_not_truncate"))
        side = parameters.choice("truncation_side", own.get("direction", "right"), _SIDES)
        is_pair = len(self._inputs) > 1
        if strategy == "only_second" and not is_pair:
            raise parameters.fault("truncation", strategy, "longest_first or only_first where there is one input")
        num_special = tokenizer.num_special_tokens_to_add(is_pair) if self._adds_special_tokens else 0
        if self._max_length < num_special:
            allowed = f"at least {num_special}, the number of special tokens"
            raise parameters.fault("max_length", self._max_length, allowed)
        if strategy == "do_not_truncate":
            tokenizer.no_truncation()
        else:
            tokenizer.enable_truncation(self._max_length, strategy=strategy, direction=side)
