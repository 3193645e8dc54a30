"""The first step whose case or test holds."""

from typing_extensions import override

from weft.base.errors import InvalidArgumentError, WeftError
from weft.language.plan import Condition, NodePlan
from weft.router.operators.alternatives import AlternativesNode
from weft.router.steps import NodeParts, Run, Step

#: A client may send a value of megabytes; no more of it goes into a message.
_MAX_SHOWN_CHARS = 100


class SwitchNode(AlternativesNode):
    """Runs the first step, in declared order, whose case or test holds; else the one that is ``otherwise``.

    Args:
        plan, parts: As of ``AlternativesNode``.
        on: Compared with the cases of the steps.
    """

    def __init__(self, plan: NodePlan, parts: NodeParts, on: Condition | None) -> None:
        super().__init__(plan, parts)
        self._on = on

    @override
    async def run(self, run: Run) -> None:
        await self._choose(run).run(run)

    def _choose(self, run: Run) -> Step:
        on = self._on
        value = None if on is None else self._error_context.text(on, run, self.plan.path)
        otherwise: Step | None = None
        for step in self._steps:
            branch = step.plan
            if branch.is_otherwise:
                otherwise = step
            elif branch.when is not None:
                if self._holds(branch.when, run):
                    return step
            elif value is not None and value in branch.cases:
                return step
        if otherwise is not None:
            return otherwise
        raise self._no_match(value)

    def _no_match(self, value: str | None, where: str = "") -> WeftError:
        return self._placed(no_match(self.plan, self._on, value, where))


def no_match(plan: NodePlan, on: Condition | None, value: str | None, where: str = "") -> InvalidArgumentError:
    """The error of a switch without a branch for ``value`` of ``on`` (None without one)."""
    shown = repr(value if value is None or len(value) <= _MAX_SHOWN_CHARS else value[:_MAX_SHOWN_CHARS] + "...")
    tried = f"value {shown} of {on.source!r} is no case" if on is not None else "no 'when' holds"
    return InvalidArgumentError(
        f"no branch of switch '{plan.name}' matches{where}: {tried}; branches are "
        f"{', '.join(repr(step.name) for step in plan.steps)}, and there is no 'otherwise'"
    )
