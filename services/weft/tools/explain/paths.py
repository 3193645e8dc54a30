"""The paths that one run of a node may take: each is a run of its own, with a script of what is decided on it."""

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
    """What was found of a condition: of each row, or, without ``rows``, of the whole request."""

    verdicts: Sequence[Verdict]
    rows: Sequence[int] = ()


class Decision(NamedTuple):
    """What was decided on a path because it is unknown.

    Attributes:
        taken: 0 for the usual option, 1 for the other.
        origins: What it depends on, for people.
        cause: ``FAILS``, ``LATE``, ``ORDER``, ``STREAM`` or ``LACKS``; "" where it is about a value.
    """

    taken: int
    origins: tuple[str, ...]
    cause: str = ""
    step: StepPlan | None = None

    @property
    def about(self) -> Hashable:
        """The same for decisions about the same, whatever was taken."""
        return self.origins, self.cause, id(self.step)

    @property
    def is_trouble(self) -> bool:
        """Whether any option but the first is a failure, or a delay."""
        return self.cause in (FAILS, LATE, ORDER)


class Call(NamedTuple):
    """A step that did something: a model was called, or a node entered.

    Attributes:
        limit_ns: How long a node has; None without deadline.
    """

    step: StepPlan
    limit_ns: int | None = None
    frame: Frame | None = None
    error: WeftError | None = None


@dataclass(slots=True, eq=False)
class ExecutionPath:
    """One run of a node.

    Attributes:
        script: Options to take; after its end the usual one each time.
        verdicts: Of each condition, in the order in which it was evaluated.
        calls: In the order in which they were made.
        rounds: Number of calls before each evaluation of a condition that asks for another round.
        is_vague: Whether it is unknown which rows are where.
        pending: Numbers of the calls in work.
        meeting: Of the calls that were in work at once with others.
        copies: Shadows, to be run when the node has.
        is_empty: Whether a node that streams has given no response.
        is_unclear: Whether what it gives is not known, because placeholders did not fit together.
        record, frame, error: What the node did, and left.
        missing: A node inside that must be explained before this path can be followed.
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
        """The option that this path takes; ``about`` is what may be asked a few times only."""
        self._num_asked[about] += 1
        if self._num_asked[about] > _MAX_ASKED:
            return 0 if cause else 1
        number = len(self.decisions)
        taken = self.script[number] if number < len(self.script) else 0
        self.decisions.append(Decision(taken, origins, cause, step))
        return taken

    @property
    def has_trouble(self) -> bool:
        """Whether a call was taken to fail, or to be late."""
        return any(decision.is_trouble and decision.taken for decision in self.decisions)

    @property
    def taken(self) -> tuple[int, ...]:
        """The options taken."""
        return tuple(decision.taken for decision in self.decisions)


def follow(
    run: Callable[[tuple[int, ...]], ExecutionPath], facts: Callable[[ExecutionPath], set[Hashable]]
) -> tuple[list[ExecutionPath], bool]:
    """The paths, those with the fewest unusual decisions first; and whether there are too many to follow.

    Failures and delays are added to paths that showed something new alone, and so is everything once there are many
    paths. So any two unusual decisions are tried together; what takes three, none of which shows anything alone or with
    one other, is missed.
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
    """Whether it makes a difference on which side of a branch a path is, all later decisions being equal."""
    alike = usual.keys() & other.keys()
    if alike:
        return any(usual[later] != other[later] for later in alike)
    return bool(usual and other) and set().union(*usual.values()) != set().union(*other.values())


class Branches:
    """Where paths part."""

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
        """The decisions that ``holds`` depends on, first things first; None leaves a path out."""
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
    """An unknown text; whether it equals what it is compared with is decided on the path."""

    _path: ExecutionPath
    _site: Site
    _origins: tuple[str, ...]
    _value: object = None
    __hash__ = str.__hash__

    @classmethod
    def of(cls, path: ExecutionPath, site: Site, origins: tuple[str, ...]) -> "OpenText":
        """It is empty."""
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
    """A random number that is only known to lie between two others."""

    _path: ExecutionPath
    _low: float
    _high: float

    @classmethod
    def of(cls, path: ExecutionPath, low: float = 0.0, high: float = 1.0) -> "OpenDraw":
        """It is drawn on ``path``."""
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


class OpenChance(random.Random):
    """A generator whose numbers are decided on the path."""

    def __init__(self, path: Callable[[], ExecutionPath]) -> None:
        super().__init__(0)
        self._path = path

    def random(self) -> float:
        """Any number."""
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
