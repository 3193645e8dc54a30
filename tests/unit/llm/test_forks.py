"""Several continuations of one prompt, whose full blocks they share."""

import pytest
from tests.unit.llm.fake_runner import Bench, undisturbed

from weft.llm.scheduler.sequence import SequenceStatus


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("is_caching", [True, False])
def test_choices_are_as_if_alone(num_prompt, is_caching):
    """Each of four choices has the tokens of a request of its own, whether or not the prompt fills its last block."""
    bench = Bench(enable_prefix_caching=is_caching)
    sequences = bench.add(num_prompt, n=4, max_tokens=10)
    bench.run()
    assert [undisturbed(seq) for seq in sequences] == [seq.tokens.tolist() for seq in sequences]
    assert len({tuple(seq.tokens) for seq in sequences}) > 1
    assert 0 == bench.pool.num_used


@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize(("num_prompt", "num_shared"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (10, 2)])
def test_full_blocks_of_the_prompt_are_computed_once(num_prompt, num_shared, is_caching):
    """Forks own them with the parent, and compute what is behind, at least the last token, to sample from it."""
    bench = Bench(num_blocks=40, enable_prefix_caching=is_caching)
    parent, *forks = bench.add(num_prompt, n=3, max_tokens=9)
    bench.step()
    assert {num_prompt} == set(bench.scheduled().values())
    shared = parent.block_table[:num_shared]
    assert [shared] * 2 == [fork.block_table[:-1] for fork in forks]
    assert [4 * num_shared] * 2 == [fork.num_cached for fork in forks]
    assert num_shared + 3 == bench.pool.num_used
    bench.step()
    assert [1, *[num_prompt - 4 * num_shared] * 2] == list(bench.scheduled().values())
    bench.run()
    assert [undisturbed(seq) for seq in (parent, *forks)] == [seq.tokens.tolist() for seq in (parent, *forks)]


def test_forks_wait_for_the_prompt():
    """While the parent's prompt is computed in chunks, its forks have no slot, and do not wait for one."""
    bench = Bench(max_num_batched_tokens=4)
    parent, fork = bench.add(9, n=2, max_tokens=3)
    bench.step()
    assert (SequenceStatus.RUNNING, SequenceStatus.FORKING) == (parent.status, fork.status)
    assert (1, 0) == (bench.scheduler.num_running, bench.scheduler.num_waiting)
    bench.run()
    assert undisturbed(fork) == fork.tokens.tolist()


def test_without_seats_forks_wait_as_others_do():
    """Forks beyond the slots run later as sequences of their own, with the prompt's full blocks from the cache."""
    bench = Bench(max_num_seqs=2)
    _, second, third = bench.add(9, n=3, max_tokens=4)
    bench.step()
    assert (SequenceStatus.RUNNING, SequenceStatus.WAITING) == (second.status, third.status)
    bench.run()
    assert (8, 8) == (second.num_cached, third.num_cached)
    assert undisturbed(third) == third.tokens.tolist()


def test_forks_leave_the_watermark_free():
    """A fork begins beside its parent only if the block that it will need leaves enough of them free."""
    for num_blocks, status in ((11, SequenceStatus.WAITING), (13, SequenceStatus.RUNNING)):
        bench = Bench(num_blocks=num_blocks, watermark=0.5)
        _, fork = bench.add(17, n=2, max_tokens=4)
        bench.step()
        assert status is fork.status


def test_forks_that_wait_have_no_prompt_of_their_own():
    """Forks read their parent's tokens until they start, and then neither copy what is known of its blocks anew."""
    bench = Bench(max_num_seqs=1, max_num_batched_tokens=4)
    parent, fork = bench.add(9, n=2, max_tokens=4)
    bench.step()
    assert parent.tokens is fork.tokens
    for _ in range(3):
        bench.step()
    assert (SequenceStatus.WAITING, 9, 0) == (fork.status, len(fork.tokens), fork.num_output)
    assert 2 == len(fork.hashes)
    bench.run()
    assert [undisturbed(seq) for seq in (parent, fork)] == [seq.tokens.tolist() for seq in (parent, fork)]


def test_forks_do_not_overtake():
    """A fork gets no slot before one of a better level that waits."""
    bench = Bench(max_num_seqs=2)
    _, fork = bench.add(5, n=2, level=1, max_tokens=6)
    tokens = bench.runner.run(bench.scheduler.schedule())
    (better,) = bench.add([7] * 4, level=0, max_tokens=2)
    bench.scheduler.complete(tokens)
    assert SequenceStatus.WAITING is fork.status
    bench.step()
    assert SequenceStatus.RUNNING is better.status


@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_forks_outlive_their_parent(how):
    """If the parent goes before its prompt is computed, the others run as sequences of their own."""
    bench = Bench(max_num_batched_tokens=4)
    parent, *forks = bench.add(9, n=3, max_tokens=4)
    if how == "cancel":
        bench.step()
        bench.scheduler.cancel(parent)
    else:
        bench.scheduler.schedule()
        assert [parent] == bench.scheduler.fail()
    assert SequenceStatus.ENDED is parent.status
    assert 2 == bench.scheduler.num_waiting
    bench.run()
    assert [undisturbed(fork) for fork in forks] == [fork.tokens.tolist() for fork in forks]


def test_a_cancelled_fork_is_not_made():
    """A fork that was cancelled before the prompt is computed never gets a slot; its siblings do."""
    bench = Bench(max_num_batched_tokens=4)
    _, cancelled, other = bench.add(9, n=3, max_tokens=4)
    bench.step()
    bench.scheduler.cancel(cancelled)
    bench.run()
    assert (0, 9) == (cancelled.first_scheduled_ns, cancelled.num_prompt)
    assert undisturbed(other) == other.tokens.tolist()


def test_a_parent_of_one_token_still_forks():
    """A parent that ends with its first token leaves its blocks to its forks."""
    bench = Bench()
    sequences = bench.add(6, n=3, max_tokens=1)
    bench.run()
    assert [undisturbed(seq) for seq in sequences] == [seq.tokens.tolist() for seq in sequences]
    assert 0 == bench.pool.num_used
