"""Likelihoods, searches and continued messages of the sample language model, as transformers has them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers
from tests.integration.samples.test_openai_endpoints import ask

from weft.base.processes.process import Endpoint

#: One of several steps of the engine, one short, and one that is no English.
PROMPTS = ["Return the number of items. " * 30, "If the", "zwölf \U0001f680"]
CHAT = [{"role": "user", "content": "Return the"}, {"role": "assistant", "content": "The number of "}]


class Reference:
    """The sample's weights in transformers."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def scores(self, ids: list[int]) -> list[float]:
        """Log probabilities of all ids but the first."""
        with torch.inference_mode():
            logprobs = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        return [logprobs[position, token].item() for position, token in enumerate(ids[1:])]


@pytest.fixture(scope="module")
def reference(repository: Path) -> Reference:
    return Reference(repository / "model/writer/1")


@pytest.fixture
def client(mesh: Mapping[str, Endpoint]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{mesh['gateway'].http}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_prompts_are_scored(mesh: Mapping[str, Endpoint], client: openai.OpenAI, reference: Reference) -> None:
    """As texts and as ids, several at once, twice, alone and before an answer; the first token has no probability."""
    lists = [reference.tokenizer(prompt).input_ids for prompt in PROMPTS]
    for prompts in (PROMPTS, lists, lists):
        for most in (0, 2):
            found = client.completions.create(
                model="writer", prompt=prompts, max_tokens=most, echo=True, logprobs=3, temperature=0
            )
            for choice, ids, prompt in zip(found.choices, lists, PROMPTS, strict=True):
                logprobs = choice.logprobs
                assert logprobs is not None
                assert choice.text.startswith(prompt)
                assert (
                    len(ids) + most == len(logprobs.token_logprobs) == len(logprobs.tokens) == len(logprobs.text_offset)
                )
                assert [None, None] == [logprobs.token_logprobs[0], logprobs.top_logprobs[0]]
                expected = reference.scores(ids)
                assert logprobs.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-3)
                by_id = choice.prompt_logprobs  # type: ignore[attr-defined]
                assert by_id[0] is None
                assert [each[str(token)]["logprob"] for each, token in zip(by_id[1:], ids[1:], strict=True)] == (
                    logprobs.token_logprobs[1 : len(ids)]
                )
                assert ("length" if most else choice.text) == (choice.finish_reason if most else prompt)
    asked = {"model": "writer", "prompt": PROMPTS[1], "echo": True, "logprobs": 3, "max_tokens": 4, "temperature": 0}
    whole = client.completions.create(**asked).choices[0]  # type: ignore[call-overload]
    pieces = [piece.choices[0] for piece in client.completions.create(**asked, stream=True)]  # type: ignore[call-overload]
    assert whole.text == "".join(piece.text for piece in pieces)
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert getattr(whole.logprobs, name) == [
            x for one in pieces if one.logprobs for x in getattr(one.logprobs, name)
        ]
    body = {"model": "writer", "messages": CHAT[:1], "prompt_logprobs": 2, "max_tokens": 0}
    _, chat = ask(mesh, "/v1/chat/completions", json.dumps(body))
    assert chat["usage"]["prompt_tokens"] == len(chat["prompt_logprobs"])
    assert [None, ""] == [chat["prompt_logprobs"][0], chat["choices"][0]["message"]["content"]]


@pytest.mark.parametrize(("width", "options"), [(3, {}), (4, {"length_penalty": 0.5, "early_stopping": True})])
def test_beams_are_those_of_transformers(
    client: openai.OpenAI, reference: Reference, width: int, options: dict[str, Any]
) -> None:
    """The best ones of a wider search, for every prompt."""
    found = client.completions.create(
        model="writer",
        prompt=PROMPTS,
        n=2,
        best_of=width,
        max_tokens=12,
        extra_body={"use_beam_search": True} | options,
    )
    for index, prompt in enumerate(PROMPTS):
        ids = torch.tensor([reference.tokenizer(prompt).input_ids])
        expected = reference.model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=2, do_sample=False,
            max_new_tokens=12, **options,
        )[:, ids.shape[1] :]  # fmt: skip
        texts = reference.tokenizer.batch_decode(expected, skip_special_tokens=True)
        assert texts == [choice.text for choice in found.choices[2 * index : 2 * index + 2]]


def test_the_best_is_the_likeliest(client: openai.OpenAI) -> None:
    """One of all that come without it, by the sum of log probabilities."""
    asked: dict[str, Any] = {"model": "writer", "prompt": PROMPTS[1], "max_tokens": 6, "seed": 3, "logprobs": 0}
    every = client.completions.create(**asked, n=5).choices
    ranked = sorted(every, key=lambda choice: -sum(choice.logprobs.token_logprobs))  # type: ignore[arg-type, union-attr]
    best = client.completions.create(**asked, n=2, best_of=5)
    assert [choice.text for choice in ranked[:2]] == [choice.text for choice in best.choices]


def test_words_and_tokens_are_kept_out(client: openai.OpenAI, reference: Reference) -> None:
    """Words of several tokens too; allowed tokens alone come; of a prompt its end is kept."""
    asked: dict[str, Any] = {"model": "writer", "prompt": "The function returns", "max_tokens": 30, "temperature": 0}
    text = client.completions.create(**asked, extra_body={"bad_words": ["\n"]}).choices[0].text
    assert "a file" in text
    without = client.completions.create(**asked, extra_body={"bad_words": ["\n", "a file"]}).choices[0].text
    assert "a file" not in without
    assert "\n" not in text
    ids = reference.tokenizer(" a list of", add_special_tokens=False).input_ids
    allowed = client.completions.create(**asked, logprobs=0, extra_body={"allowed_token_ids": ids}).choices[0]
    assert {reference.tokenizer.decode([token]) for token in ids} >= set(allowed.logprobs.tokens)  # type: ignore[union-attr, arg-type]
    cut = client.completions.create(
        **asked | {"prompt": PROMPTS[0]}, extra_body={"truncate_prompt_tokens": 5}, echo=True
    )
    assert 5 == cut.usage.prompt_tokens  # type: ignore[union-attr]
    assert cut.choices[0].text[:12] in PROMPTS[0]


def test_a_last_message_is_continued(mesh: Mapping[str, Endpoint], client: openai.OpenAI) -> None:
    """As the same text is by a completion: in a chat, for its tokens, and as Anthropic's clients ask for it."""
    rendered = "user: Return the\nassistant: The number of "
    asked: dict[str, Any] = {"model": "writer", "max_tokens": 8, "temperature": 0}
    more = {"continue_final_message": True, "add_generation_prompt": False}
    chat = client.chat.completions.create(**asked, messages=CHAT, extra_body=more)  # type: ignore[arg-type]
    _, message = ask(mesh, "/v1/messages", json.dumps(asked | {"messages": CHAT}))
    assert chat.choices[0].message.content == "".join(block["text"] for block in message["content"])
    _, tokens = ask(mesh, "/tokenize", json.dumps({"model": "writer", "messages": CHAT} | more))
    _, text = ask(mesh, "/detokenize", json.dumps({"model": "writer", "tokens": tokens["tokens"]}))
    assert rendered == text["prompt"]
    _, count = ask(mesh, "/v1/messages/count_tokens", json.dumps({"model": "writer", "messages": CHAT}))
    assert [len(tokens["tokens"])] * 2 == [count["input_tokens"], chat.usage.prompt_tokens]  # type: ignore[union-attr]
    by_ids = client.completions.create(**asked, prompt=tokens["tokens"]).choices[0].text
    assert by_ids == chat.choices[0].message.content
