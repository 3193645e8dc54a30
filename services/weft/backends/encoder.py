"""``encoder``: embeddings of texts and scores of pairs of texts, by encoders in Hugging Face folders."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from weft.backends.contract import inputs_among
from weft.backends.gpu import torch_device
from weft.backends.preprocess.tokenize import encodings_of, rows_of_each, texts_of
from weft.backends.tokenizers import load_tokenizer, tokenizer_at
from weft.base.errors import InvalidArgumentError
from weft.base.repository.layout import existing_file
from weft.base.text.suggestion import suggestion
from weft.llm.encoders.folder import EncoderFolder, read_encoder
from weft.llm.models.fields import DTYPE_BYTES, count, fault, stored_dtype
from weft.serving.backends.base import Backend, Batch
from weft.serving.backends.loading import check_tensor, outputs_among, require
from weft.serving.backends.parameters import ParameterReader
from weft.serving.request.request import InferenceRequest, InferenceResponse, Outcome

_TOKENIZER = "tokenizer.json"
_TEXT, _PAIR, _IDS, _LIMIT, _PROMPT = "text", "text_pair", "input_ids", "truncate_prompt_tokens", "prompt_name"
_NUM_TOKENS = "num_tokens"
_MAX_BATCH_SIZE = 32
#: Tokens that are computed at once, so that what they need fits the caches of a CPU, or fills a GPU.
_MAX_TOKENS = {"cpu": 1024, "cuda": 16384}


#: Datatype and dims of tensors, by name.
_Tensors: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]


class _Row(NamedTuple):
    owner: InferenceRequest
    ids: Sequence[int]
    type_ids: Sequence[int]


class EncoderBackend(Backend):
    """Runs the encoder of a Hugging Face or sentence-transformers folder, the version folder; ``docs/encoders.md``.

    ::

        Bert...Model          text BYTES [n, 1] or input_ids INT32 [n, L]  ->  embedding  FP32 [n, d]
                              (, prompt_name BYTES [n, 1])                     num_tokens INT32 [n, 1]
        Bert...Classification text (, text_pair) BYTES [n, 1]              ->  scores     FP32 [n, labels]
                                                                               num_tokens INT32 [n, 1]

    Each may have ``truncate_prompt_tokens`` INT32 [n, 1], to which rows are cut, -1: to what fits. Without it a row
    that is too long is INVALID_ARGUMENT, as all that is wrong with a row, for its own request alone.
    """

    is_repeatable: ClassVar[bool] = True
    has_no_effects: ClassVar[bool] = True

    def check(self) -> None:
        """Check all but the values of the weights."""
        torch = require("torch", "torch")
        self._read(torch, torch.device("meta"))

    def load(self) -> None:
        """Read parameters, weights and tokenizer."""
        torch = require("torch", "torch")
        self._read(torch, torch_device(torch, self.instance))
        self._model.run([[0]], [[0]], lambda _row: True)  # compiles what is compiled

    def _read(self, torch: Any, device: Any) -> None:
        # They import torch.
        from weft.llm.encoders.model import EncoderModel  # noqa: PLC0415
        from weft_kernels.linear.products import faster_dtype  # noqa: PLC0415

        folder = read_encoder(self.model.directory)
        reader, fields = ParameterReader(self.model), folder.fields
        name = reader.choice("dtype", "auto", ("auto", *DTYPE_BYTES))
        dtype = getattr(torch, stored_dtype(fields) if name == "auto" else name)
        if name == "auto" and device.type == "cpu":
            dtype = faster_dtype(dtype, (count(fields, "intermediate_size"), count(fields, "hidden_size")))
        is_rounded = reader.choice("quantization", "none", ("none", "int8")) == "int8"
        if is_rounded and self.instance.kind == "GPU" and device.type != "cpu":
            raise reader.fault("quantization", "int8", "none on a GPU")
        self._truncates = reader.flag("truncate", False)
        self._max_text_bytes = reader.integer("max_text_bytes", 2**20, minimum=1)
        if num_threads := reader.integer("intra_op_thread_count", 0, minimum=0, maximum=1024):
            torch.set_num_threads(num_threads)
        pooling = reader.choice("pooling", folder.pooling, ("mean", "cls", "max", "lasttoken"))
        self._folder = replace(folder, pooling=pooling, normalizes=reader.flag("normalize", folder.normalizes))
        reader.finish()
        inputs, outputs = _tensors(folder)
        for name, spec in inputs_among(self.model, "an encoder", (_TEXT,), [*inputs][1:]).items():
            check_tensor(self.model, spec, (inputs[name][0],), inputs[name][1])
        allowed = {name: ((datatype,), dims) for name, (datatype, dims) in outputs.items()}
        self._outputs = [*outputs_among(self.model, allowed)]
        self._tokenizer = None
        if folder.num_labels or (folder.path / _TOKENIZER).is_file():
            self._tokenizer = load_tokenizer(tokenizer_at(existing_file(folder.path, _TOKENIZER)), "torch")
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            if folder.family == "Bert":  # others have one type
                last = max(self._tokenizer.encode(*(["a"] * (2 if folder.num_labels else 1))).type_ids, default=0)
                if last >= (num_types := count(fields, "type_vocab_size", 2)):
                    raise fault("type_vocab_size", f"above {last}, as the tokenizer has types to {last}", num_types)
        self._model = EncoderModel(
            self._folder,
            dtype,
            device,
            max_tokens=_MAX_TOKENS.get(device.type, 0),
            num_bits=8 if is_rounded and device.type == "cpu" else 0,
        )

    @staticmethod
    def auto_complete(  # type: ignore[override]  # mypy takes the base's for a method
        config: dict[str, Any], directory: Path
    ) -> dict[str, Any]:
        """Declare the tensors, and dynamic batches of 32, unless some are declared."""
        if not (config.get("input") or config.get("output")):
            folder = read_encoder(directory)
            config["max_batch_size"] = config.get("max_batch_size") or _MAX_BATCH_SIZE
            config.setdefault("dynamic_batching", {})
            config["input"], config["output"] = map(_declared, _tensors(folder))
            for one in config["input"]:
                one["optional"] = not folder.num_labels or one["name"] != _TEXT
                one["allow_ragged_batch"] = one["name"] == _IDS
        return config

    def execute(self, batch: Batch) -> list[Outcome]:
        """Tokenize each request, compute all rows together, and give each request its own."""
        rows, pieces = rows_of_each(batch.requests, self._rows)
        batch.infer_start_ns = time.monotonic_ns()
        values = self._model.run(
            [row.ids for row in rows], [row.type_ids for row in rows], lambda row: not rows[row].owner.is_withdrawn
        )
        batch.infer_end_ns = time.monotonic_ns()
        return [
            piece if isinstance(piece, InvalidArgumentError) else self._answer(values[piece], rows[piece])
            for piece in pieces
        ]

    def _rows(self, request: InferenceRequest) -> list[_Row]:
        """The tokens of each row. Raises InvalidArgumentError."""
        inputs, longest = request.call.inputs, self._folder.max_len
        if (_TEXT in inputs) == (_IDS in inputs):
            raise InvalidArgumentError(f"send one of the inputs '{_TEXT}' and '{_IDS}'")
        default = [-1 if self._truncates else 0]
        limits = request.array(_LIMIT).ravel().tolist() if _LIMIT in inputs else default * request.num_rows
        if _IDS in inputs:
            rows = [
                _Row(request, row, [0] * len(row)) for row in request.array(_IDS).reshape(request.num_rows, -1).tolist()
            ]
        else:
            rows = self._tokenized(request, limits)
        for row, (_, tokens, _) in enumerate(rows):
            place = f"input '{_IDS if _IDS in inputs else _TEXT}' row {row}"
            if not 0 < len(tokens) <= longest:
                cure = f"send less, or let '{_LIMIT}' cut texts"
                raise InvalidArgumentError(f"{place} has {len(tokens)} tokens; 1 to {longest} are allowed: {cure}")
            if not 0 <= min(tokens) <= max(tokens) < self._folder.vocab_size:
                allowed = f"from 0 to {self._folder.vocab_size - 1}"
                raise InvalidArgumentError(f"{place}: token ids must be {allowed}, got {min(tokens)} to {max(tokens)}")
        return rows

    def _tokenized(self, request: InferenceRequest, limits: Sequence[int]) -> list[_Row]:
        if self._tokenizer is None:
            raise InvalidArgumentError(f"the model has no {_TOKENIZER}; send token ids as '{_IDS}', or add the file")
        texts: list[Any] = self._prompted(request)
        if is_pair := _PAIR in request.call.inputs:
            texts = [*zip(texts, texts_of(request, _PAIR, self._max_text_bytes), strict=True)]
        encodings = encodings_of(self._tokenizer.encode_batch_fast, texts, _TEXT)
        least = self._tokenizer.num_special_tokens_to_add(is_pair) + 1
        for row, limit in enumerate(limits):
            longest = self._folder.max_len if limit == -1 else limit
            if limit and not least <= longest <= self._folder.max_len:
                allowed = f"-1, or from {least} to {self._folder.max_len}"
                raise InvalidArgumentError(f"input '{_LIMIT}' row {row} must be {allowed}, got {limit}")
            if limit and len(encodings[row]) > longest:
                self._tokenizer.enable_truncation(longest)
                encodings[row] = encodings_of(self._tokenizer.encode_batch_fast, [texts[row]], _TEXT)[0]
                self._tokenizer.no_truncation()
        return [_Row(request, encoding.ids, encoding.type_ids) for encoding in encodings]

    def _prompted(self, request: InferenceRequest) -> list[str]:
        prompts, texts = self._folder.prompts, texts_of(request, _TEXT, self._max_text_bytes)
        given = _PROMPT in request.call.inputs
        names = texts_of(request, _PROMPT, self._max_text_bytes) if given else [""] * len(texts)
        for row, name in enumerate(names):
            if name and name not in prompts:
                near = suggestion(name, filter(None, prompts))
                raise InvalidArgumentError(f"input '{_PROMPT}' row {row}: unknown prompt '{name[:80]}'{near}")
        texts = [prompts.get(name, "") + text for name, text in zip(names, texts, strict=True)]
        return [text.lower() for text in texts] if self._folder.lowers else texts

    def _answer(self, values: npt.NDArray[np.float32], rows: Sequence[_Row]) -> InferenceResponse:
        counts = np.array([[len(row.ids)] for row in rows], np.int32)
        given = {_NUM_TOKENS: counts, "scores" if self._folder.num_labels else "embedding": values}
        has_rows = self.model.signature.max_batch_size > 0
        return InferenceResponse({name: given[name] if has_rows else given[name][0] for name in self._outputs})


def _declared(tensors: _Tensors) -> list[dict[str, Any]]:
    names = {"BYTES": "STRING"}
    return [
        {"name": name, "data_type": f"TYPE_{names.get(datatype, datatype)}", "dims": list(dims)}
        for name, (datatype, dims) in tensors.items()
    ]


def _tensors(folder: EncoderFolder) -> tuple[_Tensors, _Tensors]:
    """Inputs and outputs of a model: datatype and dims, by name."""
    text: tuple[str, tuple[int, ...]] = ("BYTES", (1,))
    limit = {_LIMIT: ("INT32", (1,))}
    outputs: _Tensors = {_NUM_TOKENS: ("INT32", (1,))}
    if folder.num_labels:
        return {_TEXT: text, _PAIR: text, **limit}, {"scores": ("FP32", (folder.width,)), **outputs}
    inputs = {_TEXT: text, _IDS: ("INT32", (-1,)), **limit, **({_PROMPT: text} if any(folder.prompts) else {})}
    return inputs, {"embedding": ("FP32", (folder.width,)), **outputs}
