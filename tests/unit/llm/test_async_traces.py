"""Steps planned before the tokens of the one in flight are known, through thousands of short random lives."""

import random
from collections import deque

import pytest
from tests.unit.llm.fake_runner import VOCAB, Bench, undisturbed
from tests.unit.llm.test_scheduler_traces import _assert_clean, _bench, _live

from weft.llm.scheduler.sequence import SequenceStatus

NUM_LIVES = 600


class _Pipeline:
    """Runs a step and plans the next one before it takes the tokens of the first, as an engine does.

    Attributes:
        outputs: New tokens of each sequence, as results told them.
        finished: Sequences that a result has finished.
        num_ahead: Steps that were planned ahead.
    """

    def __init__(self, bench):
        self.bench = bench
        self.in_flight = deque()
        self.outputs = {}
        self.finished = []
        self.num_ahead = 0

    def launch(self, plan, *, fails=False):
        """Run the plan; its tokens are known later."""
        if fails:
            self.bench.runner.spoil(plan)
        self.in_flight.append((plan, None if fails else self.bench.runner.run(plan)))

    def plan(self, *, fails=False):
        """Plan what can be planned; whether a step is in flight."""
        scheduler = self.bench.scheduler
        if not self.in_flight:
            plan = scheduler.schedule()
            if plan is None:
                return False
            self.launch(plan)
        if self.in_flight[-1][1] is not None:
            plan = scheduler.schedule_ahead()
            if plan is not None:
                self.num_ahead += 1
                self.launch(plan, fails=fails)
        return True

    def collect(self, *, fails=False):
        """Take the tokens of the oldest step; sequences that fail with it."""
        plan, tokens = self.in_flight.popleft()
        if fails or tokens is None:
            self.bench.runner.spoil(plan)
            for later, _ in self.in_flight:
                self.bench.runner.spoil(later)
            self.in_flight.clear()
            return self.bench.scheduler.fail()
        for result in self.bench.scheduler.complete(tokens, failed_loads=self.bench.runner.failed_loads):
            assert result.seq not in self.finished
            self.outputs.setdefault(result.seq, []).extend(result.token_ids)
            if result.is_finished:
                self.finished.append(result.seq)
        return []

    def assert_as_undisturbed(self):
        """Every sequence that has finished got what it gets alone, no token more."""
        for seq in self.finished:
            assert undisturbed(seq) == [*seq.request.prompt_ids.tolist(), *self.outputs[seq]]


@pytest.mark.parametrize("half", range(2))
def test_every_life_is_as_if_each_step_had_waited(half):
    """With steps planned ahead a sequence has the tokens that it has alone; forks, preemptions and prefixes included.

    The runner checks on the way that no plan exceeds the budget or writes what somebody else reads.
    """
    num_ahead = num_preemptions = 0
    for seed in range(half, NUM_LIVES, 2):
        rng = random.Random(seed)
        bench = _bench(rng, aging_ns=rng.choice([0, 0, 4]), window=0, max_model_len=24)
        pipeline = _Pipeline(bench)
        try:
            _live(rng, bench, lambda pipeline=pipeline: pipeline.plan() and pipeline.collect())
            assert set(pipeline.finished) == set(bench.sequences)
            pipeline.assert_as_undisturbed()
            _assert_clean(bench)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        num_ahead += pipeline.num_ahead
        num_preemptions += bench.scheduler.num_preemptions
    assert num_ahead > 500
    assert num_preemptions > 10


def test_storms_between_two_steps_leave_nothing_behind():
    """Cancels and deadlines at each point, and failures of either step, free everything and touch no other."""
    num_ended = dict.fromkeys(("cancelled", "late", "failed", "finished"), 0)
    for seed in range(NUM_LIVES):
        rng = random.Random(seed)
        bench = _bench(rng, window=0, max_model_len=24)
        pipeline = _Pipeline(bench)
        dropped = set()

        def cancel(rng=rng, bench=bench, pipeline=pipeline, dropped=dropped):
            for seq in bench.sequences:
                if seq.status is not SequenceStatus.ENDED and rng.random() < 0.05:
                    bench.scheduler.cancel(seq)
                    if seq not in dropped and seq not in pipeline.finished:
                        dropped.add(seq)
                        num_ended["cancelled"] += 1

        def storm(rng=rng, bench=bench, pipeline=pipeline, dropped=dropped, cancel=cancel):
            late = bench.scheduler.sweep(bench.now_ns)
            assert not dropped.intersection(late)
            dropped.update(late)
            num_ended["late"] += len(late)
            cancel()
            if not pipeline.plan(fails=rng.random() < 0.05):
                return
            cancel()
            before = set(pipeline.outputs)
            failed = pipeline.collect(fails=rng.random() < 0.05)
            assert not dropped.intersection(failed)
            assert not dropped.intersection(set(pipeline.outputs) - before)
            dropped.update(failed)
            num_ended["failed"] += len(failed)
            cancel()
            if bench.now_ns % 4 == 0:
                bench.scheduler.check()

        try:
            _live(rng, bench, storm, deadline_ns=rng.choice([None, None, rng.randint(1, 30)]))
            pipeline.assert_as_undisturbed()
            assert {*pipeline.finished, *dropped} == set(bench.sequences)
            assert all(seq.status is SequenceStatus.ENDED for seq in bench.sequences)
            _assert_clean(bench)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        num_ended["finished"] += len(pipeline.finished)
    assert min(num_ended.values()) > 30


def test_a_plan_ahead_has_unknown_tokens_in_their_places():
    """The step after one in flight computes -1 at the next position; what comes after a stop token is dropped."""
    bench = Bench(max_model_len=40)
    first = bench.add([1, 2, 3], max_tokens=9)[0]
    stop = undisturbed(first)[5]
    (seq,) = bench.add([1, 2, 3], max_tokens=9, eos=(stop,))
    pipeline = _Pipeline(bench)
    while seq not in pipeline.finished:
        pipeline.plan()
        plan, _ = pipeline.in_flight[-1]
        pipeline.collect()
    assert seq.slot >= 0  # until the step is completed that was planned before its end was known
    assert seq.slot in plan.slots.tolist()
    pipeline.collect()
    assert seq.status is SequenceStatus.ENDED
    assert undisturbed(seq) == [1, 2, 3, *pipeline.outputs[seq]]


@pytest.mark.parametrize(
    "fields",
    [{"presence_penalty": 0.5}, {"n": 2}, {"max_tokens": 2}],
    ids=["penalties", "forks", "ends by its length"],
)
def test_what_depends_on_the_token_waits_for_it(fields):
    """No step is planned ahead for penalties, for a sequence about to fork, or for one that is sure to end."""
    bench = Bench()
    bench.add([1, 2, 3], **{"max_tokens": 3} | fields)
    if "max_tokens" in fields:
        bench.step()
    assert bench.scheduler.schedule() is not None
    assert bench.scheduler.schedule_ahead() is None


def test_nothing_is_preempted_ahead():
    """Where a waiting sequence may preempt, or blocks are short, the tokens of the step in flight come first."""
    bench = Bench(max_num_seqs=1)
    (worse,) = bench.add([1, 2, 3], level=1, max_tokens=9)
    pipeline = _Pipeline(bench)
    pipeline.plan()
    bench.add([4, 5], level=0, max_tokens=1)
    pipeline.collect()
    assert bench.scheduler.schedule_ahead() is None
    pipeline.collect()
    assert 0 == worse.num_preemptions
    bench.step()
    assert 1 == worse.num_preemptions


def test_only_one_step_is_planned_ahead():
    """Without a step in flight there is none to follow, and none follows two."""
    bench = Bench()
    bench.add([1, 2, 3], max_tokens=VOCAB)
    assert bench.scheduler.schedule_ahead() is None
    assert bench.scheduler.schedule() is not None
    assert bench.scheduler.schedule_ahead() is not None
    assert bench.scheduler.schedule_ahead() is None
    with pytest.raises(RuntimeError, match="complete or fail"):
        bench.scheduler.schedule()
