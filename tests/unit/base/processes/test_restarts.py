"""When a service is started again, and when it is taken for hung; time is made up."""

from weft.base.processes.process import DEATH_WINDOW_S, MAX_DEATHS, MAX_PAUSE_S, STABLE_S, RestartPolicy
from weft.mesh.readiness import HangDetector


class _Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_pauses_double_up_to_the_cap() -> None:
    """The first is 0.1 to 0.5 s; none is longer than the cap; half of each is at random."""
    low, high = (RestartPolicy(_Clock(), lambda draw=draw: draw) for draw in (0.0, 1.0))
    assert [0.1, 0.5, 1.0, 2.0] == [low.died() for _ in range(4)]
    assert [0.5, 1.0, 2.0, 4.0] == [high.died() for _ in range(4)]
    assert MAX_PAUSE_S == [high.died() for _ in range(60)][-1]


def test_a_service_that_served_well_begins_anew() -> None:
    """After ``STABLE_S`` of service the pauses are the first ones again, and old deaths are forgotten."""
    clock = _Clock()
    policy = RestartPolicy(clock, lambda: 1.0)
    for _ in range(3):
        policy.died()
        policy.serves()
    clock.now_s += STABLE_S - 1
    assert policy.died() == 4.0
    policy.serves()
    clock.now_s += STABLE_S
    assert policy.died() == 0.5
    assert (1, 1) == (policy.attempt, policy.num_deaths)


def test_many_deaths_are_hopeless_but_tried() -> None:
    """So many deaths in the window make every pause the longest; deaths that are longer ago do not count."""
    clock = _Clock()
    policy = RestartPolicy(clock, lambda: 1.0)
    pauses = [policy.died() for _ in range(MAX_DEATHS)]
    assert policy.is_hopeless
    assert MAX_PAUSE_S == pauses[-1]
    clock.now_s += DEATH_WINDOW_S + 1
    policy.died()
    assert not policy.is_hopeless


def test_a_service_that_fails_slowly_for_weeks_is_tried_on() -> None:
    """So slowly that its deaths are never many in the window: the pause stays the longest."""
    clock = _Clock()
    policy = RestartPolicy(clock, lambda: 1.0)
    for _ in range(2000):
        clock.now_s += DEATH_WINDOW_S
        pause_s = policy.died()
    assert MAX_PAUSE_S == pause_s
    assert not policy.is_hopeless


def test_silence_is_told_once_and_ends_in_a_hang() -> None:
    """Any answer ends it; what was told is taken back then."""
    clock = _Clock()
    detector = HangDetector(10.0, clock)

    def after(seconds: float, has_answered: bool) -> str:
        clock.now_s += seconds
        return detector.heard(has_answered)

    looks = [(1, True), (2, False), (2, False), (1, False), (1, False), (1, True), (1, True)]
    assert ["", "", "", "silent", "", "answers", ""] == [after(*look) for look in looks]
    assert ["", "", "silent", "", "hangs"] == [after(2, False) for _ in range(5)]


def test_a_judge_that_was_stopped_itself_condemns_nobody() -> None:
    """As after SIGSTOP and SIGCONT in the middle of a check, which is then over without an answer."""
    clock = _Clock()
    detector = HangDetector(30.0, clock)
    assert "" == detector.heard(True)
    clock.now_s += 3600.0
    assert "" == detector.heard(False)
