"""Prompts computed in pieces: bitwise the same as in one step."""

import pytest
from tests.unit.llm.engine_fixture import Answer, alone, random_prompts, serve

from weft.llm.scheduler.plan import ForwardPlan

_PROMPT = random_prompts(1, 77, 77)[0]


@pytest.mark.parametrize("num_step_tokens", [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 64, 76, 77, 128])
def test_chunked_equals_one_shot(num_step_tokens: int):
    """Whatever part of a prompt a step takes, tokens and log probabilities are those of the prompt in one step."""
    sizes: list[int] = []
    answer = Answer(_PROMPT, max_tokens=8, logprobs=5)
    serve(
        [answer],
        max_num_seqs=1,
        max_num_batched_tokens=num_step_tokens,
        before_step=lambda plan: sizes.append(len(plan.token_ids)),
    )
    expected = alone(_PROMPT, max_tokens=8, logprobs=5)
    assert num_step_tokens >= max(sizes)
    assert len(_PROMPT) == sum(sizes[: 1 - len(expected.text)])
    assert expected.text == answer.text
    assert expected.logprobs == answer.logprobs


@pytest.mark.parametrize("num_step_tokens", [8, 24, 40])
def test_a_long_prompt_goes_on_beside_running_answers(num_step_tokens: int):
    """Answers get a token in every step while a long prompt is read in chunks, and nobody's tokens change."""
    plans: list[ForwardPlan] = []
    shorts = [Answer(prompt, max_tokens=30, logprobs=2) for prompt in random_prompts(4, 2, 6)]
    long = Answer(_PROMPT, max_tokens=6, logprobs=2)
    serve(
        [*shorts, long],
        max_num_seqs=8,
        max_num_batched_tokens=num_step_tokens,
        long_prefill_token_threshold=max(4, num_step_tokens - 8),
        before_step=plans.append,
    )
    mixed = [plan for plan in plans if len(plan.slots) == 5 and plan.max_q_len > 1]
    assert len(mixed) >= 2
    assert all(len(plan.sample_rows) >= 4 for plan in mixed[1:])
    for answer in (*shorts, long):
        expected = alone(answer.request.prompt_ids.tolist(), max_tokens=answer.request.params.max_tokens, logprobs=2)
        assert expected.text == answer.text
        assert expected.logprobs == answer.logprobs
