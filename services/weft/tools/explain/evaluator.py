"""Tensors with known datatype and shape but unknown values, and conditions evaluated over them."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import product
from typing import Any, cast

from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import ITEMSIZE_BYTES, WireTensor, encode_bytes, num_elements
from weft.language.plan import OK, Condition, Frame, NodePlan, StepPlan
from weft.language.request_scope import RequestScope
from weft.language.types.expression import Use, read_expression
from weft.router.tensors import split

#: In the message of a condition that failed only because it needs such a value.
_UNKNOWN_VALUE = "(the value is not known yet)"
#: What depends on values of rows that went their own paths.
SOME_ROWS = ("the rows that come here",)
_MAX_ORIGINS = 3
#: A row of more elements is represented by a row of one, which costs no memory.
_MAX_ELEMENTS = 4096
_STRING = b"\xabweft: not known\xab"
_BYTE = b"\xab"
#: Tensors that may be absent: both paths are tried, for so many of them.
_MAX_UNSURE = 6
_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Partial knowledge of a tensor.

    Attributes:
        shape: As far as known, else -1.
        origins: What it depends on, for people: ``LANG of lid -> lang_id``.
    """

    shape: tuple[int, ...]
    origins: tuple[str, ...]
    may_be_absent: bool = False


class Known(WireTensor):
    """A tensor given by the request or the plan."""


class Unknown(WireTensor):
    """A placeholder: its shape is a possible one, its elements are meaningless."""

    known: Knowledge

    @classmethod
    def of(cls, datatype: str, known: Knowledge, shape: Sequence[int]) -> "Unknown":
        """A placeholder of a possible shape, with 1 for -1."""
        shape = tuple(1 if size < 0 else size for size in shape)
        count = num_elements(shape)
        is_text = datatype == "BYTES"
        data = encode_bytes([_STRING] * count) if is_text else _BYTE * (ITEMSIZE_BYTES.get(datatype, 1) * count)
        tensor = cls(datatype, shape, data)
        tensor.known = known
        return tensor

    def _replace(self, **changes: Any) -> "Unknown":
        """As of any named tuple; of another shape, sizes are as unknown as they were."""
        shape = tuple(changes.get("shape", self.shape))
        is_open = -1 in self.known.shape[1:]
        rest = (-1,) * len(shape[1:]) if is_open else shape[1:]
        rows = self.known.shape[:1] if shape[:1] == self.shape[:1] else shape[:1]
        known = replace(self.known, shape=(*rows, *rest))
        return Unknown.of(changes.get("datatype", self.datatype), known, (*shape[:1], *small(shape[1:])))


def small(dims: Sequence[int]) -> tuple[int, ...]:
    """Dims for a placeholder's row: the same, unless they have too many elements."""
    dims = tuple(dims)
    return dims if num_elements(max(size, 1) for size in dims) <= _MAX_ELEMENTS else (1,) * len(dims)


def placeholder(spec: TensorSpec, num_rows: int | None, origin: str, *, is_open: bool = False) -> Unknown:
    """A placeholder for a declared tensor.

    Args:
        num_rows: Size of its batch dimension; None without one.
        origin: What gives it.
        is_open: The number of rows is only a possible one.
    """
    rows = () if num_rows is None else (num_rows,)
    known = Knowledge((*((-1,) if is_open and rows else rows), *spec.dims), (origin,))
    return Unknown.of(spec.datatype, known, (*rows, *small(spec.dims)))


def resolved(tensor: WireTensor | None) -> WireTensor | None:
    """Turn rows cut from a placeholder, or a tensor without bytes, back into a placeholder; return others unchanged."""
    if tensor is None or isinstance(tensor, (Known, Unknown)):
        return tensor
    is_text = tensor.datatype == "BYTES"
    is_marked = (not tensor.data or _STRING in tensor.data) if is_text else not tensor.data.strip(_BYTE)
    if not is_marked:
        return tensor
    shape = (*tensor.shape[:1], *(-1 for _ in tensor.shape[1:]))
    return Unknown.of(tensor.datatype, Knowledge(shape, SOME_ROWS), tensor.shape)


def vague(tensor: WireTensor) -> Unknown:
    """A placeholder for unknown rows of a tensor, with as many rows as ``tensor``."""
    known = tensor.known if isinstance(tensor, Unknown) else Knowledge(tensor.shape, SOME_ROWS)
    return Unknown.of(tensor.datatype, replace(known, shape=(-1, *known.shape[1:])), tensor.shape)


def key_of(tensor: WireTensor | None) -> object:
    """A key, equal for indistinguishable tensors."""
    return (tensor.datatype, tensor.shape, tensor.known) if isinstance(tensor, Unknown) else tensor


def joined(tensors: Iterable[WireTensor | None]) -> WireTensor | None:
    """Knowledge of a slot that holds one of ``tensors``: what is true of all of them."""
    choices = list({key_of(tensor): tensor for tensor in tensors}.values())
    if len(choices) <= 1:
        return choices[0] if choices else None
    present = [tensor for tensor in choices if tensor is not None]
    unknown = [tensor.known for tensor in present if isinstance(tensor, Unknown)]
    shapes = [tensor.known.shape if isinstance(tensor, Unknown) else tensor.shape for tensor in present]
    shape = tuple(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=False))
    origins = tuple(dict.fromkeys(origin for known in unknown for origin in known.origins))[:_MAX_ORIGINS]
    may_be_absent = len(present) < len(choices) or any(known.may_be_absent for known in unknown)
    known = Knowledge(shape, origins or ("the branch taken",), may_be_absent)
    return Unknown.of(present[0].datatype, known, present[0].shape)


class _Unread:
    """A placeholder's values while a condition is tried: it has a shape, but unreadable elements.

    ``was_read`` tells whether the condition tried to read them.
    """

    def __init__(self, tensor: Unknown) -> None:
        self.datatype = tensor.datatype
        self._shape = tensor.known.shape
        self.was_read = False

    @property
    def shape(self) -> tuple[int, ...]:
        """A possible one; where a row's dims are not known, it counts as elements do."""
        self.was_read = self.was_read or min(self._shape[1:], default=0) < 0
        return tuple(1 if size < 0 else size for size in self._shape)

    @property
    def data(self) -> bytes:
        self.was_read = True
        raise InvalidArgumentError(_UNKNOWN_VALUE)

    def __iter__(self) -> object:
        return self.data


def _sized(tensor: Unknown) -> WireTensor:
    """The tensor where only its shape is looked at: in place of bytes it has something as long as they are."""
    shape = tensor.known.shape
    length = num_elements(shape) * ITEMSIZE_BYTES.get(tensor.datatype, 0)
    return WireTensor(tensor.datatype, shape, cast(bytes, range(length)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of evaluating a condition.

    Attributes:
        value: Its value, if ``is_known`` and there is no error.
        is_known: False: it depends on ``depends_on``.
        error: Why it cannot be evaluated; if it is not known, why that may happen.
        depends_on: Tensors, named like ``Knowledge.origins``.
    """

    value: object = None
    is_known: bool = True
    error: str = ""
    depends_on: tuple[str, ...] = ()

    @property
    def fails(self) -> bool:
        """Whether it certainly cannot be evaluated."""
        return self.is_known and bool(self.error)


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates conditions of one request.

    Attributes:
        scope: Request data visible to them besides tensors; without deadline.
        remaining_ms: Time left on arrival; None without deadline.
    """

    scope: RequestScope
    remaining_ms: float | None = None

    def verdict(self, condition: Condition, frame: Frame) -> Verdict:
        """Evaluate the condition; known only if it has one value for all possible unknown values."""
        tensors = {slot: tensor for _, slot in condition.tensors if isinstance(tensor := frame[slot], Unknown)}
        if not tensors:
            return self._evaluated(condition, frame)
        base = frame.copy()
        only_sized = _size_only(condition.source)
        for name, slot in condition.tensors:
            if slot in tensors:
                is_sized = name in only_sized and min(tensors[slot].known.shape, default=0) >= 0
                base[slot] = _sized(tensors[slot]) if is_sized else cast(WireTensor, _Unread(tensors[slot]))
        unsure = [slot for slot, tensor in tensors.items() if tensor.known.may_be_absent][:_MAX_UNSURE]
        trials = []
        for absent in product((False, True), repeat=len(unsure)):
            trial = base.copy()
            for slot, is_absent in zip(unsure, absent, strict=True):
                trial[slot] = None if is_absent else trial[slot]
            trials.append(self._evaluated(condition, trial))
        if all(trial == trials[0] for trial in trials) and trials[0].is_known:
            return trials[0]
        error = next((trial.error for trial in trials if trial.error and _UNKNOWN_VALUE not in trial.error), "")
        origins = dict.fromkeys(origin for tensor in tensors.values() for origin in tensor.known.origins)
        return Verdict(is_known=False, error=error, depends_on=tuple(origins))

    def row_verdicts(
        self, condition: Condition, frame: Frame, num_rows: int, numbers: Sequence[int]
    ) -> Sequence[Verdict]:
        """The same for each row of the frame's tensors."""
        slots = [slot for _, slot in condition.tensors]
        if not any(isinstance(frame[slot], Unknown) for slot in slots):
            try:
                values = condition.evaluate_rows(frame, self._timed(), num_rows, numbers)
            except InvalidArgumentError as error:
                return [Verdict(error=error.message)] * num_rows
            return [Verdict(value) for value in values]
        return [self.verdict(condition, view) for view in _rows(frame, slots, num_rows)]

    def _timed(self) -> RequestScope:
        if self.remaining_ms is None:
            return self.scope
        return replace(self.scope, deadline_ns=time.monotonic_ns() + int((self.remaining_ms + 0.9) * _NS_PER_MS))

    def _evaluated(self, condition: Condition, frame: Frame) -> Verdict:
        """Evaluate one frame; an error is certain only if no unknown element was read."""
        hidden = [tensor for tensor in cast(list[object], frame) if isinstance(tensor, _Unread)]
        for tensor in hidden:
            tensor.was_read = False
        try:
            return Verdict(condition.evaluate(frame, self._timed()))
        except InvalidArgumentError as error:
            return Verdict(is_known=not any(tensor.was_read for tensor in hidden), error=error.message)


def conditions_in(part: object, owner: object = None, name: str = "") -> Iterator[tuple[object, str, Condition]]:
    """Every condition of a plan: its step or node, the name of its field, and itself."""
    if isinstance(part, tuple):
        for item in part:
            yield from conditions_in(item, owner, name)
    elif hasattr(part, "evaluate_rows"):
        yield owner, name, cast(Condition, part)
    elif is_dataclass(part) and not isinstance(part, (ModelSignature, type)):
        owner = part if isinstance(part, (StepPlan, NodePlan)) else owner
        for one in fields(part):
            yield from conditions_in(getattr(part, one.name), owner, one.name)


def _rows(frame: Frame, slots: Sequence[int], num_rows: int) -> Iterator[Frame]:
    """For each row a frame with that row of the tensors in ``slots``."""
    for row in range(num_rows):
        view: Frame = [None] * len(frame)
        for slot in slots:
            tensor = frame[slot]
            if isinstance(tensor, Unknown):
                shape = tensor.known.shape
                known = replace(tensor.known, shape=shape if shape[:1] == (-1,) else (1, *shape[1:]))
                view[slot] = Unknown.of(tensor.datatype, known, (1, *tensor.shape[1:]))
            else:
                view[slot] = tensor if tensor is None or tensor is OK else split(tensor, [[row]])[0]
        yield view


@cache
def _size_only(source: str) -> frozenset[str]:
    """Tensors that a condition uses only in ``size()``."""
    variables = read_expression(source).variables
    read = {variable.key for variable in variables if variable.use not in (Use.SIZE, Use.IS_PRESENT)}
    return frozenset(variable.key for variable in variables if variable.use is Use.SIZE) - read
