"""How a request's path shows runs of a node kind."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class StepOutcome(Protocol):
    """The record of a step's run, as far as needed to tell which step answered."""

    name: str

    @property
    def has_answered(self) -> bool:
        """Whether the step, or a fallback of it, gave an answer."""


def no_branch(steps: Sequence[StepOutcome]) -> str:
    """Return "": no single step gave the node's answer."""
    return ""


class PathForm(NamedTuple):
    """How the path of a request shows a run of a node.

    Attributes:
        brackets: Texts before and after its steps.
        root_brackets: The same if the node is the graph.
        branch: Steps that ran -> the one whose answer is the node's; "" for none or several.
        shows_nothing: Show the brackets even if all steps were skipped.
    """

    brackets: tuple[str, str]
    root_brackets: tuple[str, str]
    branch: Callable[[Sequence[StepOutcome]], str] = no_branch
    shows_nothing: bool = False

    @classmethod
    def of(cls, before: str, after: str, branch: Callable[[Sequence[StepOutcome]], str] = no_branch) -> "PathForm":
        """A form with the same brackets everywhere."""
        return cls((before, after), (before, after), branch)


#: Of steps that run one after another and are no node of their own.
IN_A_ROW = PathForm.of("(", ")")
