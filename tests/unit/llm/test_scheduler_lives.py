"""The scheduler through thousands of short random lives; time and chance are in the test's hands.

Three modes: every step waits for the one before; sequences have random drafts; or a step is planned before the tokens
of the one in flight are known.
"""

import random
from collections import Counter, deque

import pytest
from tests.unit.llm.fake_runner import VOCAB, Bench, undisturbed

from weft.llm.scheduler.decodes import build_plan
from weft.llm.scheduler.plan import num_accepted
from weft.llm.scheduler.sequence import SequenceStatus
from weft.llm.scheduler.slot_allocator import SlotAllocator

MAX_STEPS = 400
MODES = ("waiting", "drafts", "ahead")
#: Seeds; `make test-long` runs the other ones.
SEEDS = pytest.mark.parametrize(
    "seeds", [range(600), pytest.param(range(600, 5000), marks=pytest.mark.long)], ids=["some", "many"]
)


class RandomDrafts:
    """Drafts of random number, each right with a random chance, within the room of the step."""

    def __init__(self, rng, events):
        self.rng, self.events = rng, events
        self.rightness = rng.choice([0.0, 0.5, 0.9, 1.0])

    def propose(self, seqs, num_rows, num_left):
        """See ``DraftSource``."""
        drafted = []
        for seq in seqs:
            drafts = []
            right = undisturbed(seq)[len(seq.tokens) :]
            for index in range(min(self.rng.randrange(9), num_left)):
                is_right = self.rng.random() < self.rightness and index < len(right)
                drafts.append(right[index] if is_right else self.rng.randrange(VOCAB))
            if drafts:
                seq.drafts = drafts
                drafted.append(seq)
                num_left -= len(drafts)
        return drafted

    def observe(self, seq, count):
        """See ``DraftSource``."""
        self.events.update(accepted=count, rejected=len(seq.drafts) - count)

    def end_step(self):
        """See ``DraftSource``."""
        self.events.update(ended=1)


class Life:
    """A bench of random size, and requests that arrive while steps run.

    Attributes:
        outputs: New tokens of each sequence, as results told them.
        finished: Sequences that a result has finished.
        dropped: Sequences that were cancelled, failed or late.
        events: How often what happened.
    """

    def __init__(self, seed, mode, events, **config):
        self.rng = rng = random.Random(seed)
        self.mode, self.events = mode, events
        self.in_flight = deque()
        self.outputs, self.finished, self.dropped = {}, [], set()
        window = 0 if mode == "ahead" else rng.choice([0, 0, 2, 3, 4, 7])
        options = {
            "num_blocks": rng.choice([7, 7, 9, 12, 30]),
            "max_num_seqs": rng.choice([1, 2, 3, 5]),
            "max_num_batched_tokens": rng.choice([5, 8, 16, 24]),
            "max_model_len": 48 if window else 24,  # a pool holds longer texts than it has room for
            "window": window,
            "num_offload_blocks": rng.choice([0, 1, 3, 20]),
            "enable_prefix_caching": rng.random() < 0.8,
            "long_prefill_token_threshold": rng.choice([0, 0, 3, 8]),
            "watermark": rng.choice([0.0, 0.03, 0.2]),
            "drafts": RandomDrafts(rng, events) if mode == "drafts" else None,
            "aging_ns": rng.choice([0, 0, 4]),
        }
        self.bench = Bench(**options | config)
        failing = rng.choice([0.0, 0.2, 1.0])
        self.bench.runner.may_fail = lambda: rng.random() < failing

    def arrive(self, has_deadline):
        rng = self.rng
        self.bench.add(
            [1] * rng.choice([0, 0, 4, 9]) + [rng.randrange(3) for _ in range(rng.randint(1, 10))],
            level=rng.randrange(3),
            salt=rng.choice([b"", b"", b"x"]),
            eos=(rng.randrange(VOCAB),),
            n=rng.choice([1, 1, 1, 2, 3]),
            max_tokens=rng.choice([1, 3, 6, 14, 30 if self.bench.pool.window.num_tokens else 14]),
            deadline_ns=rng.choice([None, None, rng.randint(1, 30)]) if has_deadline else None,
        )

    def live(self, act, *, has_deadlines=False):
        """Requests arrive while steps run, and ``act`` after each; until nothing is left and nothing is owned."""
        scheduler, pool = self.bench.scheduler, self.bench.pool
        num_arrivals = self.rng.randint(1, 3)
        for _ in range(MAX_STEPS):
            while num_arrivals and self.rng.random() < 0.5:
                num_arrivals -= 1
                self.arrive(has_deadlines)
            self.bench.now_ns += 1
            if scheduler.is_idle and not num_arrivals:
                break
            act()
            if self.mode == "drafts" or self.bench.now_ns % 4 == 0:
                scheduler.check()
        assert scheduler.is_idle
        assert 0 == pool.num_used
        assert scheduler.schedule() is None
        scheduler.check()
        for seq in self.finished:
            assert undisturbed(seq) == [*seq.request.prompt_ids.tolist(), *self.outputs[seq]]
        assert all(seq.status is SequenceStatus.ENDED for seq in self.bench.sequences)
        assert {*self.finished, *self.dropped} == set(self.bench.sequences)
        self.events.update(
            preemptions=scheduler.num_preemptions,
            loads=pool.tier.num_loaded,
            failed_loads=pool.tier.num_failed,
            hits=sum(seq.num_cached > 0 for seq in self.bench.sequences),
            finished=len(self.finished),
        )

    def step(self):
        self.plan()
        self.collect()

    def plan(self, *, fails=False):
        """Plan what can be planned, and run it; its tokens are known later."""
        if not self.in_flight:
            self._launch(self.bench.scheduler.schedule())
        if self.mode == "ahead" and self.in_flight and self.in_flight[-1][1] is not None:
            plan = self.bench.scheduler.schedule_ahead()
            self.events["ahead"] += plan is not None
            self._launch(plan, fails=fails)

    def _launch(self, plan, *, fails=False):
        if plan is not None:
            if fails:
                self.bench.runner.spoil(plan)
            self.in_flight.append((plan, None if fails else self.bench.runner.run(plan)))

    def collect(self, *, fails=False):
        """Take the tokens of the oldest step, or let it fail and those after it."""
        if not self.in_flight:
            return
        plan, tokens = self.in_flight.popleft()
        if fails or tokens is None:
            for each in (plan, *(later for later, _ in self.in_flight)):
                self.bench.runner.spoil(each)
            self.in_flight.clear()
            self.drop(self.bench.scheduler.fail(), "failed")
            return
        for result in self.bench.complete(tokens):
            assert result.seq not in (*self.finished, *self.dropped)
            self.outputs.setdefault(result.seq, []).extend(result.token_ids)
            if result.is_finished:
                self.finished.append(result.seq)

    def drop(self, seqs, why):
        assert not self.dropped.intersection(seqs)
        self.dropped.update(seqs)
        self.events[why] += len(seqs)

    def cancel(self):
        for seq in self.bench.sequences:
            if seq.status is not SequenceStatus.ENDED and self.rng.random() < 0.05:
                self.bench.scheduler.cancel(seq)
                if seq not in self.dropped and seq not in self.finished:
                    self.drop([seq], "cancelled")

    def storm(self):
        """A step with cancels at each point, deadlines and failures."""
        self.drop(self.bench.scheduler.sweep(self.bench.now_ns), "late")
        self.cancel()
        self.plan(fails=self.rng.random() < 0.05)
        self.cancel()
        self.collect(fails=self.rng.random() < 0.05)
        self.cancel()


def _run(mode, seeds, live, **config):
    """What happened in the lives of the seeds; the seed of one that went wrong is in the message."""
    events = Counter()
    for seed in seeds:
        try:
            live(Life(seed, mode, events, **config))
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    return events


@SEEDS
@pytest.mark.parametrize("mode", MODES)
def test_every_life_is_as_if_undisturbed(mode, seeds):
    """Whatever runs beside it, preempts it or shares its prefix, a sequence has the tokens that it has alone.

    The runner checks on the way that no plan exceeds the budget or writes what somebody else reads.
    """
    events = _run(mode, seeds, lambda life: life.live(life.step))
    assert min(events["preemptions"], events["hits"], events["failed_loads"]) > 10
    assert events["loads"] > events["failed_loads"]
    assert mode != "drafts" or min(events["accepted"], events["rejected"]) > 1000
    assert mode != "ahead" or events["ahead"] > 500


@SEEDS
@pytest.mark.parametrize("mode", MODES)
def test_storms_leave_nothing_behind(mode, seeds):
    """Cancels, deadlines and failed steps, at each point, free everything and touch nobody else."""
    events = _run(mode, seeds, lambda life: life.live(life.storm, has_deadlines=True))
    assert min(events[name] for name in ("cancelled", "late", "failed", "finished")) > 30


@SEEDS
def test_a_better_one_does_not_wait_for_worse_ones(seeds):
    """While tokens are left in a step, none waits that is strictly better than all that run; equals begin in turn."""

    def live(life):
        bench = life.bench

        def step():
            life.plan()
            if not life.in_flight:
                return
            bench.plan = life.in_flight[0][0]
            waiting = [seq.level for seq in bench.sequences if seq.status is SequenceStatus.WAITING]
            if len(bench.plan.token_ids) <= bench.config.max_num_batched_tokens - bench.config.block_size:
                assert min(waiting, default=9) >= min(seq.level for seq in bench.scheduled())
            life.collect()

        life.live(step)
        for level in range(3):
            # Forks are scheduled with their parents, whose turn it was.
            starts = [seq.first_scheduled_ns for seq in bench.sequences if seq.level == level and not seq.choice]
            assert sorted(starts) == starts

    config = {"enable_prefix_caching": False, "long_prefill_token_threshold": 99, "aging_ns": 0}
    assert _run("waiting", seeds, live, **config)["preemptions"] > 30


@pytest.mark.parametrize("defect", ["accepts one too many", "positions off by one", "keeps blocks of rejected drafts"])
def test_a_defect_would_be_seen(defect, monkeypatch):
    """The tests above would fail if the rule accepted a wrong draft, or a draft were sampled at another position."""
    module = "weft.llm.scheduler.scheduler"

    def one_too_many(drafts, samples):
        return min(num_accepted(drafts, samples) + 1, len(drafts))

    def shifted(*args, **options):
        plan = build_plan(*args, **options)
        return plan._replace(sample_positions=plan.sample_positions + (plan.num_drafts.sum() > 0))

    if defect == "accepts one too many":
        monkeypatch.setattr(f"{module}.num_accepted", one_too_many)
    elif defect == "positions off by one":
        monkeypatch.setattr(f"{module}.build_plan", shifted)
    else:
        monkeypatch.setattr(SlotAllocator, "release_unused_blocks", lambda self, seq: None)
    with pytest.raises(AssertionError, match="seed"):
        test_every_life_is_as_if_undisturbed("drafts", range(600))


def test_a_plan_ahead_has_unknown_tokens_in_their_places():
    """The step after one in flight computes -1 at the next position; what comes after a stop token is dropped."""
    life = Life(0, "ahead", Counter())
    bench = life.bench = Bench(max_model_len=40)
    stop = undisturbed(bench.add([1, 2, 3], max_tokens=9)[0])[5]
    (seq,) = bench.add([1, 2, 3], max_tokens=9, eos=(stop,))
    while seq not in life.finished:
        life.plan()
        plan, _ = life.in_flight[-1]
        life.collect()
    assert seq.slot >= 0  # until the step is completed that was planned before its end was known
    assert seq.slot in plan.slots.tolist()
    life.collect()
    assert seq.status is SequenceStatus.ENDED
    assert undisturbed(seq) == [1, 2, 3, *life.outputs[seq]]


def test_nothing_is_preempted_ahead():
    """Where a waiting sequence may preempt, or blocks are short, the tokens of the step in flight come first."""
    life = Life(0, "ahead", Counter())
    bench = life.bench = Bench(max_num_seqs=1)
    (worse,) = bench.add([1, 2, 3], level=1, max_tokens=9)
    life.plan()
    bench.add([4, 5], level=0, max_tokens=1)
    life.collect()
    assert bench.scheduler.schedule_ahead() is None
    life.collect()
    assert 0 == worse.num_preemptions
    bench.step()
    assert 1 == worse.num_preemptions
