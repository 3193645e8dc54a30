"""The scheduler, fact by fact: scripts of ``scheduler.txt``, and what a script cannot say."""

import ast
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest
from tests.case_files import Case, cases
from tests.unit.llm.fake_runner import Bench, undisturbed

from weft.llm.scheduler.decodes import Decodes, build_plan
from weft.llm.scheduler.plan import PARAM_COLUMNS
from weft.llm.scheduler.sequence import SequenceStatus

FACTS = {
    "status": lambda seq: seq.status.name,
    "preemptions": lambda seq: seq.num_preemptions,
    "cached": lambda seq: seq.num_cached,
    "blocks": lambda seq: len(seq.block_table),
    "output": lambda seq: seq.num_output,
    "computed": lambda seq: seq.num_computed_tokens,
}


def _value(text):
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _options(words):
    return {name: _value(value) for name, _, value in (word.partition("=") for word in words)}


def _pairs(words):
    return {name: _value(value) for name, _, value in (word.partition(":") for word in words)}


class Script:
    """Runs the lines of a case; each command is a method."""

    def __init__(self):
        self.bench = Bench()
        self.names = {}
        self.reasons = {}
        self.order = []
        self.is_forced = False

    def run_lines(self, lines):
        for line in lines:
            command, *words = line.split()
            if command.startswith("plan."):
                value = getattr(self.bench.plan, command.removeprefix("plan.")).tolist()
                assert ast.literal_eval(words[0]) == value, line
            elif command == "reason":
                expected = _pairs(words)
                assert expected == {name: self.reasons.get(name, "-") for name in expected}, line
            elif command in FACTS:
                expected = _pairs(words)
                assert expected == {name: FACTS[command](self.names[name]) for name in expected}, line
            else:
                getattr(self, "make" if command == "bench" else command)(*words)
        finished = [self.names[name] for name in self.reasons if not self.is_forced]
        assert [undisturbed(seq) for seq in finished] == [seq.tokens.tolist() for seq in finished]
        self.bench.scheduler.check()

    def make(self, *words):
        self.bench = Bench(**_options(words))

    def _prompt(self, text):
        tokens = []
        for piece in text.split("+"):
            if piece in self.names:
                tokens += self.names[piece].tokens.tolist()
            elif "*" in piece:
                token, times = piece.split("*")
                tokens += [int(token)] * int(times)
            elif "," in piece:
                tokens += ast.literal_eval(f"[{piece}]")
            else:
                return int(piece)
        return tokens

    def add(self, names, prompt, *words):
        self.names |= zip(names.split(","), self.bench.add(self._prompt(prompt), **_options(words)), strict=True)

    def short(self):
        for _ in range(3):
            self.bench.add([7], max_tokens=24, stop_token_ids=list(range(50)))
            self.bench.run()

    def plan(self, *words):
        self._planned(self.bench.scheduler.schedule(), words)

    def ahead(self, *words):
        plan = self.bench.scheduler.schedule_ahead()
        assert (words == ("none",)) == (plan is None)
        if plan is not None:
            self._planned(plan, words)

    def _planned(self, plan, words):
        self.bench.plan = plan
        counts = {self._name(seq): count for seq, count in self.bench.scheduled().items()} if plan is not None else {}
        self.order += [name for name in counts if name not in self.order]
        assert not words or _pairs(words) == counts

    def _name(self, wanted):
        return next(name for name, seq in self.names.items() if seq is wanted)

    def complete(self):
        self._completed(self.bench.complete(self.bench.runner.run(self.bench.plan)))

    def sampled(self, token):
        self.is_forced = True
        self._completed(self.bench.complete(np.full(len(self.bench.plan.sample_rows), int(token), np.int32)))

    def _completed(self, results):
        assert not [result for result in results if result.seq.is_cancelled]
        self.reasons |= {self._name(result.seq): result.finish_reason for result in results if result.is_finished}

    def step(self, *words):
        self.plan(*words)
        self.complete()

    def steps(self, number):
        for _ in range(int(number)):
            self.step()

    def run(self):
        self.plan()
        while self.bench.plan is not None:
            self.complete()
            self.plan()

    def until(self, what, name=""):
        while not (self.names[name].num_output if what == "output" else self.bench.scheduler.num_preemptions):
            self.step()

    def sample(self, name, tokens):
        given = ast.literal_eval(f"[{tokens}]")
        for token in [*given, *repeat(given[-1], 90)]:
            if name not in self.reasons:
                self.plan()
                self.sampled(token)
        assert name in self.reasons

    def fail(self, *names):
        assert sorted(names) == sorted(map(self._name, self.bench.scheduler.fail()))

    def cancel(self, name):
        self.bench.scheduler.cancel(self.names[name])

    def sweep(self, now_ns, *names):
        assert list(names) == [self._name(seq) for seq in self.bench.scheduler.sweep(int(now_ns))]

    def begun(self, *names):
        assert list(names) == self.order

    def allows(self, word):
        ((name, count),) = _pairs([word]).items()
        self.names[name].num_preemptions = count

    def used(self, number):
        assert int(number) == self.bench.pool.num_used

    def waiting(self, number):
        assert int(number) == self.bench.scheduler.num_waiting

    def running(self, number):
        assert int(number) == self.bench.scheduler.num_running

    def penalties(self, row, entries):
        plan = self.bench.plan
        rows = slice(*plan.penalty_start[int(row) : int(row) + 2].tolist())
        columns = (plan.penalty_tokens, plan.penalty_counts, plan.penalty_bias)
        found = [
            (token, (count, bias)) for token, count, bias in zip(*(c[rows].tolist() for c in columns), strict=True)
        ]
        assert len(found) == len(dict(found))
        assert ast.literal_eval(entries) == dict(found)

    def refuse(self, prompt, *words):
        with pytest.raises(ValueError, match=" ".join(words)):
            self.bench.add(self._prompt(prompt.rstrip(":")))


@cases(Path(__file__).with_name("scheduler.txt"))
def test_script(case: Case):
    """Each step of a script has the tokens, and leaves the sequences, that the script says."""
    Script().run_lines(case.lines)


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


@pytest.mark.parametrize(("aging_ns", "expected"), [(0, None), (3, 11), (10, 39)])
def test_ageing_bounds_the_wait(aging_ns, expected):
    """Beside an endless stream of level 1, level 5 begins after four times ``aging_ns``; without it, never."""
    bench = Bench(max_num_seqs=1, aging_ns=aging_ns)
    (low,) = bench.add([1], level=5, max_tokens=1)
    begun = None
    for number in range(200):
        bench.now_ns += 1
        bench.add([2], level=1, max_tokens=1)
        bench.step()
        if low.status is SequenceStatus.ENDED and begun is None:
            begun = number
    assert expected == begun


def test_deadlines_of_the_ended_do_not_pile_up():
    """A thousand sequences that ended long before their deadline are forgotten."""
    bench = Bench()
    for _ in range(1000):
        bench.add(1, max_tokens=1, deadline_ns=10**12)
        bench.step()
    assert len(bench.scheduler._deadlines) < 200


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
    (seq,) = bench.add([1, 2, 3, 4], level=3, max_tokens=2)
    assert "Sequence(1, level 3, WAITING, 0 of 4 tokens done)" == repr(seq)
    bench.step()
    bench.scheduler.check()
    seq.block_table.pop()
    with pytest.raises(AssertionError, match="owners"):
        bench.scheduler.check()


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8, 9, 10])
@pytest.mark.parametrize("is_caching", [True, False])
def test_choices_share_full_blocks_of_the_prompt(num_prompt, is_caching):
    """Forks own them with the parent and compute what is behind, at least a token; each has the tokens of its own."""
    bench = Bench(num_blocks=40, enable_prefix_caching=is_caching)
    num_shared = (num_prompt - 1) // 4
    parent, *forks = sequences = bench.add(num_prompt, n=3, max_tokens=9)
    bench.step()
    assert {num_prompt} == set(bench.scheduled().values())
    assert [parent.block_table[:num_shared]] * 2 == [fork.block_table[:-1] for fork in forks]
    assert [4 * num_shared] * 2 == [fork.num_cached for fork in forks]
    assert num_shared + 3 == bench.pool.num_used
    bench.step()
    assert [1, *[num_prompt - 4 * num_shared] * 2] == list(bench.scheduled().values())
    bench.run()
    assert [undisturbed(seq) for seq in sequences] == [seq.tokens.tolist() for seq in sequences]
    assert len({tuple(seq.tokens) for seq in sequences}) > 1
    assert 0 == bench.pool.num_used


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


def test_a_plan_has_arrays_of_the_types_that_the_runner_reads():
    """Tokens and slots are int32 or int64, parameters float32; a chunk of one token within a prompt samples nothing."""
    bench = Bench()
    (seq,) = bench.add([1, 2, 3, 4, 5, 6])
    types = {"slot_mapping": np.int64, "new_seeds": np.int64, "new_params": np.float32, "penalty_bias": np.float32}
    for name, value in bench.scheduler.schedule()._asdict().items():
        if name not in ("max_q_len", "max_ctx_len", "transfers", "grammar", "num_score_logprobs"):
            assert types.get(name, np.int32) == value.dtype, name
    assert 6 == len(PARAM_COLUMNS)
    seq.remaining, seq.num_scheduled = 5, 1
    plan = build_plan(Decodes(1, 4), [seq], changed=[], has_sampling_extras=False, block_size=4)
    assert [[1], [2], []] == [plan.positions.tolist(), plan.token_ids.tolist(), plan.sample_rows.tolist()]
    assert [seq.block_table[0] * 4 + 1] == plan.slot_mapping.tolist()
