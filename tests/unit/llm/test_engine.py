"""The engine's thread: cancels, deadlines, failures, sinks, stopping, and what it refuses."""

import gc
import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.case_files import says, table
from tests.unit.llm.engine_fixture import (
    MODEL,
    Answer,
    alone,
    answer_all,
    assert_clean,
    finish,
    make_engine,
    random_prompts,
    serve,
    submit,
)

from weft.base.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from weft.llm import engine as engine_module
from weft.llm.engine import Engine, RequestLimits
from weft.llm.metrics import EngineMetrics
from weft.llm.models.model import TransformerModel
from weft.llm.models.weights import random_weights
from weft.llm.request import Delta, EngineRequest
from weft.llm.scheduler.sequence import Sequence
from weft.llm.weights.parts import EMBEDDING

_PROMPTS = random_prompts(6, 10, 40)


class _Gate:
    """Lets the engine's thread into a step only when told; ``before_step`` is given to ``make_engine``."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self._may_enter = threading.Semaphore(0)

    def before_step(self, plan: object) -> None:
        """Wait until somebody opens."""
        self.entered.release()
        assert self._may_enter.acquire(timeout=30)

    def open(self, num_steps: int = 1) -> None:
        """So many steps more may run."""
        self._may_enter.release(num_steps)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_storm_of_cancels_leaks_nothing(seed: int):
    """Half of 60 requests, cancelled at random phases, get nothing more; the rest are answered, all blocks are free."""
    random = np.random.default_rng(seed)
    prompts = random_prompts(60, 1, 60, seed)
    answers = [Answer(p, max_tokens=int(random.integers(1, 25)), n=int(random.integers(1, 4))) for p in prompts]
    doomed = [answer for answer in answers if random.random() < 0.5]
    phases = {answer: int(random.integers(0, 120)) for answer in doomed}
    num_deltas: dict[Answer, int] = {}
    num_steps = 0

    def cancel_some(plan: object) -> None:
        nonlocal num_steps
        num_steps += 1
        for answer, phase in phases.items():
            if phase == num_steps:
                engine.cancel(answer.request)
                num_deltas[answer] = len(answer.deltas)

    engine = make_engine(before_step=cancel_some, num_blocks=40, max_num_seqs=8, max_num_batched_tokens=32)
    for answer in answers:
        engine.submit(answer.request)
        if phases.get(answer) == 0:
            engine.cancel(answer.request)
            num_deltas[answer] = 0
    finish(engine, [answer for answer in answers if answer not in phases])
    assert {answer: len(answer.deltas) for answer in num_deltas} == num_deltas
    num_cancelled = sum(not answer.is_ended for answer in answers)
    assert num_cancelled == engine.metrics.outcomes["cancelled"] > 0
    assert 60 - num_cancelled == engine.metrics.outcomes["length"]


def test_a_cancel_frees_within_a_step():
    """The step after a cancel runs without the request, and its blocks are free by then."""
    gate = _Gate()
    engine = make_engine(before_step=gate.before_step)
    kept, dropped = Answer(_PROMPTS[0], max_tokens=6), Answer(_PROMPTS[1] * 2, max_tokens=100)
    submit(engine, [kept, dropped])
    engine.start()
    gate.entered.acquire()
    gate.open()
    gate.entered.acquire()
    num_used = engine.pool.num_used
    engine.cancel(dropped.request)
    gate.open()
    gate.entered.acquire()
    assert num_used > engine.pool.num_used == -(-(len(_PROMPTS[0]) + 2) // 16)
    gate.open(100)
    assert alone(_PROMPTS[0], max_tokens=6).text == kept.wait().text
    assert 1 == len(dropped.deltas)
    assert engine.stop(grace_s=5.0)
    assert_clean(engine)


def test_a_cancel_that_is_halfway_loses_no_engine():
    """If the thread that cancels is held up before its message is sent, the last token may come first: no harm."""
    dropped, later = Answer(_PROMPTS[0], max_tokens=1), Answer(_PROMPTS[1], max_tokens=2)

    def begin_cancel(plan: object) -> None:
        dropped.request.is_cancelled = True

    ended = threading.Semaphore(0)
    engine = make_engine(before_step=begin_cancel, after_deltas=ended.release)
    engine.submit(dropped.request)
    engine.start()
    ended.acquire()
    engine.cancel(dropped.request)
    engine.submit(later.request)
    assert alone(_PROMPTS[1], max_tokens=2).text == later.wait().text
    assert engine.stop(grace_s=5.0)
    assert_clean(engine)
    assert [] == dropped.deltas
    assert {"cancelled": 1, "length": 1} == engine.metrics.outcomes


def test_messages_without_end_do_not_stop_steps():
    """Requests that are answered by another of their kind, while the thread reads them, leave it time for steps."""
    answer = Answer(_PROMPTS[0], max_tokens=2)
    is_open = True

    class Flood(EngineMetrics):
        def record_end(self, request: EngineRequest, outcome: str, now_ns: int) -> None:
            super().record_end(request, outcome, now_ns)
            if is_open and outcome == "cancelled":
                submit_cancelled()

    def submit_cancelled() -> None:
        engine.submit(Answer(_PROMPTS[1], is_cancelled=True).request)

    engine = make_engine(metrics_class=Flood)
    engine.submit(answer.request)
    submit_cancelled()
    engine.start()
    try:
        assert alone(_PROMPTS[0], max_tokens=2).text == answer.wait().text
    finally:
        is_open = False
        assert engine.stop(grace_s=5.0)


def test_what_has_ended_is_not_left_to_the_garbage_collector():
    """Tokens and hashes of a request go with its last reference: it is part of no cycle."""
    gc.collect()
    gc.disable()
    try:
        serve([Answer(prompt, n=2, max_tokens=3) for prompt in _PROMPTS])
        assert [] == [found for found in gc.get_objects() if type(found) is Sequence]
    finally:
        gc.enable()


def test_10000_queued_requests_are_no_burden():
    """Of 10,000 requests behind two slots all but 20 are cancelled while they wait; those 20 are answered."""
    answers = [Answer(_PROMPTS[index % 6], max_tokens=4) for index in range(10_000)]
    kept = answers[::500]
    doomed = [answer for index, answer in enumerate(answers) if index % 500]

    def cancel_once(plan: object) -> None:
        while doomed:
            engine.cancel(doomed.pop().request)

    engine = make_engine(max_num_seqs=2, before_step=cancel_once)
    submit(engine, answers)
    finish(engine, kept)
    assert [4] * 20 == [len(answer.text) for answer in kept]
    assert {"length": 20, "cancelled": 9_980} == engine.metrics.outcomes


@pytest.mark.parametrize(("n", "outcomes"), [(1, {"stop": 1, "length": 1}), (3, {"length": 2})])
def test_a_choice_can_be_finished_by_its_caller(n: int, outcomes: dict[str, int]):
    """It is freed and gets nothing more; the others go on as if nothing had been, and the last end is the request's."""

    def finish_first(delta: Delta) -> None:
        if delta.choice == 0:
            engine.finish(delta.request, 0)
            engine.finish(delta.request, 0)  # as one that has ended: nothing happens

    params: dict[str, Any] = {"max_tokens": 12, "n": n, "seed": 5, "temperature": 1.0}
    answer, whole = Answer(_PROMPTS[0], on_delta=finish_first, **params), Answer(_PROMPTS[0], **params)
    engine = make_engine()
    submit(engine, [answer, whole])
    finish(engine, [whole, *([answer] if n > 1 else [])])
    assert whole.tokens[0][:1] == answer.tokens[0]
    assert whole.tokens[1:] == answer.tokens[1:]
    assert outcomes == engine.metrics.outcomes


def test_a_deadline_holds_before_and_during_execution():
    """At its deadline a request that waits, with two choices, and one that runs end; others go on."""
    now_ns = 1_000_000_000

    def tick(plan: object) -> None:
        nonlocal now_ns
        now_ns += 1_000_000

    engine = make_engine(before_step=tick, clock_ns=lambda: now_ns, max_num_seqs=2)
    endless, short = (
        Answer(_PROMPTS[0], max_tokens=60),
        Answer(_PROMPTS[1], max_tokens=60, deadline_ns=now_ns + 10_500_000),
    )
    queued = Answer(_PROMPTS[2], deadline_ns=now_ns + 5_500_000, n=2)
    late = Answer(_PROMPTS[3], deadline_ns=now_ns)
    answer_all(engine, [endless, short, queued, late])
    assert [DeadlineExceededError] * 3 == [type(answer.error) for answer in (short, queued, late)]
    assert [[11], [0, 0], [0]] == [list(map(len, answer.tokens)) for answer in (short, queued, late)]
    assert "after 11.0 ms and 11 new tokens" in str(short.error)
    assert alone(_PROMPTS[0], max_tokens=60).text == endless.text
    assert 3 == engine.metrics.outcomes["DEADLINE_EXCEEDED"]


def test_a_sink_that_raises_loses_its_own_request_alone():
    """Its request is cancelled at once, whichever delta it raised at; the others of the step are answered."""

    def fail(delta: object) -> None:
        raise ValueError("a defect of the caller")

    engine = make_engine()
    bad = Answer(_PROMPTS[0], max_tokens=50, on_delta=fail)
    bad_at_its_end = Answer(_PROMPTS[1], max_tokens=1, on_delta=fail)
    good = [Answer(prompt, max_tokens=8) for prompt in _PROMPTS[2:4]]
    submit(engine, [bad, bad_at_its_end, *good])
    finish(engine, good)
    assert 1 == len(bad.deltas)
    assert [alone(prompt, max_tokens=8).text for prompt in _PROMPTS[2:4]] == [answer.text for answer in good]


def test_after_deltas_comes_once_a_step():
    """``after_deltas`` is called when all sinks of a step have their deltas, so that they can share a wake-up."""
    batches: list[int] = []
    num_deltas = 0

    def count(delta: object) -> None:
        nonlocal num_deltas
        num_deltas += 1

    def flush() -> None:
        nonlocal num_deltas
        batches.append(num_deltas)
        num_deltas = 0

    engine = make_engine(after_deltas=flush)
    answers = [Answer(prompt, max_tokens=4, on_delta=count) for prompt in _PROMPTS[:3]]
    answer_all(engine, answers)
    assert [3, 3, 3, 3] == [batch for batch in batches if batch]


def test_a_lost_thread_is_told():
    """When the thread ends by a defect, requests get an InternalError, ``on_lost`` is called, nothing is taken."""
    lost: list[Exception] = []
    told = threading.Event()

    def on_lost(error: Exception) -> None:
        lost.append(error)
        told.set()

    def exit_thread(plan: object) -> None:
        raise SystemExit

    engine = make_engine(before_step=exit_thread, on_lost=on_lost, max_num_seqs=1)
    answers = [Answer(prompt) for prompt in _PROMPTS[:2]]
    submit(engine, answers)
    engine.start()
    assert all(isinstance(answer.wait().error, InternalError) for answer in answers)
    assert told.wait(30)
    assert [answers[0].error] == lost
    with pytest.raises(UnavailableError, match="was lost"):
        engine.submit(Answer(_PROMPTS[0]).request)
    assert engine.stop(grace_s=0.0)
    assert not engine._thread.is_alive()


def _stopped_in_a_step(answer: Answer, num_steps: int, grace_s: float) -> Engine:
    """An engine that was told to stop during step ``num_steps + 1`` and has stopped."""
    gate = _Gate()
    engine = make_engine(before_step=gate.before_step)
    engine.submit(answer.request)
    engine.start()
    gate.open(num_steps)
    for _ in range(num_steps + 1):
        gate.entered.acquire()
    stopper = threading.Thread(target=engine.stop, args=(grace_s,))
    stopper.start()
    while engine._stop_ns is None:
        pass
    gate.open(100)
    stopper.join(30)
    assert not engine._thread.is_alive()
    assert_clean(engine)
    return engine


def test_stop_lets_requests_finish():
    """Within its grace a stopping engine finishes what it has and takes nothing more."""
    answer = Answer(_PROMPTS[0], max_tokens=6)
    engine = _stopped_in_a_step(answer, 2, grace_s=30.0)
    assert ["length"] == answer.reasons
    assert alone(_PROMPTS[0], max_tokens=6).text == answer.text
    with pytest.raises(UnavailableError, match="stopping"):
        engine.submit(Answer(_PROMPTS[1]).request)


def test_stop_ends_requests_after_its_grace():
    """When the grace is over, requests end with UnavailableError after the step under way."""
    answer = Answer(_PROMPTS[0], max_tokens=60)
    _stopped_in_a_step(answer, 2, grace_s=0.0)
    assert 3 == len(answer.text)
    assert isinstance(answer.error, UnavailableError)


def test_requests_of_an_engine_that_never_started_end_with_its_stop():
    """A request that no thread has read gets UnavailableError when the engine is stopped."""
    engine, answer = make_engine(), Answer(_PROMPTS[0])
    engine.submit(answer.request)
    assert engine.stop(grace_s=0.0)
    assert isinstance(answer.error, UnavailableError)


def test_a_request_that_meets_a_stop_is_not_forgotten(monkeypatch: pytest.MonkeyPatch):
    """When the thread ends between the check of a request and its place in the queue, the request gets an error."""
    engine, answer = make_engine(), Answer(_PROMPTS[0])
    monkeypatch.setattr(RequestLimits, "check", lambda limits, request: engine.stop(grace_s=0.0))
    engine.start()
    engine.submit(answer.request)
    assert isinstance(answer.wait().error, UnavailableError)


def test_a_hung_step_is_seen(monkeypatch: pytest.MonkeyPatch):
    """``stop`` gives up on a step that hangs and says so."""
    monkeypatch.setattr(engine_module, "_STEP_GRACE_S", 0.0)
    gate = _Gate()
    engine = make_engine(before_step=gate.before_step)
    engine.submit(Answer(_PROMPTS[0], max_tokens=1).request)
    engine.start()
    gate.entered.acquire()
    assert not engine.stop(grace_s=0.0)
    gate.open()
    assert engine.stop(grace_s=30.0)


def test_a_full_queue_refuses():
    """With ``max_queued`` sequences waiting, the next is refused and nothing is kept of it."""
    engine = make_engine(max_queued=3)
    waiting = [Answer(prompt, max_tokens=2) for prompt in _PROMPTS[:3]]
    submit(engine, waiting)
    refused = Answer(_PROMPTS[3])
    with pytest.raises(ResourceExhaustedError, match="3 sequences wait"):
        engine.submit(refused.request)
    finish(engine, waiting)
    assert [] == refused.deltas


@pytest.mark.parametrize(("text", "words"), table(Path(__file__).with_name("refused.txt"), "a request"))
def test_what_can_never_be_served_is_refused_at_once(text: str, words: str):
    """A wrong request raises InvalidArgumentError in ``submit`` that says what is allowed."""
    fields = json.loads(text)
    prompt = np.array(fields.pop("prompt", [1] * fields.pop("num_tokens", 5)), fields.pop("dtype", "int32"))
    options = fields.pop("engine", {"num_blocks": 15})
    answer = Answer([1], **fields)
    answer.request.prompt_ids = prompt
    with pytest.raises(InvalidArgumentError) as caught:
        make_engine(**options).submit(answer.request)
    assert says(words, caught.value.message), caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "options", "num_new"),
    [(255, 1, {"num_blocks": 40}, 1), (223, 9, {"num_blocks": 15}, 1), (20, 44, {"max_model_len": 64}, 44)],
)
def test_the_longest_request_is_served(num_prompt: int, max_tokens: int, options: dict[str, int], num_new: int):
    """A prompt one token below the limit, or that fills the pool but for a token, gets one; others all that fit."""
    answer = Answer([1] * num_prompt, max_tokens=max_tokens)
    serve([answer], **options)
    assert (num_new, ["length"]) == (len(answer.text), answer.reasons)


def test_submit_and_cancel_from_many_threads():
    """Requests from eight threads, a third of them cancelled at once, are all answered or cancelled."""
    engine = make_engine(max_num_seqs=16, num_blocks=512)
    engine.start()
    kept: list[Answer] = []

    def work(seed: int) -> None:
        for index, prompt in enumerate(random_prompts(12, 1, 20, seed)):
            answer = Answer(prompt, max_tokens=3)
            engine.submit(answer.request)
            if index % 3 == 0:
                engine.cancel(answer.request)
            else:
                kept.append(answer)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [3] * 64 == [len(answer.wait().text) for answer in kept]
    assert engine.stop(grace_s=5.0)
    assert_clean(engine)


def test_logits_that_are_no_numbers_fail_their_request_alone():
    """A prompt token with a NaN embedding ends its request with INTERNAL, counted; its batch mates go on."""
    weights = dict(random_weights(MODEL, seed=3))
    weights[EMBEDDING] = weights[EMBEDDING].clone()
    weights[EMBEDDING][95] = float("nan")
    engine = make_engine(model=TransformerModel(MODEL, weights, dtype=torch.float32, deterministic=True))
    prompts = [[token % 90 for token in prompt] for prompt in _PROMPTS[:3]]
    spoiled = Answer([95, *prompts[0]], max_tokens=5, n=2, temperature=1.0, logprobs=2)
    others = [Answer(prompt, max_tokens=5, logprobs=2) for prompt in prompts]
    answer_all(engine, [spoiled, *others])
    assert isinstance(spoiled.error, InternalError)
    assert "NaN or infinite logits" in spoiled.error.message
    assert [[], []] == spoiled.tokens
    assert [5, 5, 5] == [len(answer.tokens[0]) for answer in others]
    assert 1 == engine.metrics.num_non_finite


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"resume_token_ids": (1, 96)}, "resume_token_ids: token ids of this model are 0 to 95, got 96 at index 1"),
        ({"resume_token_ids": (1,), "n": 2}, "resume_token_ids continues one choice, so n and best_of must be 1"),
        ({"resume_token_ids": (1,), "use_beam_search": True}, "use_beam_search false"),
        ({"resume_token_ids": (1, 2), "max_tokens": 2}, "resume_token_ids has 2 tokens, at most 1 leave room"),
        ({"resume_token_ids": (1,) * 300, "max_tokens": 200}, "has 300 tokens, at most 199 leave room"),
        ({"resume_token_ids": (1, 7, 2), "stop_token_ids": (7,)}, "has the stop token 7 at index 1: the output is"),
    ],
)
def test_what_cannot_be_resumed_is_refused(given: dict[str, Any], words: str) -> None:
    """With what was given and what may be."""
    engine = make_engine()
    with pytest.raises(InvalidArgumentError, match=re.escape(words)):
        engine.submit(Answer([1, 2], **{"max_tokens": 20} | given).request)


def test_stop_tokens_before_the_least_length_are_resumed() -> None:
    """Nor does one end a text that ignores them."""
    whole = Answer([1, 2], max_tokens=20, min_tokens=9, stop_token_ids=(7,), logit_bias={7: 100.0})
    again = Answer(
        [1, 2], max_tokens=20, min_tokens=9, stop_token_ids=(7,), logit_bias={7: 100.0}, resume_token_ids=(7, 7)
    )
    serve([whole, again])
    assert 7 == whole.text[-1]
    assert 10 == len(whole.text)
    assert (8, 7) == (len(again.text), again.text[-1])
