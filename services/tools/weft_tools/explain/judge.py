"""Conditions evaluated with what is known."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import cast

from weft_common.errors import InvalidArgumentError
from weft_router.graph.plan import Condition, Frame
from weft_router.graph.types.expression import Use, read_expression
from weft_router.scope import RequestScope
from weft_tools.explain.values import UNKNOWN_VALUE, StandIn, Value

#: Tensors that may be absent: both ways are tried, for so many of them.
_MAX_UNSURE = 6
_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a condition.

    Attributes:
        value: Its value, if ``is_known`` and there is no error.
        is_known: False: it depends on ``depends_on``.
        error: Why it cannot be evaluated; where it is not known, why that may be.
        depends_on: Tensors, as ``Value.origins`` calls them.
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
class Knowledge:
    """What is known of the request beside tensors.

    Attributes:
        scope: Without deadline.
        remaining_ms: Time left when it arrives; None where there is no deadline.
    """

    scope: RequestScope
    remaining_ms: float | None = None

    def judge(self, condition: Condition, frame: Sequence[Value]) -> Verdict:
        """The condition's value, as far as it is the same whatever the unknown values turn out to be."""
        slots = list(dict.fromkeys(binding.slot for binding in condition.tensors))
        unknown = [slot for slot in slots if not frame[slot].is_known]
        if not unknown:
            return self._evaluated(condition, [value.tensor for value in frame])
        sized = _size_only(condition.source)
        base: Frame = [value.tensor for value in frame]
        for name, slot in condition.tensors:
            if name in sized and slot in unknown and frame[slot].is_shape_known:
                base[slot] = frame[slot].sized()
        unsure = [slot for slot in unknown if frame[slot].may_be_absent][:_MAX_UNSURE]
        trials = []
        for absent in product((False, True), repeat=len(unsure)):
            trial = base.copy()
            for slot, is_absent in zip(unsure, absent, strict=True):
                trial[slot] = None if is_absent else trial[slot]
            trials.append(self._evaluated(condition, trial))
        if all(trial == trials[0] for trial in trials) and trials[0].is_known:
            return trials[0]
        error = next((trial.error for trial in trials if trial.error and UNKNOWN_VALUE not in trial.error), "")
        depends_on = tuple(dict.fromkeys(origin for slot in unknown for origin in frame[slot].origins))
        return Verdict(is_known=False, error=error, depends_on=depends_on)

    def _evaluated(self, condition: Condition, frame: Frame) -> Verdict:
        """The verdict for one frame; an error is certain only if nobody looked at elements that are not known."""
        scope = self.scope
        if self.remaining_ms is not None:
            scope = replace(scope, deadline_ns=time.monotonic_ns() + int((self.remaining_ms + 0.9) * _NS_PER_MS))
        stand_ins = [tensor for tensor in cast(list[object], frame) if isinstance(tensor, StandIn)]
        for stand_in in stand_ins:
            stand_in.was_read = False
        try:
            return Verdict(condition.evaluate(frame, scope))
        except InvalidArgumentError as error:
            return Verdict(is_known=not any(stand_in.was_read for stand_in in stand_ins), error=error.message)


@cache
def _size_only(source: str) -> frozenset[str]:
    """Tensors of which a condition asks nothing but ``size()``."""
    variables = read_expression(source).variables
    read = {variable.key for variable in variables if variable.use not in (Use.SIZE, Use.IS_PRESENT)}
    return frozenset(variable.key for variable in variables if variable.use is Use.SIZE) - read
