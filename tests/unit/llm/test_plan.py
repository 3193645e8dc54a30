"""Plans: what their arrays say, entry by entry."""

import numpy as np
import pytest
from tests.unit.llm.fake_runner import Bench

from weft.llm.scheduler.decodes import Decodes, build_plan
from weft.llm.scheduler.plan import PARAM_COLUMNS
from weft.llm.scheduler.sequence import Sequence

DTYPES = {"slot_mapping": np.int64, "new_seeds": np.int64, "new_params": np.float32, "penalty_bias": np.float32}


def _lists(plan, *names):
    return [getattr(plan, name).tolist() for name in names]


def _slots(seq, *positions):
    return [seq.block_table[position // 4] * 4 + position % 4 for position in positions]


def test_a_prompt_and_its_first_token():
    """A prompt's plan has its tokens, positions and cache slots, all its blocks, its parameters, and one sample row."""
    bench = Bench()
    (seq,) = bench.add([5, 6, 7, 8, 9], temperature=0.5, top_k=3, top_p=0.5, seed=1, logprobs=2)
    plan = bench.scheduler.schedule()
    names = ("q_start", "ctx_len", "positions", "token_ids", "slot_mapping", "sample_rows", "sample_positions")
    assert [[0, 5], [5], [0, 1, 2, 3, 4], [5, 6, 7, 8, 9], _slots(seq, 0, 1, 2, 3, 4), [4], [5]] == _lists(plan, *names)
    assert [[seq.slot]] * 3 == _lists(plan, "slots", "sample_slots", "new_slots")
    assert [[seq.slot, 0, seq.block_table[0]], [seq.slot, 1, seq.block_table[1]]] == plan.table_delta.tolist()
    assert [[0.5, 0.5, 0.0, 1.0, 0.0, 0.0]] == plan.new_params.tolist()
    assert ([3], [0], [2]) == (plan.new_top_k.tolist(), plan.new_seeds.tolist(), plan.num_logprobs.tolist())
    assert (5, 5) == (plan.max_q_len, plan.max_ctx_len)
    assert 6 == len(PARAM_COLUMNS)
    for name, value in plan._asdict().items():
        if name not in ("max_q_len", "max_ctx_len", "transfers"):
            assert DTYPES.get(name, np.int32) == value.dtype, name


def test_only_what_is_new_goes_to_the_runner():
    """From the second step on a sequence brings one token, and a block only where its last one is full."""
    bench = Bench()
    (seq,) = bench.add([5, 6], max_tokens=9)
    bench.step()
    new_blocks = []
    for length in range(3, 9):
        bench.step()
        assert [[length], [length - 1], []] == _lists(bench.plan, "ctx_len", "positions", "new_slots")
        assert [seq.tokens[length - 1]] == bench.plan.token_ids.tolist()
        new_blocks += bench.plan.table_delta.tolist()
    assert [[seq.slot, 1, seq.block_table[1]]] == new_blocks


def test_one_token_comes_before_chunks():
    """Sequences that go on by one token come first; a chunk that does not reach the last token samples nothing."""
    bench = Bench(max_num_batched_tokens=10)
    first, second = *bench.add([1, 2, 3]), *bench.add([7] * 20)
    bench.step()
    names = ("ctx_len", "q_start", "sample_rows", "sample_positions")
    assert [[3, 4], [0, 3, 7], [2], [3]] == _lists(bench.plan, *names)
    bench.step()
    assert [[4, 12], [0, 1, 9], [0], [4]] == _lists(bench.plan, *names)
    assert [*_slots(first, 3), *_slots(second, *range(4, 12))] == bench.plan.slot_mapping.tolist()


def test_a_token_in_a_chunk_of_one_is_not_the_last():
    """A chunk of one token in the middle of a prompt goes where it belongs, and nothing is sampled after it."""
    bench = Bench()
    (seq,) = bench.add([1, 2, 3, 4, 5, 6])
    bench.scheduler.schedule()
    seq.remaining, seq.num_scheduled = 5, 1
    plan = build_plan(Decodes(1, 4), [seq], changed=[], has_sampling_extras=False, block_size=4)
    assert [[1], [2], _slots(seq, 1), []] == _lists(plan, "positions", "token_ids", "slot_mapping", "sample_rows")


def test_penalties_are_there_for_those_who_ask():
    """Rows have each token of prompt and output once, with its count in the output; a bias alone has count -1."""
    bench = Bench()
    bench.add([1, 1, 2], max_tokens=4)
    bench.add([3, 4, 3], max_tokens=4, repetition_penalty=1.5, logit_bias={40: 2.0, 4: -1.0})
    bench.step()
    assert [[0, 0, 3]] == _lists(bench.plan, "penalty_start")
    assert {(40, -1, 2.0), (4, 0, -1.0), (3, 0, 0.0)} == _row(bench.plan, 1)
    seq = bench.sequences[1]
    bench.step()
    counts = {3: 0, 4: 0, 40: -1}
    counts[seq.tokens[3]] = max(counts.get(seq.tokens[3], 0), 0) + 1
    biases = {40: 2.0, 4: -1.0}
    assert {(token, count, biases.get(token, 0.0)) for token, count in counts.items()} == _row(bench.plan, 1)
    assert not _row(bench.plan, 0)


def test_presence_counts_the_output_alone():
    """Presence and frequency do not look at the prompt, so its tokens are no entries."""
    bench = Bench()
    (seq,) = bench.add([3, 4], max_tokens=4, presence_penalty=1.0)
    bench.step()
    assert not _row(bench.plan, 0)
    bench.step()
    assert {(seq.tokens[2], 1, 0.0)} == _row(bench.plan, 0)


def test_min_tokens_forbids_what_would_end():
    """Tokens that end a sequence have a bias of minus infinity until it has min_tokens, then their own."""
    bench = Bench()
    bench.add([3], max_tokens=5, min_tokens=2, stop_token_ids=[44], logit_bias={44: 1.0}, eos=(45,))
    biases = []
    for _ in range(3):
        bench.step()
        biases.append({token: bias for token, _, bias in _row(bench.plan, 0) if token >= 44})
    inf = float("inf")
    assert [{44: -inf, 45: -inf}, {44: -inf, 45: -inf}, {44: 1.0, 45: 0.0}] == biases


def test_penalties_survive_a_preemption():
    """A sequence that lost its slot comes back with the counts of its whole output."""
    bench = Bench(max_num_seqs=1)
    (seq,) = bench.add([3], level=1, max_tokens=6, frequency_penalty=0.5)
    for _ in range(3):
        bench.step()
    bench.add([9], level=0, max_tokens=1)
    bench.step()
    assert 1 == seq.num_preemptions
    output = seq.tokens[1:].tolist()
    bench.step()
    assert {(token, output.count(token), 0.0) for token in output} == _row(bench.plan, 0)


@pytest.mark.parametrize("level", [0, 3])
def test_a_sequence_shows_what_it_is(level):
    """The text of a sequence says where it stands."""
    (seq,) = Bench().add([1, 2, 3], level=level)
    assert isinstance(seq, Sequence)
    assert f"Sequence(1, level {level}, WAITING, 0 of 3 tokens done)" == repr(seq)


def _row(plan, index):
    rows = slice(*plan.penalty_start[index : index + 2].tolist())
    columns = (plan.penalty_tokens[rows], plan.penalty_counts[rows], plan.penalty_bias[rows])
    assert len(set(columns[0].tolist())) == len(columns[0])
    return set(zip(*(column.tolist() for column in columns), strict=True))
