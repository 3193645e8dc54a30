"""How the path of a request shows the runs of a kind of node."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class StepOutcome(Protocol):
    """What is recorded of one run of a step, as far as a node says which step gave its answer."""

    name: str

    @property
    def has_answered(self) -> bool:
        """Whether the step, or a fallback of it, gave an answer."""


def no_branch(steps: Sequence[StepOutcome]) -> str:
    """No step in particular gave the node's answer."""
    return ""


class PathForm(NamedTuple):
    """How the path of a request shows a run of a node.

    Attributes:
        brackets: What stands before and after its steps.
        root_brackets: The same where the node is the graph.
        branch: Steps that ran -> the one whose answer is the node's; "" for none or several.
        shows_nothing: The brackets stand also where all steps were skipped.
    """

    brackets: tuple[str, str]
    root_brackets: tuple[str, str]
    branch: Callable[[Sequence[StepOutcome]], str] = no_branch
    shows_nothing: bool = False

    @classmethod
    def of(cls, before: str, after: str, branch: Callable[[Sequence[StepOutcome]], str] = no_branch) -> "PathForm":
        """The same brackets everywhere."""
        return cls((before, after), (before, after), branch)


#: Of steps that run one after another and are no node of their own.
IN_A_ROW = PathForm.of("(", ")")
