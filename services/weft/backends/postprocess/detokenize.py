"""Token ids to text by a Hugging Face ``tokenizer.json``: ``detokenize``, and ``detokenize_stream`` by pieces."""

import json
import time
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from weft.backends.contract import only_output
from weft.backends.tokenizers import load_tokenizer, tokenizer_at
from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.tensors import Array
from weft.serving.backends.base import Backend, Batch, ModelContext, RowBackend, check_rows
from weft.serving.backends.loading import Dims, check_tensor, model_file, only_input
from weft.serving.backends.parameters import ParameterReader
from weft.serving.detokenizer import Demand, Detokenizer, StopStrings, is_enough
from weft.serving.request.request import InferenceRequest, InferenceResponse, Outcome

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


class DetokenizeStreamBackend(Backend):
    """Decodes the text that one streamed response of a language model adds.

    ::

        output_ids           INT32 or INT64 [L]   of this response
        context_ids          INT32 or INT64 [C]   ids before them, of prompt and output, in order
        num_previous_tokens  UINT32, INT32 or INT64 [1]  output ids before this response
        finish_reason        BYTES [1]            "stop" or "length" in the last response; "" or "None" before
        sampling_parameters  BYTES [1]            of the request, JSON        ->  BYTES [1]

    The output may have any name. ``num_previous_tokens`` and ``sampling_parameters`` may be undeclared, or optional and
    absent; then ``context_ids`` are the whole output without the prompt, and the request's parameters are
    used as sampling parameters.

    The texts of all responses concatenate to the text of all ids. It ends before the first of the
    strings in ``stop`` that is complete after ``min_tokens``, or before the stop token if
    ``finish_reason`` is "stop" and no such string occurs; with ``include_stop_str_in_output`` behind it. A character
    whose bytes span several tokens is emitted with its last byte; text that may become a stop string is held back; the
    rest is emitted with the last response.

    Stateless: ``context_ids`` determine the position in the text. So any replica may handle any
    response, several may be in flight, and a cancelled generation leaves no state. The last ids
    suffice, as many as a character of several tokens or the beginning of a stop string may span; fewer are
    rejected. A model that omits earlier ids must itself stop at stop strings, as the backend ``llm`` does. With
    ids of the prompt among them, the text continues the prompt: its first word keeps its leading space.

    The version folder holds ``tokenizer.json`` (or ``default_model_filename``). The model has no batch dimension and no
    parameters. INVALID_ARGUMENT: an id that the vocabulary does not have, too few ``context_ids``, sampling parameters
    that are invalid, and ``n`` above 1, since ids do not identify their choice.
    """

    is_repeatable: ClassVar[bool] = True
    has_no_effects: ClassVar[bool] = True
    can_use_gpu: ClassVar[bool] = False

    def load(self) -> None:
        """Read the tokenizer."""
        self._check_signature()
        ParameterReader(self.model).finish()
        tokenizer = read_tokenizer(self.model)
        self._detokenizer = Detokenizer(tokenizer)
        self._max_id = max(tokenizer.get_vocab().values(), default=-1)

    def execute(self, batch: Batch) -> list[Outcome]:
        """Decode the requests one by one."""
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
        context_ids, ids, reason = self._ids(request, _CONTEXT), self._ids(request, _IDS), _element(request, _FINISH)
        num_previous = int(request.array(_PREVIOUS)[0]) if _PREVIOUS in request.call.inputs else len(context_ids)
        if num_previous < 0:
            raise InvalidArgumentError(f"input '{_PREVIOUS}' must be from 0, got {num_previous}")
        context = DecodeContext.from_ids(context_ids, num_previous)
        is_last, is_ended = reason not in _GOES_ON, reason == _STOP
        return new_text(self._detokenizer, context, ids, options, is_last=is_last, is_ended=is_ended)

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
            raise self.model.error("max_batch_size", f"max_batch_size must be 0, got {signature.max_batch_size}")
        for index, spec in enumerate(signature.inputs):
            if spec.name not in _TENSORS:
                text = f"unknown input '{spec.name}'; the inputs are {', '.join(_TENSORS)}"
                raise self.model.error(f"input[{index}]", text)
            check_tensor(self.model, spec, *_TENSORS[spec.name])
            if spec.is_optional and spec.name in _NEEDED:
                text = f"'{spec.name}' must not be optional, as '{_SAMPLING}' may be"
                raise self.model.error(f"input[{index}]", text)
        if missing := _NEEDED - {spec.name for spec in signature.inputs}:
            text = f"model '{signature.name}' lacks the inputs {', '.join(sorted(missing))}"
            raise self.model.fault("input", text)
        self._output = only_output(self.model, ("BYTES",), (1,)).name


class TextOptions(NamedTuple):
    """Options of detokenization; names and defaults are vLLM's.

    Attributes:
        shows_stop: ``include_stop_str_in_output``.
        skips_special_tokens: Whether to omit tokens such as ``</s>``.
        min_tokens: Tokens in which no stop string may end.
    """

    stop: tuple[str, ...] = ()
    shows_stop: bool = False
    skips_special_tokens: bool = True
    min_tokens: int = 0


def _options(request: InferenceRequest) -> TextOptions:
    """Options of the input, else those among the request's own parameters, as in ``llm``; others are the model's."""
    members = request.call.parameters
    if _SAMPLING in request.call.inputs:
        text = _element(request, _SAMPLING)
        try:
            members = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"the sampling parameters are no JSON: {error}") from None
        if not isinstance(members, dict):
            raise InvalidArgumentError(f"the sampling parameters must be a JSON object, got {text[:40]!r}")
    if members.get("n", 1) != 1:
        raise InvalidArgumentError(
            f"'n' must be 1 where the text is made of token ids alone, got {_shown(members['n'])}; send the request as "
            "often as answers are wanted"
        )
    min_tokens = members.get("min_tokens", 0)
    if type(min_tokens) is not int or min_tokens < 0:
        raise InvalidArgumentError(f"'min_tokens' must be a whole number from 0, got {_shown(min_tokens)}")
    given: object = members.get("stop") or []
    stop = [given] if isinstance(given, str) else given
    if not isinstance(stop, list) or not all(isinstance(each, str) and each for each in stop):
        raise InvalidArgumentError(f"'stop' must be a string or a list of strings, none empty, got {_shown(given)}")
    shows, skips = members.get("include_stop_str_in_output", False), members.get("skip_special_tokens", True)
    for name, value in (("include_stop_str_in_output", shows), ("skip_special_tokens", skips)):
        if not isinstance(value, bool):
            raise InvalidArgumentError(f"'{name}' must be true or false, got {_shown(value)}")
    return TextOptions(tuple(stop), bool(shows), bool(skips), min_tokens)


def _shown(value: object) -> str:
    return json.dumps(value)[:80]


def _element(request: InferenceRequest, name: str) -> bytes:
    return bytes(request.array(name)[0])


class DecodeContext(NamedTuple):
    """Token ids before a response.

    Attributes:
        prompt_ids: The end of the prompt, which the text continues; empty if unknown or too far away.
        ids: The end of the output, or all of it.
        num_missing: Number of output ids before ``ids``.
    """

    prompt_ids: list[int]
    ids: list[int]
    num_missing: int

    @classmethod
    def from_ids(cls, context_ids: list[int], num_previous: int) -> "DecodeContext":
        """Split the last ids of prompt and output; the output has ``num_previous`` ids in total."""
        num_prompt = max(0, len(context_ids) - num_previous)
        return cls(context_ids[:num_prompt], context_ids[num_prompt:], max(0, num_previous - len(context_ids)))


def new_text(
    detokenizer: Detokenizer,
    context: DecodeContext,
    ids: list[int],
    options: TextOptions,
    *,
    is_last: bool,
    is_ended: bool,
) -> str:
    """The text that ``ids`` add to the context; ``is_ended``: a stop string or a stop token ended the generation.

    Raises:
        InvalidArgumentError: The text depends on missing ids.
    """
    if context.num_missing:
        num_chars = StopStrings(options.stop).max_kept_chars
        if not is_enough(detokenizer, context.ids, ids, Demand(options.skips_special_tokens, num_chars, is_last)):
            raise InvalidArgumentError(
                f"the last {len(context.ids)} of {context.num_missing + len(context.ids)} token ids before a response "
                f"are too few for its text: the bytes of a character, or a stop string of up to {num_chars + 1} "
                "characters, may have begun before them; send more, or all with the end of the prompt before them"
            )
    text, is_stopped = _new_text(detokenizer, context, ids, options, is_last=is_last)
    if is_ended and not is_stopped and not options.shows_stop:  # then a stop token ended it
        text, _ = _new_text(detokenizer, context, ids[:-1], options, is_last=True)
    return text


def _new_text(
    detokenizer: Detokenizer, context: DecodeContext, ids: list[int], options: TextOptions, *, is_last: bool
) -> tuple[str, bool]:
    """Also whether a stop string has ended the text, now or earlier."""
    text = detokenizer.stream(skip_special_tokens=options.skips_special_tokens, prompt_ids=context.prompt_ids)
    stop = StopStrings(options.stop)

    def checked(part: str) -> str:
        part = stop.push(part)
        return part + stop.stopped_by if options.shows_stop and stop.stopped_by else part

    num_exempt = max(0, options.min_tokens - context.num_missing)  # ids in which no stop string may end
    text.push(context.ids[:num_exempt])
    known = text.push(context.ids[num_exempt:])
    # The first characters after a gap may be wrong, and must not match a stop string.
    checked(known[max(0, len(known) - stop.max_kept_chars) :] if context.num_missing else known)
    if stop.stopped_by is not None:
        return "", True
    num_exempt = max(0, num_exempt - len(context.ids))
    added = text.push(ids[:num_exempt]) + checked(text.push(ids[num_exempt:]))
    if is_last and stop.stopped_by is None:
        added += checked(text.finish()) + stop.finish()
    return added, stop.stopped_by is not None
