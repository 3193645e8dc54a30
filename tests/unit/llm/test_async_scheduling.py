"""Engines that plan a step before the tokens of the one in flight are known: nothing but the time changes."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from tests.unit.llm.engine_fixture import (
    VOCAB_SIZE,
    Answer,
    alone,
    answer_all,
    assert_clean,
    assert_equal,
    finish,
    make_engine,
    random_prompts,
    serve,
    submit,
)

from weft.base.errors import DeadlineExceededError, InternalError
from weft.llm.scheduler.plan import ForwardPlan

_AHEAD: dict[str, Any] = {"async_scheduling": "true"}


def _mixed(seed: int) -> list[Answer]:
    """Answers to requests of all sorts."""
    random = np.random.default_rng(seed)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5, "top_p": 0.9},
        {"logprobs": 3},
        {"n": 2, "temperature": 0.8, "seed": 7},
        {"stop_token_ids": random.integers(0, VOCAB_SIZE, 12).tolist()},
        {"repetition_penalty": 1.3, "min_tokens": 2},
    ]
    return [
        Answer(
            prompt, max_tokens=int(random.integers(1, 14)), level=int(random.integers(2)), **kinds[index % len(kinds)]
        )
        for index, prompt in enumerate(random_prompts(12, 1, 60, seed))
    ]


@pytest.mark.parametrize("kinds", [slice(None), slice(0, 3)], ids=["all kinds", "none that waits"])
def test_answers_are_those_of_steps_that_wait(kinds: slice):
    """Tokens, log probabilities and finish reasons are bitwise equal, with few blocks and slots; steps are ahead."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_blocks": 14}
    waiting, ahead = ([answer for index, answer in enumerate(_mixed(3)) if index % 6 in range(6)[kinds]] for _ in "ab")
    num_unknown: list[int] = []
    serve(waiting, **options)
    serve(ahead, before_step=lambda plan: num_unknown.append(int((plan.token_ids < 0).sum())), **options, **_AHEAD)
    assert sum(num_unknown) > 5
    assert_equal(waiting, ahead)


def test_nothing_comes_after_a_stop_token():
    """The token that the next step samples for a sequence that has ended is neither delivered nor counted."""
    prompt = random_prompts(1, 20, 20)[0]
    tokens = alone(prompt, max_tokens=12).text
    stop = next(token for token in tokens[2:] if token not in tokens[:2])
    answer = Answer(prompt, max_tokens=12, stop_token_ids=[stop])
    engine = serve([answer], **_AHEAD)
    assert tokens[: tokens.index(stop) + 1] == answer.text
    assert ("stop", 1) == (answer.reasons[0], sum(delta.is_last for delta in answer.deltas))
    assert len(answer.text) == engine.metrics.num_output_tokens


@pytest.mark.parametrize("options", [{}, _AHEAD], ids=["waiting", "ahead"])
@pytest.mark.parametrize("broken", range(6))
def test_a_failed_step_fails_its_own_requests(broken: int, options: dict[str, Any]):
    """Those in a step that fails get one error each, without its text, behind their tokens; others are answered."""
    steps: Iterator[int] = count()

    def break_one(plan: ForwardPlan) -> None:
        if next(steps) == broken:
            raise RuntimeError("broken")

    prompts = random_prompts(4, 5, 30, seed=1)
    answers = [Answer(prompt, max_tokens=8, n=2 - index % 2) for index, prompt in enumerate(prompts)]
    engine = make_engine(max_num_seqs=3, before_step=break_one, **options)
    answer_all(engine, answers)
    errors = [delta.error for answer in answers for delta in answer.deltas]
    failed = [error for error in errors if isinstance(error, InternalError)]
    assert 1 <= len(failed) <= 3
    assert len(failed) == sum(answer.error is not None for answer in answers)
    assert not any("broken" in str(error) for error in failed)
    assert (1, len(failed)) == (engine.metrics.num_failed_steps, engine.metrics.outcomes["INTERNAL"])
    for answer in answers:
        expected = alone(answer.request.prompt_ids.tolist(), max_tokens=8).text
        assert all(expected[: len(tokens)] == tokens for tokens in answer.tokens)
        assert answer.error is not None or all(expected == tokens for tokens in answer.tokens)


def test_cancels_and_deadlines_end_what_is_in_flight():
    """A request that is cancelled or too late while two steps have it gets nothing more, and frees everything."""
    now_ns = count(1)
    cancelled, late, other = (
        Answer(prompt, max_tokens=30, deadline_ns=deadline_ns)
        for prompt, deadline_ns in zip(random_prompts(3, 5, 30, seed=2), (None, 60, None), strict=True)
    )
    engine = make_engine(clock_ns=lambda: next(now_ns), after_deltas=lambda: None, **_AHEAD)
    num_at_cancel: list[int] = []

    def cancel(delta: object) -> None:
        if len(other.text) == 5 and not num_at_cancel:
            engine.cancel(cancelled.request)
            num_at_cancel.append(len(cancelled.text))

    other._on_delta = cancel
    submit(engine, [cancelled, late, other])
    finish(engine, [late, other])
    assert isinstance(late.error, DeadlineExceededError)
    assert num_at_cancel[0] + 1 >= len(cancelled.text)
    assert not cancelled.is_ended
    assert alone(other.request.prompt_ids.tolist(), max_tokens=30).text == other.text


def test_an_engine_stops_with_steps_in_flight():
    """Stopping without grace fails what runs and leaves no block behind."""
    answer = Answer([1, 2, 3], max_tokens=200)
    engine = make_engine(**_AHEAD)
    engine.submit(answer.request)
    engine.start()
    assert engine.stop(grace_s=0.0)
    assert answer.wait().error is not None
    assert_clean(engine)
