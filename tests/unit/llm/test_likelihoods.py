"""Log probabilities of prompts, and beam search, against transformers on the same random weights."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.unit.llm.engine_fixture import (
    VOCAB_SIZE,
    Answer,
    answer_all,
    answer_in_turn,
    finish,
    make_engine,
    random_prompts,
    serve,
    submit,
)

from weft.base.errors import InvalidArgumentError
from weft.llm.models.model import TransformerModel
from weft.llm.models.registry import read_config
from weft.llm.models.weights import load_folder
from weft.llm.scheduler.plan import ForwardPlan

#: Several, so that searches of a random model end by them.
EOS = (1, 37, 39, 66, 86)


class Reference:
    """A model of transformers, and the same weights in ours."""

    def __init__(self, folder: Path) -> None:
        import transformers

        torch.manual_seed(4)
        config = transformers.LlamaConfig(
            vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=list(EOS), pad_token_id=0,
            initializer_range=0.2,
        )  # fmt: skip
        self.theirs = transformers.LlamaForCausalLM(config).eval()
        self.theirs.save_pretrained(folder)
        self.model = TransformerModel(read_config(folder), load_folder(folder, read_config(folder)))

    def logprobs(self, prompt: list[int]) -> torch.Tensor:
        """Of every token at every position, ``[T, V]``."""
        with torch.inference_mode():
            return self.theirs(torch.tensor([prompt])).logits[0].float().log_softmax(-1)

    def beams(self, prompt: list[int], width: int, **options: Any) -> tuple[list[list[int]], list[float]]:
        """Tokens of the ``width`` best, up to the one that ends them, and their scores."""
        given = {
            "do_sample": False,
            "num_return_sequences": width,
            "return_dict_in_generate": True,
            "output_scores": True,
        }
        ids = torch.tensor([prompt])
        found = self.theirs.generate(ids, attention_mask=torch.ones_like(ids), num_beams=width, **given | options)
        texts = [row[len(prompt) :].tolist() for row in found.sequences]
        ends = [[index for index, token in enumerate(text, 1) if token in EOS] for text in texts]
        ended = [text[: end[0]] if end else text for text, end in zip(texts, ends, strict=True)]
        return ended, found.sequences_scores.tolist()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("llama"))


def assert_scored(reference: Reference, answer: Answer, num_top: int) -> None:
    """Its first delta, and no other, has the log probabilities of the prompt's tokens, and the likeliest ones."""
    first, *others = [delta.prompt_logprobs for delta in answer.deltas if delta.choice == 0]
    assert first is not None
    assert not any(others)
    prompt = answer.request.prompt_ids.tolist()
    expected = reference.logprobs(prompt)
    rows = [piece.row(row, num_top) for piece in first for row in range(len(piece.sampled))]
    assert len(prompt) - 1 == len(rows)
    for position, row in enumerate(rows):
        there = expected[position]
        assert row.logprob == pytest.approx(there[prompt[position + 1]].item(), abs=1e-4)
        assert num_top == len(row.top_ids)
        np.testing.assert_allclose(row.top_logprobs, there.topk(num_top).values, atol=1e-4)
        np.testing.assert_allclose(row.top_logprobs, there[list(row.top_ids)], atol=1e-4)


ENGINES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    "ahead": {"async_scheduling": "true", "max_num_batched_tokens": 16, "max_num_seqs": 4},
    "deterministic": {"deterministic": True},
    "short of slots": {"max_num_seqs": 2, "block_size": 4},
}


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_of_a_prompt_are_scored(reference: Reference, engine: str) -> None:
    """As transformers scores them, in any chunks, beside others and from a prompt that is cached; n is no matter."""
    prompts = random_prompts(5, 3, 90, seed=7)
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 0},
        {"max_tokens": 3, "n": 2},
        {"logprobs": 1},
        {"n": 2, "max_tokens": 0},
    ]
    options = [kind | {"prompt_logprobs": num_top} for num_top, kind in enumerate(kinds)]
    rounds = [
        [
            Answer(prompts[4], max_tokens=20),
            *(Answer(prompt, **kind) for prompt, kind in zip(prompts, options, strict=False)),
        ]
        for _ in range(2)
    ]
    answer_in_turn(make_engine(model=reference.model, **{"deterministic": False} | ENGINES[engine]), rounds)
    for answers in rounds:
        for num_top, answer in enumerate(answers[1:]):
            assert_scored(reference, answer, num_top)
        assert [["length"], ["length"]] == [answers[1].reasons, answers[4].reasons[:1]]
        assert [[[]], [[], []]] == [answers[1].tokens, answers[4].tokens]
    assert 0 == rounds[1][1].deltas[0].num_cached_tokens
    assert [each.tokens for each in rounds[0]] == [each.tokens for each in rounds[1]]


def test_prompts_of_one_token_and_of_full_length(reference: Reference) -> None:
    """The one has nothing to score; the other fits if nothing is to come."""
    one, full = Answer([5], prompt_logprobs=2), Answer([7] * 256, prompt_logprobs=1, max_tokens=0)
    serve([one, full], model=reference.model)
    assert [] == one.deltas[0].prompt_logprobs
    assert_scored(reference, full, 1)
    with pytest.raises(InvalidArgumentError, match="has 256 tokens, but with at least one new token"):
        make_engine(model=reference.model).submit(Answer([7] * 256, max_tokens=1).request)


def test_what_was_scored_before_a_preemption_is_not_scored_again(reference: Reference) -> None:
    """The sequence goes on from its cached blocks; its scores are whole, none twice."""
    low, high = Answer(random_prompts(1, 90, 90)[0], prompt_logprobs=1, level=1), Answer([3] * 20)
    num_scored: list[int] = []

    def before_step(plan: ForwardPlan) -> None:
        num_scored.append(len(plan.score_rows))
        if len(num_scored) == 3:
            engine.submit(high.request)

    options: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16}
    engine = make_engine(model=reference.model, deterministic=False, before_step=before_step, **options)
    submit(engine, [low])
    finish(engine, [low, high])
    assert 1 == engine.num_preemptions
    assert 89 == sum(num_scored)
    assert_scored(reference, low, 1)


def test_logits_of_a_long_prompt_never_exist_at_once(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed for a few rows at a time."""
    monkeypatch.setattr("weft.llm.runner._MAX_SCORE_LOGITS", 8 * VOCAB_SIZE)
    rows, logits = [], TransformerModel.logits
    monkeypatch.setattr(
        TransformerModel, "logits", lambda self, hidden: rows.append(len(hidden)) or logits(self, hidden)
    )
    answer = Answer(random_prompts(1, 100, 100)[0], prompt_logprobs=2, max_tokens=1)
    serve([answer], model=reference.model)
    assert_scored(reference, answer, 2)
    assert (8, 100) == (max(rows), sum(rows))


BEAMS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (4, {"length_penalty": 0.0}),
    (4, {"early_stopping": True}),
    (3, {"early_stopping": "never", "length_penalty": 2.0}),
    (5, {"length_penalty": -1.0, "early_stopping": "never"}),
    (8, {"max_tokens": 1}),
    (4, {"early_stopping": "never", "max_tokens": 40}),
]


def test_bad_words_and_other_tokens_do_not_come(reference: Reference) -> None:
    """What comes is the likeliest that may: a word of the prompt does not count, nor a word that is not whole."""
    prompt, allowed = random_prompts(1, 20, 20, seed=2)[0], set(range(0, VOCAB_SIZE, 3))
    words: list[tuple[int, ...]] = []
    texts: list[list[int]] = []
    for _ in range(4):  # each forbids what came without it
        text: list[int] = []
        while len(text) < 20:
            logprobs = reference.logprobs(prompt + text)[-1]
            banned = {word[-1] for word in words if tuple(text[len(text) + 1 - len(word) :]) == word[:-1]}
            text.append(max(allowed - banned, key=lambda token: logprobs[token]))
        texts.append(text)
        words += [tuple(text[5:8]), tuple(text[2:4]), (text[0],)]
    answers = [
        Answer(
            prompt,
            max_tokens=20,
            bad_words=tuple(words[: 3 * count]),
            allowed_token_ids=tuple(allowed),
            ignore_eos=True,
        )
        for count in range(4)
    ]
    serve(answers, model=reference.model, deterministic=False, max_num_batched_tokens=16, max_num_seqs=4)
    assert texts == [answer.text for answer in answers]
    none_left = Answer(prompt, bad_words=((3,), (6,)), allowed_token_ids=(3, 6))
    answer_all(make_engine(model=reference.model), [none_left])
    assert "no token that may come next" in str(none_left.error)


class Search(NamedTuple):
    """A search, and what transformers finds."""

    prompt: list[int]
    width: int
    options: dict[str, Any]
    tokens: list[list[int]]
    scores: list[float]


@pytest.fixture(scope="module")
def searches(reference: Reference) -> list[Search]:
    found = []
    for prompt in random_prompts(3, 2, 40, seed=5):
        for width, more in BEAMS:
            options = {"max_tokens": 20} | more
            given = {name: value for name, value in options.items() if name != "max_tokens"}
            tokens, scores = reference.beams(prompt, width, max_new_tokens=options["max_tokens"], **given)
            found.append(Search(prompt, width, options, tokens, scores))
    return found


@pytest.mark.parametrize("engine", ["whole", "chunks", "ahead", "short of slots", "uncached"])
def test_beams_are_those_of_transformers(reference: Reference, searches: list[Search], engine: str) -> None:
    """Every beam, in its order, also beside other requests, and with fewer slots than beams."""
    answers = [Answer(one.prompt, n=one.width, use_beam_search=True, logprobs=2, **one.options) for one in searches]
    others = [Answer(prompt, max_tokens=40, temperature=1.0, seed=1) for prompt in random_prompts(3, 2, 30)]
    config = {"enable_prefix_caching": False} if engine == "uncached" else ENGINES[engine]
    serve([*answers, *others], model=reference.model, **{"deterministic": False, "num_blocks": 512} | config)
    num_ended = 0
    for answer, search in zip(answers, searches, strict=True):
        assert search.tokens == answer.tokens
        for text, logprobs, reason, score in zip(
            search.tokens, answer.logprobs, answer.reasons, search.scores, strict=True
        ):
            total = sum(one.logprob for one in logprobs)
            assert total / len(text) ** search.options.get("length_penalty", 1.0) == pytest.approx(score, rel=1e-5)
            assert ("stop" if text[-1] in EOS else "length") == reason
            num_ended += text[-1] in EOS
    assert num_ended >= 10
