"""Enumerates the paths that a node's run may take; each path is a run with scripted decisions."""

import asyncio
import random
import selectors
from collections import defaultdict
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple

from weft.base.errors import WeftError
from weft.language.plan import Frame, StepPlan
from weft.router.reporting.path import NodeRecord
from weft.tools.explain.evaluator import Verdict

#: So many paths are followed whatever they show; beyond, only from paths that showed something new.
_NUM_FOLLOWED = 32
MAX_PATHS = 500
#: What is asked more often on one path, as in the rounds of a loop, has no other answer after that.
_MAX_ASKED = 4
#: Why a call makes a difference: it may fail, may use up the time, may come after others, may give no response, or no
#: value of an optional output.
FAILS, LATE, ORDER, STREAM, LACKS = "fails", "late", "order", "stream", "lacks"
#: Where a condition stands: identity of the step's or node's plan, name of the field.
Site = tuple[int, str]


class Evaluation(NamedTuple):
    """Results of a condition: for each row, or without ``rows`` for the whole request."""

    verdicts: Sequence[Verdict]
    rows: Sequence[int] = ()


class Decision(NamedTuple):
    """A choice made on a path because a value is unknown.

    Attributes:
        taken: 0 for the usual option, 1 for the other.
        origins: What it depends on, for people.
        cause: ``FAILS``, ``LATE``, ``ORDER``, ``STREAM`` or ``LACKS``; "" for a value.
    """

    taken: int
    origins: tuple[str, ...]
    cause: str = ""
    step: StepPlan | None = None

    @property
    def about(self) -> Hashable:
        """A key, equal for decisions on the same question."""
        return self.origins, self.cause, id(self.step)

    @property
    def is_trouble(self) -> bool:
        """Whether its other option is a failure or a delay."""
        return self.cause in (FAILS, LATE, ORDER)


class Call(NamedTuple):
    """A step that acted: called a model, or entered a node.

    Attributes:
        limit_ns: Time limit of a node; None without deadline.
    """

    step: StepPlan
    limit_ns: int | None = None
    frame: Frame | None = None
    error: WeftError | None = None


@dataclass(slots=True, eq=False)
class ExecutionPath:
    """One run of a node.

    Attributes:
        script: Options to take; beyond its end the usual ones.
        verdicts: Of each condition, in the order of evaluation.
        calls: In the order in which they were made.
        rounds: Number of calls before each evaluation of a loop's condition.
        is_vague: Whether it is unknown which rows are where.
        pending: Numbers of the calls in flight.
        meeting: Calls that were in flight together with others.
        copies: Shadows, to be run after the node.
        is_empty: Whether a streaming node gave no response.
        is_unclear: Whether the outputs are unknown, because placeholders did not fit together.
        record, frame, error: Results of the node.
        missing: A nested node that must be studied before this path can continue.
    """

    script: tuple[int, ...]
    clock_ns: int
    record: NodeRecord
    frame: Frame
    decisions: list[Decision] = field(default_factory=list)
    verdicts: dict[Site, list[Evaluation]] = field(default_factory=lambda: defaultdict(list))
    calls: list[Call] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    is_drawn: bool = False
    is_vague: bool = False
    is_empty: bool = False
    is_unclear: bool = False
    pending: set[int] = field(default_factory=set)
    meeting: set[int] = field(default_factory=set)
    copies: list[Coroutine[Any, Any, None]] = field(default_factory=list)
    error: WeftError | None = None
    missing: Any = None
    _num_asked: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))

    def ask(
        self,
        about: Hashable,
        origins: tuple[str, ...],
        *,
        cause: str = "",
        step: StepPlan | None = None,
    ) -> int:
        """Take an option; each ``about`` may be asked only a few times."""
        self._num_asked[about] += 1
        if self._num_asked[about] > _MAX_ASKED:
            return 0 if cause else 1
        number = len(self.decisions)
        taken = self.script[number] if number < len(self.script) else 0
        self.decisions.append(Decision(taken, origins, cause, step))
        return taken

    @property
    def has_trouble(self) -> bool:
        """Whether a call failed or was late on it."""
        return any(decision.is_trouble and decision.taken for decision in self.decisions)

    @property
    def taken(self) -> tuple[int, ...]:
        """The options taken."""
        return tuple(decision.taken for decision in self.decisions)


def follow(
    run: Callable[[tuple[int, ...]], ExecutionPath], facts: Callable[[ExecutionPath], set[Hashable]]
) -> tuple[list[ExecutionPath], bool]:
    """Enumerate paths, those with the fewest unusual decisions first; also return whether there are too many.

    Failures and delays are combined only with paths that showed something new, and so are all decisions once there are
    many paths. So any two unusual decisions are tried together; effects that need three, none of which shows anything
    alone or with one other, are missed.
    """
    paths: list[ExecutionPath] = []
    seen: set[Hashable] = set()
    waiting: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    number = 0
    while waiting and len(paths) < MAX_PATHS:
        _, _, script = heappop(waiting)
        path = run(script)
        paths.append(path)
        found = facts(path) - seen
        seen |= found
        taken = path.taken
        for place in range(len(script), len(taken)):
            decision = path.decisions[place]
            if not found and (decision.is_trouble or len(paths) + len(waiting) > _NUM_FOLLOWED):
                continue
            if decision.cause == ORDER and path.has_trouble:  # one call at a time
                continue
            number += 1
            other = (*taken[:place], 1)
            heappush(waiting, (sum(other), number, other))
    return paths, bool(waiting)


#: What holds on the paths past a branch, by the unusual decisions that come later.
_Outcomes = dict[frozenset[Hashable], set[bool]]


def _differ(usual: _Outcomes, other: _Outcomes) -> bool:
    """Whether the outcome depends on the branch taken, all later decisions being equal."""
    alike = usual.keys() & other.keys()
    if alike:
        return any(usual[later] != other[later] for later in alike)
    return bool(usual and other) and set().union(*usual.values()) != set().union(*other.values())


class Branches:
    """A tree of the points at which paths part."""

    def __init__(self, paths: Sequence[ExecutionPath]) -> None:
        #: By number: what is decided there, and how many decisions come before it.
        self._branches: list[tuple[Decision, int]] = []
        numbers: dict[tuple[int, int], int] = {}
        self._passed: list[list[tuple[int, int]]] = []
        for path in paths:
            passed: list[tuple[int, int]] = []
            for decision in path.decisions:
                before = passed[-1] if passed else (-1, 0)
                if before not in numbers:
                    numbers[before] = len(self._branches)
                    self._branches.append((decision, len(passed)))
                passed.append((numbers[before], decision.taken))
            self._passed.append(passed)
        unusual = {number for passed in self._passed for number, taken in passed if taken}
        self._passed = [[branch for branch in passed if branch[0] in unusual] for passed in self._passed]

    def deciding(self, holds: Sequence[bool | None]) -> list[Decision]:
        """The decisions that ``holds`` depends on, in order; None leaves a path out."""
        outcomes: dict[int, tuple[_Outcomes, _Outcomes]] = defaultdict(lambda: (defaultdict(set), defaultdict(set)))
        for passed, value in zip(self._passed, holds, strict=True):
            if value is not None:
                later: frozenset[Hashable] = frozenset()
                for number, taken in reversed(passed):
                    outcomes[number][taken][later].add(value)
                    later |= {self._branches[number][0].about} if taken else frozenset()
        found = [self._branches[number] for number, (usual, other) in outcomes.items() if _differ(usual, other)]
        return [decision for decision, _ in sorted(found, key=lambda branch: branch[1])]


class OpenText(str):
    """An unknown text; each comparison is decided on the path."""

    _path: ExecutionPath
    _site: Site
    _origins: tuple[str, ...]
    _value: object = None
    __hash__ = str.__hash__

    @classmethod
    def of(cls, path: ExecutionPath, site: Site, origins: tuple[str, ...]) -> "OpenText":
        """An unknown text on ``path``."""
        text = cls()
        text._path, text._site, text._origins = path, site, origins
        return text

    def __eq__(self, other: object) -> bool:
        if self._value is None and self._path.ask((self._site, other), self._origins) == 0:
            self._value = other
        return self._value == other

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return "?"


class OpenDraw(float):
    """A random number known only to lie between two others."""

    _path: ExecutionPath
    _low: float
    _high: float

    @classmethod
    def of(cls, path: ExecutionPath, low: float = 0.0, high: float = 1.0) -> "OpenDraw":
        """An unknown number on ``path``."""
        draw = cls(low)
        draw._path, draw._low, draw._high = path, low, high
        return draw

    def __mul__(self, factor: float) -> "OpenDraw":
        return OpenDraw.of(self._path, self._low * factor, self._high * factor)

    def __lt__(self, limit: float) -> bool:
        if self._low < limit < self._high:
            self._path.is_drawn = True
            if self._path.ask("draw", ()) == 0:
                self._high = limit
            else:
                self._low = limit
        return self._high <= limit

    def __ge__(self, limit: float) -> bool:
        return not self < limit


class OpenLimit(int):
    """A limit of something whose size is not known."""

    _is_passed: Callable[[], bool]

    @classmethod
    def of(cls, value: int, is_passed: Callable[[], bool]) -> "OpenLimit":
        """A limit that is passed on the paths where ``is_passed()``."""
        limit = cls(value)
        limit._is_passed = is_passed
        return limit

    def __lt__(self, size: int) -> bool:
        return self._is_passed()


class OpenChance(random.Random):
    """A random generator whose numbers are decided on the path."""

    def __init__(self, path: Callable[[], ExecutionPath]) -> None:
        super().__init__(0)
        self._path = path

    def random(self) -> float:
        """An unknown number."""
        return OpenDraw.of(self._path())


class TimelessLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds."""
        return self._jumping.now_s


class _JumpingSelector(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("every task waits for something that cannot come")
        self.now_s += max(timeout, 0.0)
        return super().select(0)
