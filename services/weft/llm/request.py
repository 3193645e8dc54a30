"""Input and output of the engine: requests and deltas."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple, NoReturn, Self

import numpy as np
import numpy.typing as npt

from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.text.suggestion import suggestion
from weft.llm.grammar import GrammarTicket
from weft.llm.structured_outputs import ALIASES, GrammarSpec, fold_aliases

_INT32_MAX = 2**31 - 1
#: A ``max_tokens`` that stands for as many as the model's length allows.
UNLIMITED_TOKENS = _INT32_MAX
_INT64_MAX = 2**63 - 1
#: Value of ``SamplingParams.speculation`` for no drafts at all.
NO_SPECULATION = "none"
#: Finish reasons of deltas of a request with ``hold_s``: after its first token, and when its lease has ended.
HELD, RELEASED = "held", "released"

#: Smallest and largest value of every number.
_BOUNDS: dict[str, tuple[float, float]] = {
    "n": (1, 128),
    "best_of": (1, 128),
    "max_tokens": (0, _INT32_MAX),
    "min_tokens": (0, _INT32_MAX),
    "temperature": (0.0, 100.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0, _INT32_MAX),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (-_INT64_MAX - 1, _INT64_MAX),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "truncate_prompt_tokens": (-1, _INT32_MAX),
    "length_penalty": (-100.0, 100.0),
}
#: A JSON number of at most 32 characters.
_NUMBER = re.compile(r"(?=.{1,32}\Z)-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_MAX_STOP_STRINGS = 32
_MAX_STOP_CHARS = 1024
_MAX_STOP_TOKENS = 256
_MAX_BIASES = 1024
_MAX_BIAS = 100.0
_MAX_BAD_WORDS = 256
_MAX_ALLOWED_TOKENS = 1 << 18
#: What a beam search, which is ranked by the model's own probabilities, does without.
_NOT_WITH_BEAMS = (
    *("min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop", "logit_bias"),
    *("structured_outputs", "bad_words", "allowed_token_ids"),
)

#: The value of ``early_stopping`` that is no boolean.
_NEVER = ("early_stopping", "never")
#: Lower temperatures count as 0: dividing logits by them would overflow float32, and the result is greedy anyway.
_LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled and when a sequence ends; the names are vLLM's.

    docs/language-models.md, "Sampling parameters", has the meaning of each field, ``_BOUNDS`` its range; besides:

    Attributes:
        best_of: Applied by the component that builds responses, which asks the engine for so many as ``n``.
        max_tokens: Most new tokens per choice; ``UNLIMITED_TOKENS``: as many as fit; 0: the prompt alone is computed.
        min_tokens: Stop tokens are suppressed until the choice has this many new tokens.
        temperature: Divides the logits; 0: greedy, the lowest id among equals.
        min_p: Sample from tokens with at least this share of the most likely token's probability.
        presence_penalty: Subtracted from the logit of every token in the output.
        frequency_penalty: Subtracted once per occurrence of the token in the output.
        seed: None: the engine draws one.
        stop: Stop strings; applied by the component that detokenizes.
        logit_bias: Pairs of token id and the bias of its logit.
        truncate_prompt_tokens, bad_words: Applied by the component that tokenizes.
        structured_outputs: The grammar that the output follows; an object, as ``GrammarSpec.parse`` takes it, or None.
        lora_name: The adapter of the model; "": none.

    Raises:
        InvalidArgumentError: A field has the wrong type or is out of range; the message names both.
    """

    n: int = 1
    best_of: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    speculation: str | None = None
    structured_outputs: GrammarSpec | None = None
    lora_name: str = ""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in _BOUNDS:
                if value is not None or each.default is not None:
                    object.__setattr__(self, each.name, _number(each.name, value, type(each.default) is float))
            elif type(each.default) is bool and type(value) is not bool and (each.name, value) != _NEVER:
                _refuse(each.name, value, f"must be true or false{', or never' * (each.name == _NEVER[0])}")
        object.__setattr__(self, "stop", _texts("stop", self.stop, _MAX_STOP_STRINGS))
        object.__setattr__(self, "bad_words", _texts("bad_words", self.bad_words, _MAX_BAD_WORDS))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids, _MAX_STOP_TOKENS))
        allowed = self.allowed_token_ids
        object.__setattr__(self, "allowed_token_ids", _token_ids("allowed_token_ids", allowed, _MAX_ALLOWED_TOKENS))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.speculation is not None and not isinstance(self.speculation, str):
            _refuse("speculation", self.speculation, "must be the name of a proposer, or 'none'")
        if not isinstance(self.lora_name, str):
            _refuse("lora_name", self.lora_name, "must be the name of an adapter")
        object.__setattr__(self, "structured_outputs", GrammarSpec.parse(self.structured_outputs))
        if self.structured_outputs is not None and self.min_tokens:
            _refuse("min_tokens", self.min_tokens, "must be 0 with a grammar, which alone says where the text may end")
        if self.temperature < _LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"must be at most max_tokens = {self.max_tokens}")
        if self.best_of is not None and self.best_of < self.n:
            _refuse("best_of", self.best_of, f"must be at least n = {self.n}")
        if self.truncate_prompt_tokens == 0:
            _refuse("truncate_prompt_tokens", 0, "must be at least 1, or -1")
        self._check_beams()

    def _check_beams(self) -> None:
        defaults = {each.name: each.default for each in fields(self)}
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != defaults[name]:
                    _refuse(name, getattr(self, name), "needs use_beam_search")
            return
        for name in _NOT_WITH_BEAMS:
            if getattr(self, name) != defaults[name]:
                value = getattr(self, name)
                _refuse(name, getattr(value, "text", value), "must be absent with use_beam_search")
        if not self.max_tokens:
            _refuse("max_tokens", 0, "must be at least 1 with use_beam_search")

    @classmethod
    def from_json(cls, text: str, defaults: Mapping[str, object] | None = None) -> Self:
        """Parse a JSON object whose keys are the field names; null counts as absent, and empty text as ``{}``.

        ``defaults`` are for absent fields. ``stop`` may be a single string, ``top_k`` -1; numbers may be quoted, as
        clients of Triton's vLLM backend send them. ``response_format`` and ``guided_*`` are other names of
        ``structured_outputs``.

        Raises:
            InvalidArgumentError: It is not a JSON object, or a name, a type or a value is not allowed.
        """
        try:
            values = json.loads(text or "{}", parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"sampling parameters must be a JSON object: {error}") from error
        if not isinstance(values, dict):
            raise InvalidArgumentError(f"sampling parameters must be a JSON object, got {_shown(values)}")
        names = [*(each.name for each in fields(cls)), *ALIASES]
        for name in values:
            if name not in names:
                raise InvalidArgumentError(
                    f"unknown sampling parameter {_shown(name)}{suggestion(name, names)}; allowed are "
                    f"{', '.join(names)}"
                )
        given = {name: value for name, value in fold_aliases(values).items() if value is not None}
        if given.get("use_beam_search"):
            defaults = None  # they are for sampling
        values = {name: _unquoted(name, value) for name, value in {**(defaults or {}), **given}.items()}
        if given.get("allowed_token_ids") == []:
            _refuse("allowed_token_ids", [], "must have a token; leave it out for any")
        if values.get("top_k") == -1:
            values["top_k"] = 0
        return cls(**values)

    @property
    def ignores_eos(self) -> bool:
        """Whether end-of-text tokens do not end it; a grammar's end is the end."""
        return self.ignore_eos and self.structured_outputs is None

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far, or are biased."""
        return bool(
            self.logit_bias
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.min_tokens
        )


def _unquoted(name: str, value: object) -> object:
    if name in _BOUNDS and isinstance(value, str) and _NUMBER.fullmatch(value):
        return json.loads(value)
    return value


def _number(name: str, value: object, is_real: bool) -> float:
    if type(value) is not int and not (is_real and type(value) is float and math.isfinite(value)):
        _refuse(name, value, "must be a finite number" if is_real else "must be a whole number")
    least, most = _BOUNDS[name]
    if not least <= value <= most:
        off = ", or -1 for all tokens" if name == "top_k" else ""
        _refuse(name, value, f"must be from {least} to {most}{off}")
    return float(value) if is_real else value


def _texts(name: str, value: object, most: int) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if (
        not isinstance(strings, (list, tuple))
        or len(strings) > most
        or not all(isinstance(string, str) and 0 < len(string) <= _MAX_STOP_CHARS for string in strings)
    ):
        limits = f"at most {most} texts of 1 to {_MAX_STOP_CHARS} characters"
        _refuse(name, value, f"must be a text or a list of {limits}")
    return tuple(strings)


def _token_ids(name: str, value: object, most: int) -> tuple[int, ...]:
    if (
        not isinstance(value, (list, tuple))
        or len(value) > most
        or not all(type(token) is int and 0 <= token <= _INT32_MAX for token in value)
    ):
        _refuse(name, value, f"must be a list of at most {most} token ids")
    return tuple(value)


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    allowed = f"must map at most {_MAX_BIASES} token ids to numbers from {-_MAX_BIAS:g} to {_MAX_BIAS:g}"
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, (list, tuple)) and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in value):
        pairs = list(value)
    else:
        _refuse("logit_bias", value, allowed)
    biases: dict[int, float] = {}
    for key, bias in pairs:
        is_token = type(key) is int or (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10)
        if (
            not is_token
            or not 0 <= int(key) <= _INT32_MAX
            or type(bias) not in (int, float)
            or not abs(bias) <= _MAX_BIAS
        ):
            _refuse("logit_bias", {key: bias}, allowed)
        biases[int(key)] = float(bias)
    if len(pairs) > _MAX_BIASES:
        _refuse("logit_bias", value, allowed)
    return tuple(sorted(biases.items()))


def _refuse(name: str, value: object, problem: str) -> NoReturn:
    raise InvalidArgumentError(f"sampling parameter {name} {problem}, got {_shown(value)}")


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _shown(value: object) -> str:
    # The value is untrusted: the message must not repeat megabytes of it, nor fail on a number of 5000 digits.
    if type(value) is int and abs(value) > _INT64_MAX:
        return "a number beyond 64 bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class TokenLogprobs(NamedTuple):
    """Log probabilities at one sampled token, of the model's distribution before penalties and temperature.

    ``logprob`` is that of the sampled token; ``top_ids`` are the most likely tokens, best first, as many as the request
    asked for, possibly none.
    """

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class StepLogprobs(NamedTuple):
    """Log probabilities at some rows of a step, of the model's distribution before penalties and temperature.

    Attributes:
        sampled: Of the token that follows, sampled or of the prompt, float32 ``[S]``.
        top_ids: The most likely tokens of each row, best first, int32 ``[S, k]``; ``k`` is the largest number asked
            for.
        top: Of ``top_ids``, float32 ``[S, k]``.
    """

    sampled: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top: npt.NDArray[np.float32]

    def part(self, start: int, end: int) -> "StepLogprobs":
        """The rows from ``start`` to ``end``."""
        return StepLogprobs(self.sampled[start:end], self.top_ids[start:end], self.top[start:end])

    def row(self, row: int, num_top: int) -> TokenLogprobs:
        """One row, with ``num_top`` of the most likely tokens."""
        top_ids, top = self.top_ids[row, :num_top], self.top[row, :num_top]
        return TokenLogprobs(float(self.sampled[row]), tuple(top_ids.tolist()), tuple(top.tolist()))


@dataclass(slots=True, eq=False)
class Delta:
    """New tokens of one choice of a request, or the error that ended the request.

    Attributes:
        choice: Index of the choice, from 0 to ``params.n - 1``; -1 with an error, which ends every choice.
        token_ids: New tokens, oldest first, including a token that ended the choice, such as end of text.
        logprobs: One entry per token of ``token_ids``; None if the request did not ask for them.
        finish_reason: ``""`` while the choice is unfinished; ``"stop"`` at a stop token, ``"length"`` at ``max_tokens``
            or the end of the context; ``HELD`` and ``RELEASED`` of a request with ``hold_s``.
        error: Why the request failed; ``token_ids`` is empty then.
        num_cached_tokens: Prompt tokens found in the prefix cache when the choice was first scheduled.
        prompt_logprobs: With the first delta of choice 0, if asked for: of each token of the prompt after the first,
            in pieces.
    """

    request: "EngineRequest"
    choice: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str = ""
    error: WeftError | None = None
    is_last: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[StepLogprobs] | None = None


Sink = Callable[[Delta], None]


@dataclass(slots=True, eq=False)
class Adapter:
    """A loaded adapter.

    Attributes:
        digest: Of its weights, 16 bytes, the same in all processes.
        requests: Those that use it and have not ended.
        is_unloaded: No request may use it any more; its slot is free once the last has ended.
    """

    name: str
    folder: Path
    slot: int
    digest: bytes
    requests: "set[EngineRequest]" = field(default_factory=set)
    is_unloaded: bool = False


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A prompt to continue. The caller creates it and passes it to ``Engine.submit``, which owns it from then on.

    Attributes:
        prompt_ids: Tokens of the prompt, int32, 1-D. Not modified.
        sink: Receives every delta, on the engine's thread, so it must not block. If it raises, the request is
            cancelled.
        level: Priority level; a smaller one is served sooner.
        arrival_ns: Arrival time by the engine's clock; 0: when it is submitted.
        deadline_ns: Time by the same clock at which it fails with ``DeadlineExceededError``, waiting or running. None:
            no deadline.
        salt: Requests with different salts share no cached prefix. Use one per tenant to isolate tenants.
        bad_words: Token ids of texts that the output must not have.
        resume_token_ids: Tokens of the output that were made and delivered before, as by an engine that was lost; the
            sequence goes on behind them as if it had sampled them itself.
        slo_ttft_ms: Time-to-first-token objective, for goodput, in milliseconds; 0: the engine's.
        slo_tpot_ms: Time-per-output-token objective, for goodput, in milliseconds; 0: the engine's.
        hold_s: Above 0: end after the first token, with the finish reason ``HELD``, and keep the blocks of the prompt
            for so long; the last delta then says ``RELEASED``. For one choice, of which more tokens may come.
        lease: Name of that lease; nobody can guess it.
        is_cancelled: Set by ``Engine.cancel``; no further delta is delivered.
        block_hashes: Hashes of the leading full blocks of the prompt, as far as they are known. Owned by the engine.
        unique_prompt_ids: Tokens of the prompt, each once, where penalties need them; None: unknown. Owned by the
            engine.
        grammar: That which ``params`` asks for. Owned by the engine.
        adapter: Likewise.
    """

    prompt_ids: npt.NDArray[np.int32]
    params: SamplingParams
    sink: Sink
    level: int = 0
    arrival_ns: int = 0
    deadline_ns: int | None = None
    salt: bytes = b""
    bad_words: tuple[tuple[int, ...], ...] = ()
    resume_token_ids: tuple[int, ...] = ()
    id: str = ""
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0
    hold_s: float = 0.0
    lease: str = ""
    is_cancelled: bool = False
    block_hashes: list[bytes] = field(default_factory=list)
    unique_prompt_ids: npt.NDArray[np.int32] | None = None
    grammar: GrammarTicket | None = None
    adapter: Adapter | None = None

    @property
    def cache_key(self) -> bytes:
        """Requests with different keys share no cached prefix: of the adapter, and the salt."""
        return (bytes(16) if self.adapter is None else self.adapter.digest) + self.salt
