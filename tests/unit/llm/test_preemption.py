"""Sequences that lose their blocks or their slot to others: undisturbed in what they say."""

import pytest
from tests.unit.llm.engine_fixture import Answer, alone, finish, make_engine, random_prompts

_NUM_PROMPT, _NUM_NEW, _BLOCK_SIZE = 20, 76, 16
#: Blocks of a pool that holds 1.2 times one whole sequence, and the null block.
_NUM_BLOCKS = round(1.2 * (_NUM_PROMPT + _NUM_NEW) / _BLOCK_SIZE) + 1


def _answers(count: int, **params) -> list[Answer]:
    prompts = random_prompts(count, _NUM_PROMPT, _NUM_PROMPT, seed=4)
    return [Answer(prompt, max_tokens=_NUM_NEW, logprobs=2, **params) for prompt in prompts]


def _serve_in_narrow_pool(answers: list[Answer], **options) -> None:
    """Every answer has come, and some request was preempted: the engine had learned to expect short answers."""
    first = Answer([1], max_tokens=1, on_delta=lambda delta: [engine.submit(answer.request) for answer in answers])  # type: ignore[arg-type]
    engine = make_engine(num_blocks=_NUM_BLOCKS, watermark=0.0, max_num_seqs=3, **options)
    engine.submit(first.request)
    finish(engine, [first, *answers])
    assert engine.num_preemptions > 0


def _assert_as_alone(answers: list[Answer]) -> None:
    for answer in answers:
        params = answer.request.params
        expected = alone(
            answer.request.prompt_ids.tolist(),
            max_tokens=params.max_tokens,
            logprobs=2,
            temperature=params.temperature,
            seed=params.seed,
        )
        assert expected.text == answer.text
        assert expected.logprobs == answer.logprobs


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preempted_equals_undisturbed(enable_prefix_caching: bool, temperature: float):
    """In a pool of 1.2 times one sequence, three take turns; tokens and log probabilities are bitwise those alone."""
    answers = _answers(3, temperature=temperature, seed=11)
    _serve_in_narrow_pool(answers, enable_prefix_caching=enable_prefix_caching)
    _assert_as_alone(answers)


def test_a_better_level_takes_a_seat():
    """A request of a smaller level takes the only slot in the middle of an answer, and that goes on afterwards."""
    low, high = _answers(2)
    low.request.level, high.request.level = 2, 1
    order: list[str] = []
    engine = make_engine(max_num_seqs=1)
    low._on_delta = lambda delta: engine.submit(high.request) if len(low.deltas) == 20 else order.append("low")
    high._on_delta = lambda delta: order.append("high")
    engine.submit(low.request)
    finish(engine, [low, high])
    assert 1 == engine.num_preemptions
    assert ["low"] * 19 + ["high"] * _NUM_NEW == order[: 19 + _NUM_NEW]
    _assert_as_alone([low, high])


def test_penalties_survive_preemption():
    """What a sequence has said counts against its next tokens after a preemption as before."""
    params = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.3, "min_tokens": _NUM_NEW}
    prompts = random_prompts(2, _NUM_PROMPT, _NUM_PROMPT, seed=4)
    answers = [Answer(prompt, max_tokens=_NUM_NEW, logprobs=0, **params) for prompt in prompts]  # type: ignore[arg-type]
    _serve_in_narrow_pool(answers)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = alone(prompt, max_tokens=_NUM_NEW, logprobs=0, **params)
        assert expected.text == answer.text
        assert expected.logprobs == answer.logprobs
