"""The part of a decoder layer behind attention: an MLP, or a router with experts of which each token gets a few.

Imports no torch, as ``decoder``.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.llm import ops

if TYPE_CHECKING:
    from torch import Tensor

    from weft.llm.parallel.groups import Group

#: From gates and ups ``[N, 2 * F]`` to what the last product takes, ``[N, F]``.
Activation = Callable[["Tensor"], "Tensor"]


class Routing(NamedTuple):
    """How a layer chooses experts.

    Attributes:
        num_experts: Of a layer, or of a rank's.
        num_chosen: Of them, for each token.
        is_normalized: Shares of the chosen experts sum to 1; they are a softmax over these alone. Else over all.
    """

    num_experts: int
    num_chosen: int
    is_normalized: bool


class Mlp:
    """``down(activate(gate_up(x)))``, with matrices whose names begin with ``prefix``."""

    def __init__(self, prefix: str, linear: Mapping[str, ops.Linear], activate: Activation) -> None:
        self._gate_up = linear[prefix + "gate_up_proj.weight"]
        self._down = linear[prefix + "down_proj.weight"]
        self._activate = activate

    def __call__(self, x: "Tensor") -> "Tensor":
        """Of normed rows ``[T, hidden_size]``."""
        return self._down(self._activate(self._gate_up(x)))


class Experts:
    """Sum of the MLPs that a router chooses for each row, times their shares; and of a shared one, if there is.

    Matrices, whose names begin with ``prefix``: ``experts.gate_up_proj`` ``[E * 2 F, H]`` and ``experts.down_proj``
    ``[E * H, F]``, which have the experts one after another; the router, ``gate`` ``[E, H]``; optionally
    ``shared_expert.`` as of ``Mlp``, and ``shared_expert_gate`` ``[1, H]``, whose sigmoid is its share. Products have
    their biases worked in.

    Args:
        group: Ranks that have other experts, as many each as ``routing`` says, in order; None: this one has all.
        deterministic: Add what a row's experts give in the order of its choices, whichever ranks have them; else each
            rank adds its own first.
    """

    def __init__(
        self,
        prefix: str,
        linear: Mapping[str, ops.Linear],
        activate: Activation,
        routing: Routing,
        group: "Group | None" = None,
        *,
        deterministic: bool = False,
    ) -> None:
        self._routing = routing
        self._group = None if group is None or group.size == 1 else group
        self._deterministic = deterministic
        self._router = linear[prefix + "gate.weight"]
        self._gate_up: Any = linear[prefix + "experts.gate_up_proj.weight"]
        self._down: Any = linear[prefix + "experts.down_proj.weight"]
        self._activate = activate
        self._shared_gate = linear.get(prefix + "shared_expert_gate.weight")
        self._shared = Mlp(prefix + "shared_expert.", linear, activate) if self._shared_gate is not None else None

    def __call__(self, x: "Tensor") -> "Tensor":
        """Of normed rows ``[T, hidden_size]``; each row's result is its own where the products' are."""
        num_experts, num_chosen, is_normalized = self._routing
        shares, rows, places, starts = ops.route(self._router(x), num_chosen, is_normalized=is_normalized)
        if self._group is not None:
            first = self._group.rank * num_experts
            starts = starts[first : first + num_experts + 1]
        gate_up = self._gate_up(x, starts=starts, rows=rows)
        found = self._down(self._activate(gate_up), starts=starts)
        if self._group is None:
            out = ops.combine_experts(found, places, shares)
        else:  # rows of other ranks' experts hold anything
            numbers = rows.new_ones(len(rows)).cumsum(0)
            found.masked_fill_(((numbers <= starts[0]) | (numbers > starts[-1])).unsqueeze(1), 0)
            if self._deterministic:
                out = ops.combine_experts(self._group.all_reduce(found), places, shares)
            else:
                out = self._group.all_reduce(ops.combine_experts(found, places, shares))
        if self._shared is not None and self._shared_gate is not None:
            # torch's sigmoid gives a number other digits by its place
            share = self._shared_gate(x).float().neg_().exp_().add_(1.0).reciprocal_()
            out.addcmul_(self._shared(x), share.to(out.dtype))
        return out
