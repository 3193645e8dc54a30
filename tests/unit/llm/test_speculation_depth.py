"""How many drafts a sequence gets: plain arithmetic over measured costs and measured acceptance."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from weft.llm.speculation.speculator import Acceptance, AdaptiveDepth, CostCurve, DraftBalance

#: Memory-bound up to 128 rows, then in proportion: the knee of a GPU.
_GPU = CostCurve([(1, 0.010), (128, 0.010), (256, 0.020)])
#: Milliseconds of a small model on a CPU.
_CPU = CostCurve([(1, 1.1e-3), (2, 1.15e-3), (4, 1.3e-3), (8, 1.6e-3), (16, 2.3e-3), (32, 3.4e-3), (64, 6.0e-3)])


def _chosen(depth: AdaptiveDepth, rates: list[float], num_rows: int) -> list[int]:
    depth.begin(num_rows)
    chosen = []
    for rate in rates:
        acceptance = Acceptance(rate)
        acceptance.num_left = 10**6  # no trials
        chosen.append(depth.choose(acceptance))
        if chosen[-1]:
            depth.add(acceptance, chosen[-1])
    return chosen


def _expected(rate: float, num_drafts: int) -> float:
    return 1 + sum(rate**place for place in range(1, num_drafts + 1))


def test_a_curve_goes_through_its_points_and_beyond():
    """Between points it is linear, before the first it is constant, behind the last it goes on, and it never falls."""
    curve = CostCurve([(2, 1.0), (4, 3.0), (8, 2.0), (16, 5.0)])
    assert [1.0, 1.0, 1.0, 2.0, 3.0, 3.0] == [curve(rows) for rows in (0, 1, 2, 3, 4, 8)]
    assert curve(24) == pytest.approx(5.0 + 8 * 4 / 14)
    assert CostCurve([(1, 1.0), (4, 4.0), (8, 4.0)])(15) == pytest.approx(7.0)  # not flat for ever
    assert all(one <= other for one, other in pairwise(curve(rows) for rows in range(100)))
    assert [2.0] * 3 == [CostCurve([(4, 2.0)])(rows) for rows in (1, 4, 400)]


def test_an_idle_step_takes_many_drafts_and_a_full_one_none():
    """Up to the knee further rows are free, so good sequences get all drafts; beyond it they get none."""
    depth = AdaptiveDepth(4, _GPU)
    assert [4] == _chosen(depth, [0.8], 1)
    assert [4] * 16 == _chosen(depth, [0.8] * 16, 16)
    assert [0] * 128 == _chosen(depth, [0.8] * 128, 128)
    assert depth.is_full
    assert sum(_chosen(depth, [0.8] * 100, 100)) <= 28 + 4
    assert [0] * 4 == _chosen(depth, [0.99] * 4, 200)  # a prompt fills the step as decodes do


def test_better_sequences_get_more():
    """Depth grows with acceptance, and does not with occupancy."""
    depth = AdaptiveDepth(8, _CPU)
    by_rate = [_chosen(depth, [rate], 1)[0] for rate in (0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)]
    assert sorted(by_rate) == by_rate
    assert (0, 8) == (by_rate[0], by_rate[-1])
    by_rows = [sum(_chosen(depth, [0.7] * count, count)) / count for count in (1, 4, 16, 64)]
    assert sorted(by_rows, reverse=True) == by_rows


@pytest.mark.parametrize("curve", [_GPU, _CPU, CostCurve([(1, 1.0), (2, 2.0)]), CostCurve([(1, 1.0), (64, 1.2)], 0.05)])
def test_a_step_is_never_expected_to_be_slower(curve: CostCurve):
    """Whatever the rates are, tokens per second with the chosen drafts are at least those without."""
    rng = random.Random(0)
    depth = AdaptiveDepth(8, curve)
    num_drafted = 0
    for _ in range(300):
        rates = [rng.random() for _ in range(rng.choice([1, 2, 8, 40, 150]))]
        num_rows = len(rates) + rng.choice([0, 0, 30])
        chosen = _chosen(depth, rates, num_rows)
        num_drafted += sum(chosen)
        seconds = curve(num_rows + sum(chosen)) + sum(chosen) * curve.draft_s
        tokens: float = num_rows - len(rates)  # of a prompt
        tokens += sum(_expected(rate, number) for rate, number in zip(rates, chosen, strict=True))
        assert tokens / seconds >= num_rows / curve(num_rows) * 0.999
    assert num_drafted > 0 or curve(2) == 2.0


def _live(depth: AdaptiveDepth, acceptance: Acceptance, rate: float, num_steps: int, seed: int = 1) -> list[int]:
    """Drafts in each of the steps of a sequence that is alone and whose drafts are right with chance ``rate``."""
    rng = random.Random(seed)
    chosen = []
    for _ in range(num_steps):
        depth.begin(1)
        chosen.append(depth.choose(acceptance))
        if chosen[-1]:
            depth.add(acceptance, chosen[-1])
            num_right = next((place for place in range(chosen[-1]) if rng.random() >= rate), chosen[-1])
            depth.observe(acceptance, chosen[-1], num_right)
    return chosen


def test_bad_drafts_stop_and_good_ones_come_back():
    """A sequence whose drafts are wrong is tried ever more rarely; once they are right it gets all again."""
    depth = AdaptiveDepth(4, _CPU)
    acceptance = depth.new_acceptance()
    chosen = _live(depth, acceptance, 0.0, 2000)
    assert sum(chosen[:40]) > 0
    assert 0 < sum(chosen[1000:]) <= 5  # single drafts
    assert max(chosen[1000:]) == 1
    chosen = _live(depth, acceptance, 1.0, 400)
    assert [4] * 100 == chosen[-100:]


def test_acceptance_follows_the_true_rate():
    """The moving average comes to the chance that a draft is right, whatever it began with."""
    for rate in (0.5, 0.7, 0.9):
        depth = AdaptiveDepth(4, CostCurve([(1, 1.0), (100, 1.01)]))
        acceptance = depth.new_acceptance()
        _live(depth, acceptance, rate, 200)
        seen = []
        for seed in range(100):
            _live(depth, acceptance, rate, 20, seed)
            seen.append(acceptance.rate)
        assert abs(sum(seen) / len(seen) - rate) < 0.08


def test_new_sequences_start_with_the_average_of_the_others():
    """After one sequence's drafts were all right, the next one starts with more than the first did."""
    depth = AdaptiveDepth(4, _GPU)
    first = depth.new_acceptance().rate
    _live(depth, depth.new_acceptance(), 1.0, 50)
    assert depth.new_acceptance().rate > first
    _live(depth, depth.new_acceptance(), 0.0, 50)
    assert 0 < depth.new_acceptance().rate < first


def test_drafts_that_cost_much_are_not_made():
    """The time of the proposer counts: a draft model as slow as the target is worth nothing, a fast one is."""
    slow, fast = (AdaptiveDepth(4, CostCurve([(1, 1.0), (64, 1.3)], draft_s)) for draft_s in (1.0, 0.05))
    assert [0] == _chosen(slow, [0.9], 1)
    assert [4] == _chosen(fast, [0.9], 1)


def test_rows_that_are_sampled_cost_more():
    """In a step at a temperature above 0 drafts are chosen by the time of such steps."""
    sampled = CostCurve([(1, 1.0), (2, 1.9), (4, 3.8)])
    depth = AdaptiveDepth(4, CostCurve([(1, 1.0), (64, 1.3)]), sampled)
    for is_greedy, wanted in ((True, 4), (False, 0)):
        depth.begin(1, is_greedy=is_greedy)
        assert depth.choose(Acceptance(0.8)) == wanted


def test_the_work_on_the_host_counts():
    """Where a step takes microseconds, as much as planning drafts does, there are none, however cheap rows are."""
    assert [0] == _chosen(AdaptiveDepth(4, CostCurve([(1, 5e-6), (64, 5.1e-6)])), [0.9], 1)


def test_where_drafts_are_always_wrong_each_new_sequence_pays_for_one():
    """Once the average is low, a sequence gets one draft, and one after each pause, which doubles up to 1024."""
    depth = AdaptiveDepth(4, _CPU)
    _live(depth, depth.new_acceptance(), 0.0, 2000)
    for _ in range(3):
        chosen = _live(depth, depth.new_acceptance(), 0.0, 4200)
        at = [step for step, number in enumerate(chosen) if number]
        assert {number for number in chosen if number} == {1}
        assert [17, 33, 65, 129, 257, 513, 1025, 1025, 1025] == [after - before for before, after in pairwise(at)]
        assert at[0] == 0


def test_the_first_drafts_count_most():
    """On a new engine, ten wrong drafts of one sequence are enough for a low estimate; later ones move it less."""
    acceptance = AdaptiveDepth(4, _CPU).new_acceptance()
    seen = [acceptance.rate]
    for _ in range(10):
        acceptance.add(1, 0)
        seen.append(acceptance.rate)
    assert seen[-1] < 0.15
    steps = [round(1 - after / before, 6) for before, after in pairwise(seen)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] == 0.1


def _engine(
    balance: DraftBalance, true_s: Callable[[int], float], rate: float, *, num_steps: int, num_seqs: int = 16
) -> tuple[float, float]:
    """Tokens a second over those without drafts, and the share of steps with drafts: four of each sequence, or none.

    ``true_s``: seconds of a step by its drafts; the curve has one second for it.
    """
    rng = random.Random(1)
    seconds, num_tokens, num_drafted = 0.0, 0, 0
    for _ in range(num_steps):
        num_drafts = 0 if balance.has_stopped or balance.is_plain_due else 4 * num_seqs
        num_right = [next((place for place in range(4) if rng.random() >= rate), 4) for _ in range(num_seqs)]
        num_accepted = sum(num_right) if num_drafts else 0
        balance.observe(true_s(num_drafts), num_drafts, 1 + num_accepted / num_seqs)
        seconds += true_s(num_drafts)
        num_tokens += num_seqs + num_accepted
        num_drafted += num_drafts > 0
    return num_tokens / seconds * true_s(0) / num_seqs, num_drafted / num_steps


@pytest.mark.parametrize("num_seqs", [1, 16])
@pytest.mark.parametrize("times", [1.3, 2.0, 5.0])
@pytest.mark.parametrize("slowness", [0.5, 1.0, 3.0])
def test_drafts_that_lose_time_stop_and_are_tried_again(num_seqs: int, times: float, slowness: float) -> None:
    """Wrong drafts that make steps ``times`` as long cost little; where drafts pay, nearly all steps have some."""
    balance = DraftBalance()

    def dear(num_drafts: int) -> float:
        return slowness * (times if num_drafts else 1)

    gain, _ = _engine(balance, dear, 0.0, num_seqs=num_seqs, num_steps=128)
    assert gain >= 1 - times / 128  # one step of loss, and what the last overran it by
    gain, share = _engine(balance, dear, 0.0, num_seqs=num_seqs, num_steps=4000)
    assert gain >= 0.98
    assert 0 < share < 0.05
    cheap = lambda drafts: slowness * (1.3 if drafts else 1)  # noqa: E731
    _engine(balance, cheap, 0.7, num_seqs=num_seqs, num_steps=1500)  # which pays off what was lost
    gain, share = _engine(balance, cheap, 0.7, num_seqs=num_seqs, num_steps=500)
    assert gain > 1.5
    assert share > 0.9


@pytest.mark.parametrize("slowness", [0.5, 1.0, 3.0])
def test_steps_other_than_the_curve_has_them_stop_no_drafts(slowness: float) -> None:
    """Where all steps are slower or faster than was measured, drafts that pay go on from the second step."""
    gain, share = _engine(DraftBalance(), lambda drafts: slowness * (1.3 if drafts else 1), 0.7, num_steps=200)
    assert gain > 1.5
    assert share > 0.9
