"""Grammars of structured output, by ``llguidance``: compiled by threads of their own, followed token by token."""

import importlib
import json
import re
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from weft.base.errors import (
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedError,
    WeftError,
)
from weft.llm.structured_outputs import LARK_START, WHITESPACE, GrammarSpec

#: At most this many grammars are kept, with this much text.
_MAX_CACHED, _MAX_CACHED_BYTES = 256, 16 << 20
_MAX_PENDING = 256
_NUM_THREADS = 2
#: A special token whose name has brackets of its own, which Lark cannot name; a text, where it is no special token.
_SPECIAL = re.compile(r"<(\[[A-Z_]+\])>")
#: GBNF is translated to Lark, in time that is quadratic in its rules.
_MAX_GBNF_CHARS = 16 << 10
#: Time to find the place of an error in a schema.
_MAX_PLACE_S = 0.2
_MAX_MESSAGE_CHARS = 600
#: Most forced tokens that become drafts in a step, and most occasions to leave out after rejected ones.
_MAX_FORCED, _MAX_PAUSE = 16, 64
#: Most bytes that must follow at the start, and time of masks that a sequence may take: at first, and with each token.
_MAX_FORCED_BYTES = 8192
_MASKS_S, _MASK_OF_TOKEN_S = 1.0, 0.01
_SUBSCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SUBSCHEMA = ("items", "additionalProperties", "anyOf", "oneOf", "allOf", "prefixItems", "not", "if", "then", "else")


class TokenTable(NamedTuple):
    """The tokens of a model.

    Attributes:
        tokens: Bytes of each within a text; b"" for an id without a token, which never comes.
        special_ids: Tokens that are no text.
        encode: Tokens of a text, which need not be exact.
    """

    tokens: list[bytes]
    special_ids: list[int]
    encode: Callable[[str], list[int]]


class GrammarMatcher:
    """Where one sequence stands in its grammar. Not thread-safe.

    Attributes:
        error: Why the sequence cannot go on; "" if it can.
        is_forced: Whether the drafts of the current step are those of ``forced``.
    """

    __slots__ = ("_left_s", "_matcher", "_pause", "_step", "error", "is_forced")

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._left_s = _MASKS_S
        self._pause = self._step = 0
        self.error = ""
        self.is_forced = False

    def append(self, token: int) -> None:
        """Advance by a sampled token."""
        if not self._matcher.try_consume_tokens([token]) and not self._matcher.is_stopped():
            self._fail(f"token {token} does not follow it")

    def resume(self, token_ids: Seq[int]) -> None:
        """Advance by the tokens of an output that is to go on; ``error`` if they do not follow the grammar."""
        num_taken = self._matcher.try_consume_tokens(list(token_ids))
        if num_taken < len(token_ids):
            self.error = (
                f"resume_token_ids: token {token_ids[num_taken]} at index {num_taken} does not follow the grammar of "
                "the request; send the tokens that this request was answered with"
            )

    def forced(self, most: int) -> list[int]:
        """The tokens that must follow, at most ``most``; fewer while the model spells that text otherwise."""
        if self._pause:
            self._pause -= 1
            return []
        return list(self._matcher.compute_ff_tokens()[: min(most, _MAX_FORCED)])

    def observe(self, num_accepted: int) -> None:
        """Report how many of the forced drafts were accepted."""
        self._step = 0 if num_accepted else min(2 * self._step + 1, _MAX_PAUSE)
        self._pause = self._step

    def num_valid(self, drafts: Seq[int]) -> int:
        """How many leading ``drafts`` the grammar allows."""
        return int(self._matcher.validate_tokens(list(drafts)))

    def fill(self, drafts: Seq[int], masks: npt.NDArray[np.int32]) -> None:
        """Write the mask of the next token, and of that after each of ``drafts``, to the rows of ``masks``.

        A row behind a draft that is not allowed is left as it is: its sample is not used.
        """
        matcher, num_bytes = self._matcher, masks.shape[1] * masks.itemsize
        address, num_taken = masks.ctypes.data, 0
        start_s = time.thread_time()
        matcher.unsafe_compute_mask_ptr(address, num_bytes)
        for draft in drafts:
            if not matcher.try_consume_tokens([draft]):
                break
            num_taken += 1
            matcher.unsafe_compute_mask_ptr(address + num_taken * num_bytes, num_bytes)
        if matcher.is_error():
            self._fail(_first_line(matcher.get_error()))
        elif num_taken:
            matcher.rollback(num_taken)
        self._left_s = min(self._left_s - (time.thread_time() - start_s) + _MASK_OF_TOKEN_S, _MASKS_S)
        if self._left_s < 0:
            self._fail(f"a token takes more than {_MASK_OF_TOKEN_S * 1e3:g} ms")

    def _fail(self, reason: str) -> None:
        self.error = self.error or f"structured output cannot go on here: {reason}; simplify the grammar"


class TokenMask(Protocol):
    """What says which tokens may follow: a ``GrammarMatcher``, or a ``TokenFilter``."""

    def fill(self, drafts: Seq[int], masks: npt.NDArray[np.int32]) -> None:
        """See ``GrammarMatcher.fill``."""


class GrammarRows(NamedTuple):
    """The sample rows of a step that follow a grammar, or have their tokens filtered.

    Attributes:
        seqs: Of each sequence its matcher, its drafts, and how many drafts of the step come before them.
        rows: The sample rows, int32 ``[M]``, ascending.
    """

    seqs: list[tuple[TokenMask, list[int], int]]
    rows: npt.NDArray[np.int32]

    @classmethod
    def of(cls, seqs: Iterator[tuple[TokenMask | None, list[int]]]) -> "GrammarRows | None":
        """Those of sequences with their drafts, in the order of the sample rows; None if no sequence has a grammar."""
        followed, rows = [], array("i")
        row = num_drafts = 0
        for matcher, drafts in seqs:
            if matcher is not None:
                followed.append((matcher, drafts, num_drafts))
                rows.extend(range(row, row + 1 + len(drafts)))
            row += 1 + len(drafts)
            num_drafts += len(drafts)
        return cls(followed, np.array(rows, np.int32)) if followed else None

    def part(self, samples: npt.NDArray[np.int64]) -> "GrammarRows | None":
        """Those of some sample rows of the step, ascending, by their places among these; None if none has a grammar."""
        is_in = np.isin(self.rows, samples)
        counts = [1 + len(drafts) for _, drafts, _ in self.seqs]
        followed = [each for each, end in zip(self.seqs, np.cumsum(counts), strict=True) if is_in[end - 1]]
        return GrammarRows(followed, np.searchsorted(samples, self.rows[is_in]).astype(np.int32)) if followed else None

    def fill(self, masks: npt.NDArray[np.int32], draft_ids: npt.NDArray[np.int32] | None) -> None:
        """Write a bit for each token, 1 if it may follow, to ``masks``: int32 ``[M, ceil(V / 32)]``.

        ``draft_ids``: all drafts of the step, if the plan did not know them.
        """
        row = 0
        for matcher, drafts, offset in self.seqs:
            known = drafts if draft_ids is None else draft_ids[offset : offset + len(drafts)].tolist()
            masks[row + 1 : row + 1 + len(drafts)] = -1
            matcher.fill(known, masks[row : row + 1 + len(drafts)])
            row += 1 + len(drafts)


@dataclass(slots=True)
class _Job:
    """A grammar that is being compiled, or has been, for any number of requests; ``compile_s`` until it is counted."""

    future: Future[Any] = field(default_factory=Future)
    compile_s: float | None = None
    num_waiting: int = 0


class GrammarTicket:
    """A request's claim to a grammar.

    Attributes:
        matchers: Of each choice of the request, at the start of the grammar, once ``is_ready``.
        error: Why there are none.
    """

    def __init__(self, compiler: "GrammarCompiler", job: _Job, name: str) -> None:
        self.matchers: list[GrammarMatcher] = []
        self.error: WeftError | None = None
        self.is_ready = False
        self.timeout_ns = compiler.timeout_ns
        self._compiler = compiler
        self._job = job
        self._name = name

    def finish(
        self, future: Future[Any], count: int, on_ready: Callable[[], None], resume_token_ids: Seq[int] = ()
    ) -> None:
        """Take ``count`` matchers behind ``resume_token_ids``, or the error, of a job that has ended."""
        if future.cancelled():
            return
        if (error := future.exception()) is None:
            self.matchers = [GrammarMatcher(future.result().deep_copy()) for _ in range(count)]
            for matcher in self.matchers if resume_token_ids else ():
                matcher.resume(resume_token_ids)
                self.error = InvalidArgumentError(matcher.error) if matcher.error else self.error
        else:
            self.error = InvalidArgumentError(f"{self._name}{error}")
        self.is_ready = True
        on_ready()

    def leave(self) -> None:
        """Stop waiting; what nobody waits for is not compiled."""
        self._compiler.leave(self._job)

    def take_compile_s(self) -> float | None:
        """How long the compilation took, in seconds; None: another request of the engine counted it."""
        seconds, self._job.compile_s = self._job.compile_s, None
        return seconds

    def timeout_error(self) -> WeftError:
        """Why the request fails after ``timeout_ns``."""
        seconds = f"{self._name} was not compiled within {self.timeout_ns / 1e9:g} s (grammar_timeout_s)"
        if self._job.future.running():
            return InvalidArgumentError(f"{seconds}; simplify it")
        return ResourceExhaustedError(f"{seconds}, behind other grammars; try again later")


class GrammarCompiler:
    """Compiles grammars for the tokens of one model, and keeps them. Thread-safe.

    Args:
        table: Reads the model's tokens; None: it has no tokenizer, so it takes no grammar.
        eos_token_ids: Tokens that end a text.
        timeout_s: How long a request waits for its grammar, in seconds.
        compile_grammar: Makes the prototype of the matchers from a grammar; for tests.
    """

    def __init__(
        self,
        table: Callable[[], TokenTable] | None,
        eos_token_ids: Seq[int],
        *,
        timeout_s: float,
        compile_grammar: Callable[[GrammarSpec], Any] | None = None,
    ) -> None:
        self.timeout_ns = round(timeout_s * 1e9)
        self._compile_grammar = compile_grammar or self._compiled
        self._refusal = ""
        self._tokenizer: Any = None
        self._jobs: OrderedDict[tuple[str, str, bool], _Job] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()
        # Its threads are awaited at the end of the process: to end one that compiles would crash it.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="llm-grammar")
        if table is None:
            self._refusal = "the model's folder has no tokenizer; add its tokenizer.json"
        elif not eos_token_ids:
            self._refusal = "the model's configuration has no eos_token_id, which ends a text; add it"
        else:
            self._load(table, list(eos_token_ids))

    def submit(
        self, spec: GrammarSpec, count: int, on_ready: Callable[[], None], resume_token_ids: Seq[int] = ()
    ) -> GrammarTicket:
        """Compile a grammar for ``count`` sequences that have these tokens, unless it has been or is being compiled.

        ``on_ready`` is called when the ticket is ready, on this thread or on the one that compiles.

        Raises:
            UnsupportedError: The model or this installation takes no grammars; the message has the cure.
            ResourceExhaustedError: Too many grammars wait.
            UnavailableError: It is closed.
        """
        if self._refusal:
            raise UnsupportedError(f"{spec.name}: structured output is not available: {self._refusal}")
        key = (spec.kind, spec.text, spec.is_compact)
        with self._lock:
            job = self._jobs.get(key)
            if job is None or job.future.cancelled():
                if self._threads._work_queue.qsize() >= _MAX_PENDING:
                    raise ResourceExhaustedError(f"{_MAX_PENDING} grammars wait to be compiled; try again later")
                started = _Job()
                try:
                    started.future = self._threads.submit(self._run, started, spec)
                except RuntimeError:
                    raise UnavailableError("the engine has stopped") from None
                self._num_bytes += len(spec.text) if job is None else 0
                job = self._jobs[key] = started
            job.num_waiting += 1
            self._jobs.move_to_end(key)
            while len(self._jobs) > _MAX_CACHED or (self._num_bytes > _MAX_CACHED_BYTES and len(self._jobs) > 1):
                (_, text, _), _ = self._jobs.popitem(last=False)
                self._num_bytes -= len(text)
        ticket = GrammarTicket(self, job, spec.name)
        job.future.add_done_callback(lambda future: ticket.finish(future, count, on_ready, resume_token_ids))
        return ticket

    def leave(self, job: _Job) -> None:
        """One request less waits for a job."""
        with self._lock:
            job.num_waiting -= 1
            if not job.num_waiting:
                job.future.cancel()

    def close(self) -> None:
        """Drop what waits; what is being compiled is not awaited."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, job: _Job, spec: GrammarSpec) -> Any:
        start_s = time.perf_counter()
        try:
            return self._compile_grammar(spec)
        except Exception as error:
            raise error if isinstance(error, _GrammarError) else _GrammarError(str(error)) from None
        finally:
            job.compile_s = time.perf_counter() - start_s

    def _load(self, table: Callable[[], TokenTable], eos_token_ids: list[int]) -> None:
        try:
            self._library = importlib.import_module("llguidance")
        except ImportError:
            self._refusal = "the package llguidance is not installed; pip install 'weft-mesh[grammar]'"
            return
        self._limits = self._library.LLParserLimits(verbose_errors=False)
        tokens = table()
        self._special = {tokens.tokens[each].decode(errors="replace"): f"<[{each}]>" for each in tokens.special_ids}
        self._tokenizer = self._library.LLTokenizer(_Tokenizer(tokens, eos_token_ids[0]), eos_token=eos_token_ids)

    def _compiled(self, spec: GrammarSpec) -> Any:
        matcher = self._library.LLMatcher(self._tokenizer, self._source(spec), log_level=0, limits=self._limits)
        matcher.compute_bitmask()  # what the first mask takes is spent here, and kept by copies
        if not matcher.is_error() and (num_forced := len(matcher.compute_ff_bytes())) > _MAX_FORCED_BYTES:
            raise _GrammarError(f"it forces {num_forced} bytes at once, at most {_MAX_FORCED_BYTES} are taken")
        if not matcher.is_error():
            return matcher
        message = _first_line(matcher.get_error())
        place = self._place(json.loads(spec.text), message) if spec.kind == "json" else ""
        raise _GrammarError(message, place)

    def _source(self, spec: GrammarSpec) -> str:
        library = self._library
        if spec.kind == "json":
            is_compact = spec.is_compact or _is_compact(json.loads(spec.text))
            whitespace = {"whitespace_flexible": False} if is_compact else {"whitespace_pattern": WHITESPACE}
            return str(library.LLMatcher.grammar_from_json_schema(spec.text, defaults=whitespace))
        text = _SPECIAL.sub(lambda name: self._special.get(name[1], json.dumps(name[1])), spec.text)
        is_gbnf = spec.kind == "grammar" and not LARK_START.search(spec.text)
        if is_gbnf and len(spec.text) > _MAX_GBNF_CHARS:
            raise _GrammarError(f"it has {len(spec.text)} characters, of GBNF at most {_MAX_GBNF_CHARS} are taken")
        return str(library.grammar_from("gbnf" if is_gbnf else spec.kind.replace("grammar", "lark"), text))

    def _place(self, root: Any, message: str) -> str:
        """Pointer to the innermost part of a schema that is refused with the same message; "" if it is the whole."""
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        schema, place, seen = root, "", {""}
        end_s = time.perf_counter() + _MAX_PLACE_S
        while True:
            for pointer, part in _parts(root, schema, place):
                if pointer in seen or not isinstance(part, Mapping) or time.perf_counter() > end_s:
                    continue
                grammar = self._library.LLMatcher.grammar_from_json_schema(json.dumps({**definitions, **part}))
                if _first_line(self._library.LLMatcher.validate_grammar(grammar)) == message:
                    schema, place = part, pointer
                    seen.add(pointer)
                    break
            else:
                return place


class _Tokenizer:
    """The interface that ``llguidance`` reads a tokenizer by."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable, eos_token_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = table.tokens, table.special_ids, eos_token_id
        self._table = table
        self._id_of_byte = {token: number for number, token in enumerate(table.tokens) if len(token) == 1}

    def __call__(self, text: str) -> list[int]:
        """Tokens whose bytes are exactly those of the text, or as many of its leading bytes as have a token each."""
        data = text.encode()
        token_ids = self._table.encode(text)
        if b"".join(self.tokens[token] for token in token_ids if token < len(self.tokens)) == data:
            return token_ids
        return [self._id_of_byte[data[at : at + 1]] for at in range(len(data)) if data[at : at + 1] in self._id_of_byte]


def _is_compact(schema: Any) -> bool:
    """Whether the schema itself asks for no whitespace, which a default pattern would overrule."""
    own = schema.get("x-guidance") if isinstance(schema, Mapping) else None
    return isinstance(own, Mapping) and own.get("whitespace_flexible") is False


def _parts(root: Any, schema: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Pointer and content of the schemas directly in a schema, and of the one that it refers to."""
    for key in _SUBSCHEMAS:
        for name, part in (schema.get(key) or {}).items() if isinstance(schema.get(key), Mapping) else ():
            yield f"{place}/{key}/{name.replace('~', '~0').replace('/', '~1')}", part
    for key in _SUBSCHEMA:
        if isinstance(part := schema.get(key), list):
            yield from ((f"{place}/{key}/{index}", each) for index, each in enumerate(part))
        else:
            yield f"{place}/{key}", part
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        part = root
        for name in reference[2:].split("/"):
            part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
        yield reference[1:], part


def _first_line(message: str) -> str:
    """The message without dumps of state."""
    if message.startswith("panic"):
        return "it is too large"
    return message.split("\n<", maxsplit=1)[0].strip()[:_MAX_MESSAGE_CHARS]


class _GrammarError(ValueError):
    """Why a grammar is refused, without the name of the request's field."""

    def __init__(self, message: str, place: str = "") -> None:
        at = f" at #{place}" if place else ""
        super().__init__(
            f"{at} cannot be a grammar: {message}; change it, docs/structured-output.md lists what is supported"
        )
