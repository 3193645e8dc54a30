"""What bandits chose on a path that a client gives back: the value of the trailing metadata ``x-graph-path``."""

from weft.base.errors import InvalidArgumentError
from weft.language.plan import NodePlan, StepPlan
from weft.router.bandits.store import BanditChoice
from weft.router.reporting.path import MAX_PATH_CHARS

#: What may follow the name of a step, beside the bracket that closes its node.
_ENDS = frozenset("#=!~^>;")
_MAX_SHOWN_CHARS = 200


def bandit_choices(path: str, root: NodePlan) -> list[BanditChoice]:
    """What every bandit on the way chose, outer ones first; loops repeat it.

    Args:
        path: As ``weft.router.report.path_text`` wrote it for this graph.
        root: The graph's root node.

    Raises:
        InvalidArgumentError: It is no path of this graph, it was cut, or it is too long.
    """
    if len(path) > MAX_PATH_CHARS or (len(path) == MAX_PATH_CHARS and path.endswith("...")):
        raise InvalidArgumentError(
            f"a path of {len(path)} characters was cut, or is none: paths have at most {MAX_PATH_CHARS}; give the "
            "request id instead"
        )
    return _PathReader(path).read(root)


class _PathReader:
    """Reads a path along the plan of its graph, so that every name is one of the plan's."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._choices: list[BanditChoice] = []

    def read(self, root: NodePlan) -> list[BanditChoice]:
        """All choices. Raises InvalidArgumentError."""
        self._expect(root.name, f"the name of the root node, '{root.name}'")
        self._body(root, is_root=True)
        if self._at < len(self._text):
            raise self._fault("its end")
        return self._choices

    def _body(self, node: NodePlan, *, is_root: bool = False) -> None:
        before, after = node.path_form.root_brackets if is_root else node.path_form.brackets
        if not self._take(before):
            return  # it ended before its first step
        if node.path_form.shows_nothing and self._take(after):
            return
        self._step(node)
        while self._take(";"):
            self._step(node)
        self._expect(after, f"'{after}' or ';'")

    def _step(self, node: NodePlan) -> None:
        chosen = step = self._one_of(node)
        at = len(self._choices)
        has_answered = self._run(step)
        while step.fallback is not None and self._text.startswith(f">{step.fallback.name}", self._at):
            step = step.fallback
            self._at += 1 + len(step.name)
            self._run(step)
        if node.bandit is not None:
            self._choices.insert(at, BanditChoice(node, node.bandit, chosen.name, has_answered))

    def _run(self, step: StepPlan) -> bool:
        """What follows the name of a step: rows, the node in its place, and how it ended; whether it answered."""
        if self._take("#"):
            while self._at < len(self._text) and self._text[self._at] in "0123456789":
                self._at += 1
        if self._take("="):
            if not isinstance(step.action, NodePlan):
                raise self._fault(f"no node, because step '{step.name}' is a call")
            self._expect(step.action.name, f"node '{step.action.name}'")
            self._body(step.action)
        return self._take("^") or not (self._take("!") or self._take("~"))

    def _one_of(self, node: NodePlan) -> StepPlan:
        ends = _ENDS | {node.path_form.brackets[1]}
        for step in (*node.steps, *node.customs):
            end = self._at + len(step.name)
            if self._text.startswith(step.name, self._at) and (end == len(self._text) or self._text[end] in ends):
                self._at = end
                return step
        raise self._fault(f"a step of node '{node.name}': {', '.join(step.name for step in node.steps)}")

    def _take(self, text: str) -> bool:
        if not text or not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _expect(self, text: str, what: str) -> None:
        if text and not self._take(text):
            raise self._fault(what)

    def _fault(self, expected: str) -> InvalidArgumentError:
        shown = self._text[:_MAX_SHOWN_CHARS]
        return InvalidArgumentError(
            f"{shown!r} is no path of this graph: at character {self._at + 1} it has "
            f"{self._text[self._at : self._at + 20]!r} in place of {expected}"
        )
