"""``detokenize_stream``: the text that one response of a language model adds to its answer."""

import time
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from weft_common.errors import InvalidArgumentError, WeftError
from weft_common.tensors import Array
from weft_postprocess.transforms.text.answer_text import Before, added_text
from weft_postprocess.transforms.text.text_options import TextOptions
from weft_postprocess.transforms.text.tokenizer_file import read_tokenizer
from weft_serving.backends.base import Backend, Batch
from weft_serving.backends.loading import Dims, check_tensor
from weft_serving.backends.parameters import ParameterReader
from weft_serving.detokenizer import Detokenizer
from weft_serving.request.request import InferenceRequest, InferenceResponse, Outcome

_IDS, _CONTEXT, _PREVIOUS = "output_ids", "context_ids", "num_previous_tokens"
_FINISH, _SAMPLING = "finish_reason", "sampling_parameters"
_INTEGERS = ("INT32", "INT64")
_STOP, _GOES_ON = b"stop", (b"", b"None")
_TENSORS: Mapping[str, tuple[tuple[str, ...], Dims]] = {
    _IDS: (_INTEGERS, (None,)),
    _CONTEXT: (_INTEGERS, (None,)),
    _PREVIOUS: (("UINT32", *_INTEGERS), (1,)),
    _FINISH: (("BYTES",), (1,)),
    _SAMPLING: (("BYTES",), (1,)),
}
_NEEDED = {_IDS, _CONTEXT, _FINISH}


class DetokenizeStreamBackend(Backend):
    """Answers with the text that one response of a language model adds, where an answer comes in several.

    ::

        output_ids           INT32 or INT64 [L]   of this response
        context_ids          INT32 or INT64 [C]   those before, of prompt and answer, in order
        num_previous_tokens  UINT32, INT32 or INT64 [1]  ids of the answer before this response
        finish_reason        BYTES [1]            "stop" or "length" in the last response; "" or "None" before
        sampling_parameters  BYTES [1]            of the request, JSON        ->  BYTES [1]

    The output may have any name. ``num_previous_tokens`` and ``sampling_parameters`` may be undeclared, or optional and
    absent; then ``context_ids`` are all of the answer and none of the prompt, and the parameters of the request are
    looked at in place of the others.

    The texts of all responses, one after another, are the text of all ids at once. It ends before the first of the
    strings in ``stop`` that is complete after ``min_tokens``, or before the token that ended it where
    ``finish_reason`` is "stop" and no such string is met; with ``include_stop_str_in_output`` behind that. A character
    whose bytes lie in several tokens comes whole, with its last byte; text that may become a stop string waits; what
    still waits comes with the last response.

    Nothing is remembered between calls: ``context_ids`` say how far the text has come. So any replica may take any
    response, several may be in work at once, and an answer that is cancelled leaves nothing behind. The last of them
    are enough, as many as a character of several tokens or the beginning of a stop string may reach back; fewer are
    refused. A model that leaves out any must itself end an answer at a stop string, as the backend ``llm`` does. With
    ids of the prompt among them the text continues the prompt's: its first word keeps its leading space.

    The version folder holds ``tokenizer.json`` (or ``default_model_filename``). The model has no batch dimension and no
    parameters. INVALID_ARGUMENT: an id that the vocabulary does not have, too few ``context_ids``, sampling parameters
    that make no sense, and ``n`` above 1, since ids do not say whose they are.
    """

    is_repeatable: ClassVar[bool] = True
    can_use_gpu: ClassVar[bool] = False

    def load(self) -> None:
        """Read the tokenizer."""
        self._check_signature()
        ParameterReader(self.model).finish()
        tokenizer = read_tokenizer(self.model)
        self._detokenizer = Detokenizer(tokenizer)
        self._max_id = max(tokenizer.get_vocab().values(), default=-1)

    def execute(self, batch: Batch) -> list[Outcome]:
        """Make the texts, one request after another."""
        batch.infer_start_ns = time.monotonic_ns()
        outcomes = [self._outcome(request) for request in batch.requests]
        batch.infer_end_ns = time.monotonic_ns()
        return outcomes

    def _outcome(self, request: InferenceRequest) -> Outcome:
        try:
            text = self._text(request)
        except WeftError as error:
            return error
        return InferenceResponse({self._output: np.array([text.encode()], np.object_)})

    def _text(self, request: InferenceRequest) -> str:
        options = _options(request)
        context, ids, reason = self._ids(request, _CONTEXT), self._ids(request, _IDS), _element(request, _FINISH)
        before = Before.of(context, _num_previous(request, len(context)))
        is_last, is_ended = reason not in _GOES_ON, reason == _STOP
        return added_text(self._detokenizer, before, ids, options, is_last=is_last, is_ended=is_ended)

    def _ids(self, request: InferenceRequest, name: str) -> list[int]:
        ids: Array = request.array(name)
        unknown = ids[(ids < 0) | (ids > self._max_id)]
        if unknown.size:
            raise InvalidArgumentError(
                f"input '{name}': token id {unknown[0]}; the ids of this tokenizer are 0 to {self._max_id}"
            )
        numbers: list[int] = ids.tolist()
        return numbers

    def _check_signature(self) -> None:
        signature = self.model.signature
        if signature.max_batch_size:
            text = f"model '{signature.name}': max_batch_size must be 0, got {signature.max_batch_size}"
            raise self.model.fault("max_batch_size", text)
        for index, spec in enumerate(signature.inputs):
            if spec.name not in _TENSORS:
                text = f"unknown input '{spec.name}'; the inputs are {', '.join(_TENSORS)}"
                raise self.model.fault(f"input[{index}]", f"model '{signature.name}': {text}")
            check_tensor(self.model, spec, *_TENSORS[spec.name])
            if spec.is_optional and spec.name in _NEEDED:
                text = f"model '{signature.name}': '{spec.name}' must not be optional, as '{_SAMPLING}' may be"
                raise self.model.fault(f"input[{index}]", text)
        if missing := _NEEDED - {spec.name for spec in signature.inputs}:
            text = f"model '{signature.name}' lacks the inputs {', '.join(sorted(missing))}"
            raise self.model.fault("input", text)
        if len(signature.outputs) != 1:
            text = f"model '{signature.name}' must have exactly one output, got {len(signature.outputs)}"
            raise self.model.fault("output", text)
        self._output = check_tensor(self.model, signature.outputs[0], ("BYTES",), (1,)).name


def _options(request: InferenceRequest) -> TextOptions:
    """Those of the input, else those among the request's own parameters, as the backend ``llm`` takes them."""
    if _SAMPLING in request.call.inputs:
        return TextOptions.from_json(_element(request, _SAMPLING))
    return TextOptions.from_members(request.call.parameters)


def _num_previous(request: InferenceRequest, default: int) -> int:
    if _PREVIOUS not in request.call.inputs:
        return default
    number = int(request.array(_PREVIOUS)[0])
    if number < 0:
        raise InvalidArgumentError(f"input '{_PREVIOUS}' must be from 0, got {number}")
    return number


def _element(request: InferenceRequest, name: str) -> bytes:
    """The one element of a BYTES input."""
    return bytes(request.array(name)[0])
