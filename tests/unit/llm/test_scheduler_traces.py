"""The scheduler through thousands of short random lives; time and chance are in the test's hands."""

import random

import pytest
from tests.unit.llm.fake_runner import VOCAB, Bench, undisturbed

from weft.llm.scheduler.sequence import SequenceStatus

NUM_LIVES = 10_000
MAX_STEPS = 400


def _bench(rng, **config):
    window = rng.choice([0, 0, 2, 3, 4, 7])
    failing = rng.choice([0.0, 0.2, 1.0])
    bench = Bench(
        **{
            "num_blocks": rng.choice([7, 7, 9, 12, 30]),
            "max_num_seqs": rng.choice([1, 2, 3, 5]),
            "max_num_batched_tokens": rng.choice([5, 8, 16, 24]),
            "max_model_len": 48 if window else 24,  # a pool holds longer texts than it has room for
            "window": window,
            "num_offload_blocks": rng.choice([0, 1, 3, 20]),
            "enable_prefix_caching": rng.random() < 0.8,
            "long_prefill_token_threshold": rng.choice([0, 0, 3, 8]),
            "watermark": rng.choice([0.0, 0.03, 0.2]),
        }
        | config,
    )
    bench.runner.may_fail = lambda: rng.random() < failing
    return bench


def _arrive(rng, bench, **fields):
    prefix = [1] * rng.choice([0, 0, 4, 9])
    bench.add(
        prefix + [rng.randrange(3) for _ in range(rng.randint(1, 10))],
        level=rng.randrange(3),
        salt=rng.choice([b"", b"", b"x"]),
        eos=(rng.randrange(VOCAB),),
        n=rng.choice([1, 1, 1, 2, 3]),
        max_tokens=rng.choice([1, 3, 6, 14, 30 if bench.pool.window.num_tokens else 14]),
        **fields,
    )


def _assert_clean(bench):
    assert bench.scheduler.is_idle
    assert 0 == bench.pool.num_used
    assert bench.scheduler.schedule() is None
    bench.scheduler.check()


def _live(rng, bench, act, **fields):
    """Requests arrive while steps run, and ``act`` after each; until nothing is left."""
    num_arrivals = rng.randint(1, 3)
    for _ in range(MAX_STEPS):
        while num_arrivals and rng.random() < 0.5:
            num_arrivals -= 1
            _arrive(rng, bench, **fields)
        bench.now_ns += 1
        if bench.scheduler.is_idle and not num_arrivals:
            return
        act()
    raise AssertionError(f"not at its end after {MAX_STEPS} steps: {bench.sequences}")


@pytest.mark.parametrize("quarter", range(4))
def test_every_life_is_as_if_undisturbed(quarter):
    """Whatever runs beside it, preempts it, or shares its prefix, a sequence has the tokens that it has alone.

    The runner checks on the way that no plan exceeds the budget or writes what somebody else reads.
    """
    num_preemptions = num_loaded = num_failed = 0
    for seed in range(quarter, NUM_LIVES // 2, 4):
        rng = random.Random(seed)
        bench = _bench(rng, aging_ns=rng.choice([0, 0, 4]))
        try:
            _live(rng, bench, bench.step)
            for seq in bench.sequences:
                assert undisturbed(seq) == seq.tokens.tolist()
            _assert_clean(bench)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        num_preemptions += bench.scheduler.num_preemptions
        num_loaded += bench.pool.tier.num_loaded
        num_failed += bench.pool.tier.num_failed
    assert num_preemptions > 100
    assert num_loaded > num_failed > 10


def test_storms_leave_nothing_behind():
    """Cancels (between steps and during one), deadlines and failed steps free everything and touch nobody else."""
    num_ended = dict.fromkeys(("cancelled", "late", "failed", "finished"), 0)
    for seed in range(NUM_LIVES // 4):
        rng = random.Random(seed)
        bench = _bench(rng)
        scheduler = bench.scheduler
        dropped, finished = set(), []

        def storm(rng=rng, bench=bench, scheduler=scheduler, dropped=dropped, finished=finished):
            late = scheduler.sweep(bench.now_ns)
            _cancel(rng, bench, dropped, num_ended)
            plan = scheduler.schedule()
            dropped.update(late)
            num_ended["late"] += len(late)
            if plan is None:
                return
            tokens = bench.runner.run(plan)
            _cancel(rng, bench, dropped, num_ended)
            if rng.random() < 0.05:
                failed = scheduler.fail()
                assert not dropped.intersection(failed)
                dropped.update(failed)
                num_ended["failed"] += len(failed)
            else:
                results = bench.complete(tokens)
                assert not dropped.intersection(result.seq for result in results)
                finished.extend(result.seq for result in results if result.is_finished)
            if bench.now_ns % 4 == 0:
                scheduler.check()

        try:
            _live(rng, bench, storm, deadline_ns=rng.choice([None, None, rng.randint(1, 30)]))
            for seq in finished:
                assert undisturbed(seq) == seq.tokens.tolist()
            assert {*finished, *dropped} == set(bench.sequences)
            assert all(seq.status is SequenceStatus.ENDED for seq in bench.sequences)
            _assert_clean(bench)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        num_ended["finished"] += len(finished)
    assert min(num_ended.values()) > 100


def test_a_better_one_does_not_wait_for_worse_ones():
    """While tokens are left in a step, none waits that is strictly better than all that run; equals begin in turn."""
    num_preemptions = 0
    for seed in range(NUM_LIVES // 4):
        rng = random.Random(seed)
        bench = _bench(rng, enable_prefix_caching=False, long_prefill_token_threshold=99)
        config = bench.config

        def check(bench=bench, config=config):
            bench.plan = plan = bench.scheduler.schedule()
            if plan is None:
                return
            waiting = [seq.level for seq in bench.sequences if seq.status is SequenceStatus.WAITING]
            if len(plan.token_ids) <= config.max_num_batched_tokens - config.block_size:
                assert min(waiting, default=9) >= min(seq.level for seq in bench.scheduled())
            bench.complete(bench.runner.run(plan))

        try:
            _live(rng, bench, check)
            for level in range(3):
                # Forks are scheduled with their parents, whose turn it was.
                parents = [seq for seq in bench.sequences if seq.level == level and not seq.choice]
                starts = [seq.first_scheduled_ns for seq in parents]
                assert sorted(starts) == starts
            _assert_clean(bench)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        num_preemptions += bench.scheduler.num_preemptions
    assert num_preemptions > 100


def _cancel(rng, bench, dropped, num_ended):
    for seq in bench.sequences:
        if seq.status is not SequenceStatus.ENDED and rng.random() < 0.05:
            bench.scheduler.cancel(seq)
            if seq not in dropped:
                dropped.add(seq)
                num_ended["cancelled"] += 1
