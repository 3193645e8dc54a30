"""The scheduler with random drafts through thousands of short random lives: what comes out does not depend on them."""

import random

import pytest
from tests.unit.llm.fake_runner import VOCAB, Bench, undisturbed

from weft.llm.scheduler.decodes import build_plan
from weft.llm.scheduler.plan import num_accepted
from weft.llm.scheduler.sequence import SequenceStatus
from weft.llm.scheduler.slot_allocator import SlotAllocator

NUM_LIVES = 2000
MAX_STEPS = 400


class RandomDrafts:
    """Drafts of random number, each right with a random chance, within the room of the step."""

    def __init__(self, rng):
        self.rng = rng
        self.rightness = rng.choice([0.0, 0.5, 0.9, 1.0])
        self.num_drafts = self.num_accepted = 0

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

    def observe(self, seq, samples, count):
        """See ``DraftSource``."""
        assert len(samples) == len(seq.drafts) + 1
        assert seq.drafts[:count] == samples[:count]
        self.num_drafts += len(seq.drafts)
        self.num_accepted += count


def _bench(rng, drafts):
    window = rng.choice([0, 0, 2, 3, 7])
    failing = rng.choice([0.0, 0.3])
    bench = Bench(
        window=window,
        num_offload_blocks=rng.choice([0, 1, 20]),
        num_blocks=rng.choice([7, 7, 9, 12, 30]),
        drafts=drafts,
        max_num_seqs=rng.choice([1, 2, 3, 5]),
        max_num_batched_tokens=rng.choice([5, 8, 16, 24]),
        max_model_len=48 if window else 24,
        enable_prefix_caching=rng.random() < 0.8,
        long_prefill_token_threshold=rng.choice([0, 0, 3, 8]),
        watermark=rng.choice([0.0, 0.03, 0.2]),
    )
    bench.runner.may_fail = lambda: rng.random() < failing
    return bench


def _arrive(rng, bench):
    bench.add(
        [1] * rng.choice([0, 0, 4, 9]) + [rng.randrange(3) for _ in range(rng.randint(1, 10))],
        level=rng.randrange(3),
        salt=rng.choice([b"", b"", b"x"]),
        eos=(rng.randrange(VOCAB), rng.randrange(VOCAB)),
        n=rng.choice([1, 1, 1, 2, 3]),
        max_tokens=rng.choice([1, 3, 6, 14, 30 if bench.pool.window.num_tokens else 14]),
    )


def _live(rng, bench, act):
    num_arrivals = rng.randint(1, 3)
    for _ in range(MAX_STEPS):
        while num_arrivals and rng.random() < 0.5:
            num_arrivals -= 1
            _arrive(rng, bench)
        bench.now_ns += 1
        if bench.scheduler.is_idle and not num_arrivals:
            assert 0 == bench.pool.num_used
            return
        act()
        bench.scheduler.check()
    raise AssertionError(f"not at its end after {MAX_STEPS} steps: {bench.sequences}")


@pytest.mark.parametrize("half", range(2))
def test_every_life_with_drafts_is_as_without(half):
    """With random drafts, right and wrong, a sequence has the tokens that it has alone and without drafts.

    Preemptions, forks, prefix cache and chunks included; no block with a rejected token is ever found in the cache,
    because a sequence that found one would go on differently.
    """
    num_preemptions = num_drafts = num_accepted = num_hits = 0
    for seed in range(half, NUM_LIVES, 2):
        rng = random.Random(seed)
        drafts = RandomDrafts(rng)
        bench = _bench(rng, drafts)
        try:
            _live(rng, bench, bench.step)
            for seq in bench.sequences:
                assert undisturbed(seq) == seq.tokens.tolist()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        num_preemptions += bench.scheduler.num_preemptions
        num_drafts += drafts.num_drafts
        num_accepted += drafts.num_accepted
        num_hits += sum(seq.num_cached > 0 for seq in bench.sequences)
    assert min(num_preemptions, num_hits) > 100
    assert 1000 < num_accepted < num_drafts - 1000


def test_drafts_in_storms_leave_nothing_behind():
    """Cancels between steps and in the middle of one, and failed steps, free the blocks of drafts too."""
    num_ended = dict.fromkeys(("cancelled", "failed", "finished"), 0)
    for seed in range(NUM_LIVES // 2):
        rng = random.Random(seed)
        bench = _bench(rng, RandomDrafts(rng))
        scheduler = bench.scheduler
        finished = []

        def cancel(rng=rng, bench=bench, scheduler=scheduler):
            for seq in bench.sequences:
                if seq.status is not SequenceStatus.ENDED and not seq.is_cancelled and rng.random() < 0.05:
                    scheduler.cancel(seq)
                    num_ended["cancelled"] += 1

        def storm(rng=rng, bench=bench, scheduler=scheduler, cancel=cancel, finished=finished):
            cancel()
            plan = scheduler.schedule()
            if plan is None:
                return
            tokens = bench.runner.run(plan)
            cancel()
            if rng.random() < 0.05:
                num_ended["failed"] += len(scheduler.fail())
            else:
                finished += [result.seq for result in bench.complete(tokens) if result.is_finished]

        try:
            _live(rng, bench, storm)
            for seq in finished:
                assert undisturbed(seq) == seq.tokens.tolist()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        num_ended["finished"] += len(finished)
    assert min(num_ended.values()) > 50


@pytest.mark.parametrize("defect", ["accepts one too many", "positions off by one", "keeps blocks of rejected drafts"])
def test_a_defect_would_be_seen(defect, monkeypatch):
    """The test above would fail if the rule accepted a wrong draft, or a draft were sampled at another position."""
    module = "weft.llm.scheduler.scheduler"
    if defect == "accepts one too many":
        right = num_accepted
        monkeypatch.setattr(
            f"{module}.num_accepted", lambda drafts, samples: min(right(drafts, samples) + 1, len(drafts))
        )
    elif defect == "positions off by one":

        def shifted(*args, **options):
            plan = build_plan(*args, **options)
            return plan._replace(sample_positions=plan.sample_positions + (plan.num_drafts.sum() > 0))

        monkeypatch.setattr(f"{module}.build_plan", shifted)
    else:
        monkeypatch.setattr(SlotAllocator, "release_unused_blocks", lambda self, seq: None)
    with pytest.raises(AssertionError, match="seed"):
        test_every_life_with_drafts_is_as_without(0)
