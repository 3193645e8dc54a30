"""What a request did, read from the path in its trailing metadata."""

import re

from weft.language.plan import NodePlan, StepPlan


def taken_steps(path: str, root: NodePlan) -> set[str]:
    """Paths of the steps that ran, by the grammar in ``weft.router.reporting.path``."""
    reader = _Reader(re.findall(r"[\w-]+|[*+]\(|.", path))
    assert reader.take(root.name)
    reader.body(root, is_root=True)
    assert [] == reader.tokens
    return reader.taken


class _Reader:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.taken: set[str] = set()

    def take(self, token: str) -> bool:
        """Whether the next token is this one, which then is read."""
        if self.tokens[:1] != [token]:
            return False
        del self.tokens[0]
        return True

    def body(self, node: NodePlan, *, is_root: bool = False) -> None:
        """What follows the name of a node."""
        before, after = node.path_form.root_brackets if is_root else node.path_form.brackets
        steps = {step.name: step for step in node.steps}
        steps |= {custom.name: custom for custom in node.customs}
        if not self.take(before) or (after and self.take(after)):  # a map over nothing has no step
            return
        self._step(steps[self.tokens.pop(0)])
        while self.take(";"):
            self._step(steps[self.tokens.pop(0)])
        assert not after or self.take(after)

    def _step(self, step: StepPlan) -> None:
        """What follows the name of a step."""
        self.taken.add(step.path)
        if self.take("#"):
            self.tokens.pop(0)
        if self.take("="):
            assert isinstance(step.action, NodePlan)
            assert self.take(step.action.name)
            self.body(step.action)
        has_failed = self.take("!")
        self.take("~")
        if has_failed and step.fallback is not None and self.tokens[:2] == [">", step.fallback.name]:
            del self.tokens[:2]
            self._step(step.fallback)
