"""Which steps of a switch or splitter a request takes."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft_router.graph.description import cases_text, condition_text, share
from weft_router.graph.plan import StepPlan
from weft_router.kinds.splitter.weighted_choice import WeightedChoice
from weft_router.kinds.switch.run import no_match
from weft_router.requests.routes import ROUTE_HEADER
from weft_tools.explain.entry import Failure, Fate
from weft_tools.explain.judge import Knowledge, Verdict
from weft_tools.explain.values import Value


@dataclass(slots=True)
class StepChoice:
    """What becomes of one step, and why."""

    fate: Fate
    why: list[str] = field(default_factory=list)
    depends_on: list[str] = field(default_factory=list)


@dataclass(slots=True)
class NodeDecision:
    """What becomes of every step of a node.

    Attributes:
        choices: In the order of the steps.
        says: How it was decided.
        failure: Why the node fails for certain.
        may_fail: Errors that unknown values may lead to.
    """

    choices: list[StepChoice]
    says: list[str] = field(default_factory=list)
    failure: Failure | None = None
    may_fail: list[str] = field(default_factory=list)


def verdict_text(verdict: Verdict, *, as_text: bool = False) -> str:
    """`` = true``, `` = "de"``, `` = ?``."""
    if verdict.error and verdict.is_known:
        return " fails"
    if not verdict.is_known:
        return " = ?"
    if isinstance(verdict.value, bool) and not as_text:
        return f" = {'true' if verdict.value else 'false'}"
    return f" = {cases_text((str(verdict.value),))}"


def decide(
    node: Any,
    frame: Sequence[Value],
    knowledge: Knowledge,
    prefix: str,
    pins: Mapping[str, str],
    row: int | None = None,
) -> NodeDecision:
    """The decision of a switch or splitter for the request as a whole, or for one row.

    Args:
        node: The node.
        frame: Its inputs.
        knowledge: Of the request.
        prefix: Of messages: the graph.
        pins: Splitter -> step.
        row: Number of the row that ``frame`` has; None for all.
    """
    if node.kind == "switch":
        return _Switch(node, frame, knowledge, f"{prefix}{node.path}: ", row).decide()
    return _split(node, frame, knowledge, f"{prefix}{node.path}: ", pins)


class _Switch:
    """A switch while its branches are tried one after another."""

    def __init__(self, node: Any, frame: Sequence[Value], knowledge: Knowledge, prefix: str, row: int | None) -> None:
        self._node = node
        self._row = "" if row is None else f" row {row}"
        self._frame = frame
        self._knowledge = knowledge
        self._prefix = prefix
        self._decision = NodeDecision([StepChoice(Fate.SKIPPED) for _ in node.steps])
        self._taken = ""
        self._open: list[str] = []

    def decide(self) -> NodeDecision:
        node, decision = self._node, self._decision
        on = self._knowledge.judge(node.on, self._frame) if node.conditions else None
        if on is not None:
            decision.says.append(f"on {condition_text(node.on)}{verdict_text(on, as_text=True)}")
            if not self._is_evaluated(on):
                return decision
        otherwise: StepChoice | None = None
        for step, choice in zip(node.steps, decision.choices, strict=True):
            if self._taken:
                choice.why.append(f"'{self._taken}' comes first")
            elif step.is_otherwise:
                otherwise = otherwise or choice
            elif not self._try(step, choice, on):
                return decision
        self._close(otherwise, on)
        return decision

    def _try(self, step: StepPlan, choice: StepChoice, on: Verdict | None) -> bool:
        """Look at one branch; False if its test fails for certain, so that the request does."""
        if step.when is not None:
            verdict = self._knowledge.judge(step.when, self._frame)
            choice.why.append(f"when {condition_text(step.when)}{verdict_text(verdict)}")
            if not self._is_evaluated(verdict):
                choice.fate = Fate.FAILS if not self._open else Fate.MAYBE
                return False
        elif on is not None:
            choice.why.append(f"case {cases_text(step.cases)}")
            is_case = not on.is_known or str(on.value) in step.cases
            verdict = Verdict(is_case, on.is_known, depends_on=on.depends_on)
        else:
            return True
        if not verdict.is_known:
            choice.fate = Fate.MAYBE
            choice.depends_on += verdict.depends_on
            self._open += verdict.depends_on
        elif verdict.value is True:
            self._take(step.name, choice)
        return True

    def _take(self, name: str, choice: StepChoice) -> None:
        self._taken = name
        choice.fate = Fate.MAYBE if self._open else Fate.RUNS
        choice.depends_on += dict.fromkeys(self._open)

    def _close(self, otherwise: StepChoice | None, on: Verdict | None) -> None:
        """No branch is certain: ``otherwise``, or the error."""
        if otherwise is not None:
            otherwise.why.append("otherwise")
        if self._taken:
            return
        if otherwise is not None:
            self._take("otherwise", otherwise)
            return
        value = str(on.value) if on is not None and on.is_known else None
        error = no_match(self._node, self._node.on, value, self._row)
        if not self._open:
            self._decision.failure = Failure(f"INVALID_ARGUMENT: {self._prefix}{error.message}")
        else:
            self._decision.may_fail.append("INVALID_ARGUMENT if no branch matches: there is no 'otherwise'")

    def _is_evaluated(self, verdict: Verdict) -> bool:
        """Whether the condition has a value, known or not; notes the error."""
        if not verdict.error:
            return True
        if verdict.is_known and not self._open:
            self._decision.failure = Failure(f"INVALID_ARGUMENT: {self._prefix}{verdict.error}", is_final=True)
            return False
        self._decision.may_fail.append(f"INVALID_ARGUMENT: {self._prefix}{verdict.error}")
        return not verdict.is_known


def _split(
    node: Any, frame: Sequence[Value], knowledge: Knowledge, prefix: str, pins: Mapping[str, str]
) -> NodeDecision:
    """A splitter: pinned, by key, or with the shares of its steps."""
    names, weights = [step.name for step in node.steps], [step.weight for step in node.steps]
    shares = [share(weight, sum(weights)) for weight in weights]
    drawn = ", ".join(f"{each} {name}" for name, each in zip(names, shares, strict=True))
    by_chance = NodeDecision(
        [StepChoice(Fate.MAYBE if w > 0 else Fate.SKIPPED, [s]) for w, s in zip(weights, shares, strict=True)]
    )
    if pins.get(node.name) in names:
        says = f"pinned by header {ROUTE_HEADER}, if the router runs with --allow-route-header"
        return _certain(names, names.index(pins[node.name]), says)
    if node.bandit is not None:
        algorithm = node.bandit.algorithm.name
        by_chance.says.append(f"{algorithm} on feedback; before it: {drawn}")
        return by_chance
    if node.conditions:
        verdict = knowledge.judge(node.sticky_by, frame)
        text = f"sticky by {condition_text(node.sticky_by)}{verdict_text(verdict, as_text=True)}"
        if verdict.fails:
            failure = Failure(f"INVALID_ARGUMENT: {prefix}{verdict.error}", is_final=True)
            return NodeDecision([StepChoice(Fate.SKIPPED) for _ in names], [text], failure)
        if not verdict.is_known:
            by_chance.says += [text, f"random by key: {drawn}"]
            by_chance.may_fail += [f"INVALID_ARGUMENT: {prefix}{verdict.error}"] if verdict.error else []
            for choice in by_chance.choices:
                choice.depends_on += verdict.depends_on
            return by_chance
        key = str(verdict.value)
        if key:
            draw = WeightedChoice(names, weights, node.salt, random.Random(0))  # noqa: S311  # a key draws nothing
            return _certain(names, draw.by_key(key), text)
        by_chance.says.append(f"{text}: no key")
    by_chance.says.append(f"random: {drawn}")
    return by_chance


def _certain(names: Sequence[str], taken: int, says: str) -> NodeDecision:
    choices = [StepChoice(Fate.RUNS if index == taken else Fate.SKIPPED) for index in range(len(names))]
    return NodeDecision(choices, [f"{says}: {names[taken]}"])


def decide_rows(
    node: Any,
    frame: Sequence[Value],
    knowledge: Knowledge,
    prefix: str,
    num_rows: int,
) -> tuple[NodeDecision, list[list[int]]]:
    """The decision of a switch with ``per_row``, and for each step the rows that it gets or may get."""
    rows: list[list[int]] = [[] for _ in node.steps]
    whole = NodeDecision([StepChoice(Fate.SKIPPED) for _ in node.steps])
    for row in range(num_rows):
        one = decide(node, [value.rows([row]) for value in frame], knowledge, prefix, {}, row)
        whole.says += [text for text in one.says if text not in whole.says]
        whole.may_fail += [text for text in one.may_fail if text not in whole.may_fail]
        whole.failure = whole.failure or one.failure
        for choice, single, at in zip(whole.choices, one.choices, rows, strict=True):
            if single.fate is Fate.SKIPPED:
                continue
            at.append(row)
            is_certain = Fate.RUNS in (choice.fate, single.fate)
            choice.fate = single.fate if single.fate is Fate.FAILS else Fate.RUNS if is_certain else Fate.MAYBE
            choice.depends_on += [origin for origin in single.depends_on if origin not in choice.depends_on]
    for step, choice, at in zip(node.steps, whole.choices, rows, strict=True):
        test = "otherwise" if step.is_otherwise else ""
        test = test or (f"when {condition_text(step.when)}" if step.when else f"case {cases_text(step.cases)}")
        sure = "no row" if not at else f"row {', '.join(map(str, at))}" if len(at) == 1 else f"rows {_ranges(at)}"
        choice.why = [f"{test}: {sure} of {num_rows}"]
    return whole, rows


def _ranges(rows: Sequence[int]) -> str:
    """``0-2, 5``."""
    parts: list[list[int]] = []
    for row in rows:
        if parts and row == parts[-1][1] + 1:
            parts[-1][1] = row
        else:
            parts.append([row, row])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)
