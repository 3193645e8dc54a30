"""Conditions evaluated with what is known."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import product
from typing import cast

from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature
from weft.base.tensors import WireTensor
from weft.language.plan import OK, Condition, Frame, NodePlan, StepPlan
from weft.language.request_scope import RequestScope
from weft.language.types.expression import Use, read_expression
from weft.router.tensors import split
from weft.tools.explain.values import UNKNOWN_VALUE, Knowledge, Unknown, Unread, sized

#: Tensors that may be absent: both paths are tried, for so many of them.
_MAX_UNSURE = 6
_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a condition.

    Attributes:
        value: Its value, if ``is_known`` and there is no error.
        is_known: False: it depends on ``depends_on``.
        error: Why it cannot be evaluated; where it is not known, why that may be.
        depends_on: Tensors, as ``Knowledge.origins`` calls them.
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
        scope: What they see of it beside tensors; without deadline.
        remaining_ms: Time left when it arrives; None where there is no deadline.
    """

    scope: RequestScope
    remaining_ms: float | None = None

    def verdict(self, condition: Condition, frame: Frame) -> Verdict:
        """The condition's value, as far as it is the same whatever the unknown values turn out to be."""
        tensors = {slot: tensor for _, slot in condition.tensors if isinstance(tensor := frame[slot], Unknown)}
        if not tensors:
            return self._evaluated(condition, frame)
        base = frame.copy()
        only_sized = _size_only(condition.source)
        for name, slot in condition.tensors:
            if slot in tensors:
                is_sized = name in only_sized and min(tensors[slot].known.shape, default=0) >= 0
                base[slot] = sized(tensors[slot]) if is_sized else cast(WireTensor, Unread(tensors[slot]))
        unsure = [slot for slot, tensor in tensors.items() if tensor.known.may_be_absent][:_MAX_UNSURE]
        trials = []
        for absent in product((False, True), repeat=len(unsure)):
            trial = base.copy()
            for slot, is_absent in zip(unsure, absent, strict=True):
                trial[slot] = None if is_absent else trial[slot]
            trials.append(self._evaluated(condition, trial))
        if all(trial == trials[0] for trial in trials) and trials[0].is_known:
            return trials[0]
        error = next((trial.error for trial in trials if trial.error and UNKNOWN_VALUE not in trial.error), "")
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
        """The verdict for one frame; an error is certain only if no unknown element was read."""
        hidden = [tensor for tensor in cast(list[object], frame) if isinstance(tensor, Unread)]
        for tensor in hidden:
            tensor.was_read = False
        try:
            return Verdict(condition.evaluate(frame, self._timed()))
        except InvalidArgumentError as error:
            return Verdict(is_known=not any(tensor.was_read for tensor in hidden), error=error.message)


def conditions_in(part: object, owner: object = None, name: str = "") -> Iterator[tuple[object, str, Condition]]:
    """Every condition of a plan: the step or node that it stands in, the name of its field, and itself."""
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
                known = tensor.known
                shape = known.shape if known.shape[:1] == (-1,) else (1, *known.shape[1:])
                view[slot] = Unknown.of(
                    tensor.datatype, Knowledge(shape, known.origins, known.may_be_absent), (1, *tensor.shape[1:])
                )
            else:
                view[slot] = tensor if tensor is None or tensor is OK else split(tensor, [[row]])[0]
        yield view


@cache
def _size_only(source: str) -> frozenset[str]:
    """Tensors of which a condition asks nothing but ``size()``."""
    variables = read_expression(source).variables
    read = {variable.key for variable in variables if variable.use not in (Use.SIZE, Use.IS_PRESENT)}
    return frozenset(variable.key for variable in variables if variable.use is Use.SIZE) - read
