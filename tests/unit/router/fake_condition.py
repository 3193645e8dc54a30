"""A condition of a graph that is a Python function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.base.tensors import WireTensor, decode, encode
from weft.language.plan import OK, Binding, Frame
from weft.language.request_scope import RequestScope


@dataclass
class FakeCondition:
    """A condition that is a Python function of the request and the frame; counts its evaluations.

    With `names`, which `node` turns into `tensors`, the function gets a mapping from these to arrays (None: absent)
    in place of the frame; a name `steps.<name>.ok` is that of a step.
    """

    function: Callable[[RequestScope, Any], object]
    source: str = "condition"
    tensors: tuple[Binding, ...] = ()
    num_evaluations: int = 0
    names: tuple[str, ...] = ()
    is_test: bool = True

    def evaluate(self, frame: Frame, request: RequestScope) -> Any:
        self.num_evaluations += 1
        if not self.names:
            return self.function(request, frame)
        tensors = {name: frame[slot] for name, slot in self.tensors}
        return self.function(request, {n: None if t is None else decode(t) for n, t in tensors.items()})

    def evaluate_rows(
        self, frame: Frame, request: RequestScope, num_rows: int, numbers: Sequence[int] | None = None
    ) -> list[Any]:
        def row_of(one: WireTensor | None, row: int) -> WireTensor | None:
            return one if one is None or one is OK else encode(decode(one)[row : row + 1])

        return [self.evaluate([row_of(one, row) for one in frame], request) for row in range(num_rows)]
