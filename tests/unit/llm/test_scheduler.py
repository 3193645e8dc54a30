"""The scheduler, fact by fact: order, budget, chunks, admission, preemption, prefixes, ends."""

import numpy as np
import pytest
from tests.unit.llm.fake_runner import Bench, undisturbed

from weft.llm.scheduler.sequence import SequenceStatus


def _statuses(*sequences):
    return [seq.status.name for seq in sequences]


# Order and budget


def test_running_ones_go_on_before_prompts_begin():
    """Every running sequence gets its token; what is left of the budget goes to the prompt behind."""
    bench = Bench(max_num_batched_tokens=12)
    first, second = *bench.add(2, max_tokens=9), *bench.add(3, max_tokens=9)
    bench.step()
    (third,) = bench.add([9] * 30, level=0)
    bench.step()
    # 10 are left for the prompt, of which 8 end with a block.
    assert {first: 1, second: 1, third: 8} == bench.scheduled()


def test_a_chunk_ends_with_a_block_unless_it_is_the_last():
    """Chunks of a prompt of 11 tokens under a budget of 6 end at 4 and 8, and at its end."""
    bench = Bench(max_num_batched_tokens=6)
    bench.add(11, max_tokens=1)
    lengths = []
    while bench.step() is not None:
        lengths += bench.plan.ctx_len.tolist()
    assert [4, 8, 11] == lengths


def test_a_budget_below_a_block_still_gets_on():
    """Where what is left of the budget is less than a block, the first prompt computes a part of one."""
    bench = Bench(max_num_batched_tokens=4, max_num_seqs=3)
    bench.add(1, max_tokens=30)
    bench.add(1, max_tokens=30)
    bench.step()
    (prompt,) = bench.add(9, max_tokens=1)
    for _ in range(6):
        bench.step()
    assert SequenceStatus.ENDED is prompt.status


def test_smaller_levels_go_first_and_equals_in_turn():
    """With one slot, sequences begin by level, and within a level in the order of arrival."""
    bench = Bench(max_num_seqs=1)
    order = [(2, 5), (1, 3), (2, 4), (1, 2)]
    sequences = {key: bench.add(2, level=key[0], arrival_ns=key[1], max_tokens=1)[0] for key in order}
    begun = []
    while bench.step() is not None:
        begun += [key for key, seq in sequences.items() if seq.status is SequenceStatus.ENDED and key not in begun]
    assert sorted(order) == begun


def test_long_prompts_leave_room_for_short_ones():
    """A quarter of the budget is kept for a short prompt behind a long one, which uses it where there is none."""
    bench = Bench(max_num_batched_tokens=32, long_prefill_token_threshold=32)
    (long,) = bench.add([7] * 90, max_tokens=1)
    bench.step()
    assert {long: 32} == bench.scheduled()
    (short,) = bench.add([8] * 20, max_tokens=1)
    bench.scheduler.schedule()
    assert (24, 8) == (long.num_scheduled, short.num_scheduled)


def test_few_long_prompts_at_a_time():
    """Of three long prompts two go on in a step, and the short one behind them; the third has its turn later."""
    bench = Bench(max_num_batched_tokens=32, long_prefill_token_threshold=8, enable_prefix_caching=False)
    longs = [bench.add([number] * 40, max_tokens=1)[0] for number in range(3)]
    (short,) = bench.add([9] * 5, max_tokens=1)
    bench.scheduler.schedule()
    assert [8, 8, 0, 5] == [seq.num_scheduled for seq in (*longs, short)]
    assert ["RUNNING", "RUNNING", "WAITING", "RUNNING"] == _statuses(*longs, short)
    bench.scheduler.fail()
    bench.step()
    assert {longs[2]: 8} == bench.scheduled()


def test_a_long_prompt_without_a_turn_costs_nothing(monkeypatch):
    """However much of it is cached, that is looked up once; from then on, whether the next block is cached, too."""
    bench = Bench(max_num_batched_tokens=32, long_prefill_token_threshold=8, max_long_prefills=1)
    bench.add([1] * 40, max_tokens=1)
    bench.run()
    _, waiting = (bench.add([1] * 40 + [number] * 30, max_tokens=1)[0] for number in (2, 3))
    lengths = []
    match = bench.pool.match

    def counted(hashes):
        hashes = list(hashes)
        lengths.append(len(hashes))
        return match(hashes)

    monkeypatch.setattr(bench.pool, "match", counted)
    for _ in range(3):
        bench.step()
    assert SequenceStatus.WAITING is waiting.status
    assert [17, 17, 1, 1] == lengths
    bench.run()
    assert 40 == waiting.num_cached


# Admission


def test_admission_needs_the_whole_prompt():
    """A prompt is admitted with blocks for all its tokens or not at all, though its first chunk would fit."""
    bench = Bench(num_blocks=11, watermark=0.0, max_num_batched_tokens=8)
    first, second = *bench.add([1] * 24, max_tokens=3), *bench.add([2] * 20, max_tokens=2)
    bench.step()
    assert (6, []) == (len(first.block_table), second.block_table)
    assert ["RUNNING", "WAITING"] == _statuses(first, second)
    bench.run()
    assert (0, 0) == (first.num_preemptions, second.num_preemptions)


def test_nobody_is_overtaken_for_want_of_blocks():
    """A small prompt does not take the blocks that a bigger one before it waits for."""
    bench = Bench(num_blocks=11, watermark=0.0)
    bench.add([1] * 24, max_tokens=8)
    big, small = *bench.add([2] * 20, max_tokens=2), *bench.add([3], max_tokens=2)
    bench.step()
    assert ["WAITING", "WAITING"] == _statuses(big, small)
    bench.run()
    assert big.first_scheduled_ns <= small.first_scheduled_ns


def test_the_watermark_is_kept_free():
    """A second sequence is not admitted into the last blocks; a first one may take all."""
    bench = Bench(num_blocks=11, watermark=0.2)
    first, second = *bench.add([1] * 20, max_tokens=2), *bench.add([2] * 14, max_tokens=2)
    bench.step()
    assert ["RUNNING", "WAITING"] == _statuses(first, second)
    alone = Bench(num_blocks=11, watermark=0.2)
    alone.add(39, max_tokens=1)
    assert alone.step() is not None
    assert 10 == alone.pool.num_used


def test_a_peak_that_would_not_fit_is_foreseen():
    """Two sequences whose answers will not fit together run one after the other: nobody is preempted."""
    bench = Bench(num_blocks=11, watermark=0.0, max_model_len=40)
    sequences = [bench.add([number] * 4, max_tokens=24)[0] for number in range(2)]
    bench.step()
    assert ["RUNNING", "WAITING"] == _statuses(*sequences)
    bench.run()
    assert 0 == bench.scheduler.num_preemptions


def test_answers_that_end_early_are_learned_from():
    """Once answers were seen to be short, two that could be long are admitted together."""
    bench = Bench(num_blocks=11, watermark=0.0, max_model_len=40)
    for number in range(3):
        bench.add([number] * 2, max_tokens=24, stop_token_ids=list(range(50)))
        bench.run()
    sequences = [bench.add([number] * 4, max_tokens=24)[0] for number in range(2)]
    bench.step()
    assert ["RUNNING", "RUNNING"] == _statuses(*sequences)


def test_what_can_never_fit_is_refused():
    """A prompt that leaves no room for a token, in the context or in the pool, is refused; so is an empty one."""
    bench = Bench(num_blocks=5, max_model_len=96)
    assert 16 == bench.scheduler.max_len
    for length in (0, 16, 50):
        with pytest.raises(ValueError, match=f"1 to 15 tokens, got {length}"):
            bench.add(length)
    bench.add(15, max_tokens=9)
    assert ["length"] == [result.finish_reason for result in bench.step()]


# Preemption


def test_a_better_one_takes_the_seat_of_the_worst():
    """For a slot, the running sequence of the worst level goes; it comes back, and loses no token."""
    bench = Bench(max_num_seqs=2)
    middle, worst = *bench.add([1, 2], level=1, max_tokens=9), *bench.add([3, 4], level=2, max_tokens=9)
    bench.step()
    (best,) = bench.add([5, 6], level=0, max_tokens=2)
    bench.step()
    assert ["RUNNING", "WAITING", "RUNNING"] == _statuses(middle, worst, best)
    bench.run()
    assert (0, 1, 1) == (middle.num_preemptions, worst.num_preemptions, bench.scheduler.num_preemptions)
    assert undisturbed(worst) == worst.tokens.tolist()


def test_an_equal_one_takes_no_seat():
    """One of the same level waits, however long it has; so there is no ping-pong."""
    bench = Bench(max_num_seqs=1)
    bench.add(2, arrival_ns=100, max_tokens=9)
    bench.step()
    bench.add(2, arrival_ns=1, max_tokens=9)
    bench.run()
    assert 0 == bench.scheduler.num_preemptions


def test_a_better_one_takes_blocks_just_enough():
    """For blocks, victims go by level, then least computed, then youngest, and no more of them than needed."""
    bench = Bench(num_blocks=15, watermark=0.0, max_num_batched_tokens=48, enable_prefix_caching=False)
    old = bench.add([1] * 15, level=1, max_tokens=2)[0]
    small = bench.add([2] * 7, level=1, max_tokens=2)[0]
    young = bench.add([3] * 15, level=1, max_tokens=2)[0]
    bench.step()
    assert 10 == bench.pool.num_used
    (best,) = bench.add([4] * 19, level=0, max_tokens=2)
    bench.step()
    assert [0, 1, 0] == [seq.num_preemptions for seq in (old, small, young)]
    assert SequenceStatus.RUNNING is best.status


def test_nobody_is_preempted_in_vain():
    """If all worse ones together could not make room, none of them goes."""
    bench = Bench(num_blocks=13, watermark=0.0, enable_prefix_caching=False)
    bench.add([1] * 30, level=0, max_tokens=3)
    (worse,) = bench.add([2] * 7, level=1, max_tokens=3)
    bench.step()
    (best,) = bench.add([3] * 25, level=0, max_tokens=3)
    bench.step()
    assert (0, SequenceStatus.WAITING) == (worse.num_preemptions, best.status)


def test_a_victim_returns_its_budget():
    """Tokens that a step had planned for its victim go to whoever comes after."""
    bench = Bench(max_num_seqs=2, max_num_batched_tokens=16, enable_prefix_caching=False)
    worst, other = *bench.add([1] * 3, level=2, max_tokens=9), *bench.add([3] * 60, level=1, max_tokens=9)
    bench.step()
    (best,) = bench.add([2] * 16, level=0, max_tokens=9)
    bench.step()
    assert SequenceStatus.WAITING is worst.status
    assert 16 == sum(bench.scheduled().values())
    assert {best: 12, other: 4} == bench.scheduled()


def test_a_step_full_of_worse_ones_has_room_for_a_better_one():
    """Where running ones take the whole budget, a better one still takes the slot of the worst, and its token."""
    bench = Bench(max_num_seqs=2, max_num_batched_tokens=2)
    middle, worst = *bench.add([1, 2], level=1, max_tokens=40), *bench.add([3, 4], level=2, max_tokens=40)
    for _ in range(3):
        bench.step()
    (best,) = bench.add([5, 6], level=0, max_tokens=2)
    bench.step()
    assert {best: 1, middle: 1} == bench.scheduled()
    assert (0, 1) == (middle.num_preemptions, worst.num_preemptions)


@pytest.mark.parametrize(("num_behind", "num_scheduled"), [(1, 1), (2, 0)])
def test_a_step_full_of_worse_ones_stays_within_its_budget(num_behind, num_scheduled):
    """If two lose their slots to one, of their two tokens one is left for those behind it."""
    bench = Bench(num_blocks=31, max_num_seqs=3, max_num_batched_tokens=3, watermark=0.0, enable_prefix_caching=False)
    bench.add([7], max_tokens=1)
    bench.run()  # answers are short, it seems
    lows = bench.add([2] * 40, level=2, max_tokens=50)
    while not lows[0].num_output:
        bench.step()
    (middle,) = bench.add([1], level=1, max_tokens=50)
    lows += bench.add([3], level=2, max_tokens=50)
    for _ in range(3):
        bench.step()
    (best,), (behind,) = bench.add([5] * 80, level=0, max_tokens=1), bench.add([6] * num_behind, level=1, max_tokens=1)
    bench.scheduler.schedule()
    assert [1, 1] == [low.num_preemptions for low in lows]
    assert [1, 1, num_scheduled] == [seq.num_scheduled for seq in (best, middle, behind)]


def test_a_preempted_one_finds_its_blocks_again():
    """What a victim had computed in full blocks is a prefix hit when it comes back."""
    bench = Bench(max_num_seqs=1)
    (victim,) = bench.add(14, level=1, max_tokens=9)
    for _ in range(4):
        bench.step()
    bench.add([9], level=0, max_tokens=1)
    bench.step()
    assert (0, 1) == (victim.num_computed_tokens, victim.num_preemptions)
    bench.step()
    assert ([2], [18]) == (bench.plan.q_start.tolist()[1:], bench.plan.ctx_len.tolist())


def test_without_free_blocks_the_worst_running_one_goes():
    """A sequence that needs a block takes those of the worst; all end with the tokens they have alone."""
    bench = Bench(num_blocks=8, watermark=0.0, max_model_len=28)
    for _ in range(3):  # answers are short, it seems
        bench.add([7], max_tokens=1)
        bench.run()
    sequences = [bench.add([number] * 3, max_tokens=20)[0] for number in range(3)]
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    assert sequences[0].num_preemptions == 0
    assert [undisturbed(seq) for seq in sequences] == [seq.tokens.tolist() for seq in sequences]


@pytest.mark.parametrize(("num_preemptions", "victim"), [(2, 1), (3, 0)])
def test_who_was_preempted_often_keeps_its_blocks(num_preemptions, victim):
    """Who has computed least goes first, but for one that went three times: its equals go before it."""
    bench = Bench(num_blocks=8, watermark=0.0, max_model_len=28)
    for _ in range(3):  # answers are short, it seems
        bench.add([7], max_tokens=1)
        bench.run()
    sequences = [bench.add([number] * length, max_tokens=16)[0] for number, length in ((1, 8), (2, 3))]
    bench.step()
    sequences[1].num_preemptions = num_preemptions
    while not bench.scheduler.num_preemptions:
        bench.step()
    assert ["WAITING" if index == victim else "RUNNING" for index in range(2)] == _statuses(*sequences)


def test_who_was_preempted_does_not_come_back_at_once():
    """After blocks ran out, nobody of that level is admitted until a sequence has ended."""
    bench = Bench(num_blocks=8, watermark=0.0, max_model_len=28)
    for _ in range(3):
        bench.add([7], max_tokens=1)
        bench.run()
    first, second = (bench.add([number] * 3, max_tokens=20)[0] for number in range(2))
    bench.run()
    assert (0, 1) == (first.num_preemptions, second.num_preemptions)


# Ageing


def _waits(aging_ns):
    """Steps until one of level 5 begins, beside an endless stream of level 1."""
    bench = Bench(max_num_seqs=1, aging_ns=aging_ns)
    (low,) = bench.add([1], level=5, max_tokens=1)
    for number in range(200):
        bench.now_ns += 1
        bench.add([2], level=1, max_tokens=1)
        bench.step()
        if low.status is SequenceStatus.ENDED:
            return number
    return None


def test_ageing_bounds_the_wait():
    """With ageing, level 5 begins after four times ``aging_ns`` of level 1; without it, it waits for ever."""
    assert None is _waits(0)
    assert [11, 39] == [_waits(3), _waits(10)]


def test_with_ageing_only_a_whole_level_preempts():
    """One that ranks better by less than ``aging_ns`` waits; by as much, it preempts."""
    for arrival_ns, num_preemptions in ((91, 0), (90, 1)):
        bench = Bench(max_num_seqs=1, aging_ns=10)
        (running,) = bench.add([1], level=1, arrival_ns=100, max_tokens=9)
        bench.step()
        bench.add([2], level=1, arrival_ns=arrival_ns, max_tokens=2)
        bench.step()
        assert num_preemptions == running.num_preemptions


# Prefixes


def test_a_prefix_being_computed_is_waited_for():
    """Of three equal prompts one is computed; the others begin a step later with its blocks."""
    bench = Bench(max_num_batched_tokens=64)
    first, *others = (bench.add(14, max_tokens=3)[0] for _ in range(3))
    (different,) = bench.add([9] * 6, max_tokens=3)
    bench.step()
    assert {first: 14, different: 6} == bench.scheduled()
    bench.step()
    assert {first: 1, different: 1, others[0]: 2, others[1]: 2} == bench.scheduled()
    assert [0, 12, 12] == [seq.num_cached for seq in (first, *others)]


def test_a_full_hit_computes_at_least_one_token():
    """A prompt that is cached whole computes its last block again, to have something to sample from."""
    bench = Bench()
    for _ in range(2):
        (seq,) = bench.add(8, max_tokens=3)
        bench.run()
    assert 4 == seq.num_cached
    assert undisturbed(seq) == seq.tokens.tolist()


def test_answers_are_cached_too():
    """A prompt that repeats an earlier prompt and its answer finds both."""
    bench = Bench()
    (first,) = bench.add(6, max_tokens=10)
    bench.run()
    (second,) = bench.add(first.tokens.tolist(), max_tokens=1)
    bench.run()
    assert 12 == second.num_cached


def test_salts_do_not_mix():
    """Equal prompts with different salts share nothing."""
    bench = Bench()
    hits = []
    for salt in (b"a", b"b", b"", b"a"):
        (seq,) = bench.add(8, salt=salt, max_tokens=1)
        bench.run()
        hits.append(seq.num_cached)
    assert [0, 0, 0, 4] == hits


def test_what_was_not_computed_is_not_cached():
    """The blocks of a failed step, or of one under way, are not found."""
    bench = Bench()
    bench.add(9, max_tokens=1)
    bench.scheduler.schedule()
    bench.scheduler.fail()
    (seq,) = bench.add(9, max_tokens=1)
    bench.run()
    assert 0 == seq.num_cached


# Ends


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 3}, (3, "length")),
        ({"max_tokens": 90}, (20, "length")),
        ({"max_tokens": 9, "eos": (44,)}, (2, "stop")),
        ({"max_tokens": 9, "stop_token_ids": [44]}, (2, "stop")),
        ({"max_tokens": 2, "stop_token_ids": [44]}, (2, "stop")),
        ({"max_tokens": 9, "eos": (44,), "ignore_eos": True}, (9, "length")),
        ({"max_tokens": 9, "eos": (44,), "min_tokens": 2}, (3, "stop")),
    ],
)
def test_how_a_sequence_ends(fields, expected):
    """At max_tokens or the context by length, at an end-of-text or stop token by that, not before min_tokens."""
    bench = Bench(max_model_len=24)
    (seq,) = bench.add(4, **fields)
    tokens = iter([1, 44, 44] + [1] * 40)
    while True:
        bench.scheduler.schedule()
        (result,) = bench.scheduler.complete(np.array([next(tokens)], np.int32))
        if result.is_finished:
            break
    assert expected == (seq.num_output, result.finish_reason)
    assert (SequenceStatus.ENDED, 0) == (seq.status, bench.pool.num_used)


def test_a_cancel_in_the_last_step_is_no_finish():
    """A sequence cancelled while its last token is computed has no result, and frees its blocks with the step."""
    bench = Bench()
    (seq,) = bench.add(4, max_tokens=1)
    plan = bench.scheduler.schedule()
    bench.scheduler.cancel(seq)
    assert bench.pool.num_used
    assert [] == bench.scheduler.complete(bench.runner.run(plan))
    assert (SequenceStatus.ENDED, True, 0) == (seq.status, seq.is_cancelled, bench.pool.num_used)
    bench.scheduler.cancel(seq)
    assert bench.scheduler.is_idle


def test_a_deadline_ends_who_waits_and_who_runs():
    """Sequences are given up at their deadline, in the order of the deadlines; later sweeps do not repeat them."""
    bench = Bench(max_num_seqs=1)
    running, waiting, patient = (bench.add(4, max_tokens=9, deadline_ns=at)[0] for at in (20, 10, 30))
    bench.step()
    assert [] == bench.scheduler.sweep(9)
    assert [waiting, running] == bench.scheduler.sweep(20)
    assert ["ENDED", "ENDED", "WAITING"] == _statuses(running, waiting, patient)
    bench.run()
    assert [] == bench.scheduler.sweep(100)


def test_deadlines_of_the_ended_do_not_pile_up():
    """A thousand sequences that ended long before their deadline are forgotten."""
    bench = Bench()
    for _ in range(1000):
        bench.add(1, max_tokens=1, deadline_ns=10**12)
        bench.step()
    assert len(bench.scheduler._deadlines) < 200


def test_a_failed_step_ends_its_own_sequences_only():
    """Those of the step have ended, those that wait go on."""
    bench = Bench(max_num_seqs=1)
    failed, waiting = (bench.add(4, max_tokens=2)[0] for _ in range(2))
    bench.scheduler.schedule()
    assert [failed] == bench.scheduler.fail()
    assert ["ENDED", "WAITING"] == _statuses(failed, waiting)
    bench.run()
    assert undisturbed(waiting) == waiting.tokens.tolist()


def test_one_step_at_a_time():
    """A plan must be completed or failed once, with a token for each sample row, before the next is made."""
    bench = Bench()
    bench.add(4, max_tokens=2)
    bench.scheduler.schedule()
    with pytest.raises(RuntimeError, match="complete or fail"):
        bench.scheduler.schedule()
    with pytest.raises(ValueError, match="1 new tokens are due, got 2"):
        bench.scheduler.complete(np.zeros(2, np.int32))
    bench.scheduler.complete(np.zeros(1, np.int32))
    with pytest.raises(RuntimeError, match="no plan"):
        bench.scheduler.complete(np.zeros(0, np.int32))
    with pytest.raises(RuntimeError, match="no plan"):
        bench.scheduler.fail()


def test_check_notices_a_wrong_table():
    """A running sequence whose table lost a block fails the check."""
    bench = Bench()
    (seq,) = bench.add(4, max_tokens=2)
    bench.step()
    bench.scheduler.check()
    seq.block_table.pop()
    with pytest.raises(AssertionError, match="owners"):
        bench.scheduler.check()
