"""OpenAI's own client, and the programs of docs/language-models.md, before the language model of the samples."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import openai
import pytest

from weft.base.processes.process import Endpoint

MODEL = "writer"
PROMPT = "Return the"
GUIDE = (Path(__file__).resolve().parents[3] / "docs/language-models.md").read_text()
FORMS = (Path(__file__).resolve().parents[3] / "docs/structured-output.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def client(mesh: Mapping[str, Endpoint]) -> Iterator[openai.OpenAI]:
    url = f"http://{mesh['gateway'].http}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    """Text and log probabilities, greedy and with a seed; the usage counts its tokens."""
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7}):
        whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, logprobs=2, **sampling)
        *chunks, last = client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=12,
            logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
            **sampling,
        )
        choices = [chunk.choices[0] for chunk in chunks]
        assert whole.choices[0].text == "".join(choice.text for choice in choices)
        assert whole.choices[0].finish_reason == choices[-1].finish_reason == "length"
        told = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
        logprobs = whole.choices[0].logprobs
        assert logprobs.tokens == told
        assert whole.choices[0].text == "".join(logprobs.tokens)
        assert all(
            value == top[token]
            for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
        )
        assert whole.usage == last.usage
        assert 12 == whole.usage.completion_tokens
        assert 12 == len(logprobs.tokens)


def test_several_answers_differ_by_their_own_noise(client: openai.OpenAI) -> None:
    """And come again with the same seed; the first is that of one alone. A stop string ends each of them."""
    ask = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "seed": 3}
    first, again = (client.completions.create(n=3, **ask) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert 3 == len(set(texts))
    assert texts[0] == client.completions.create(**ask).choices[0].text
    stop = texts[0][4:7]
    stopped = client.completions.create(stop=[stop], **ask).choices[0]
    assert (texts[0][: texts[0].index(stop)], "stop") == (stopped.text, stopped.finish_reason)


def test_a_chat_goes_through_the_models_own_template(client: openai.OpenAI) -> None:
    """That of its `tokenizer_config.json`, which alone says which special tokens there are: this one has none."""
    messages = [{"role": "user", "content": PROMPT}]
    ask = {"model": MODEL, "messages": messages, "max_completion_tokens": 8, "temperature": 0}
    chat = client.chat.completions.create(**ask)
    text = client.completions.create(model=MODEL, prompt=f"user: {PROMPT}\nassistant:", max_tokens=8)
    assert text.usage.prompt_tokens - 1 == chat.usage.prompt_tokens
    streamed = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(stream=True, **ask)]
    assert chat.choices[0].message.content == "".join(streamed)


def test_what_the_model_refuses_is_the_clients_fault(client: openai.OpenAI) -> None:
    """A prompt that is too long, and a token that it does not have."""
    for prompt, refusal in (("a " * 4096, "prompt has 4098 tokens"), ([10**9], "1000000000")):
        with pytest.raises(openai.BadRequestError, match=refusal):
            client.completions.create(model=MODEL, prompt=prompt)
    assert MODEL in [model.id for model in client.models.list()]


def test_an_answer_has_the_form_that_is_asked_for(client: openai.OpenAI, mesh: Mapping[str, Endpoint]) -> None:
    """By the names of OpenAI and of vLLM, whole, in several choices and as a stream; so has the guide's."""
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    schema |= {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    form = {"type": "json_schema", "json_schema": {"name": "switch", "schema": schema, "strict": True}}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "response_format": form}
    answer = client.chat.completions.create(n=2, max_completion_tokens=40, **chat)
    texts = [choice.message.content for choice in answer.choices]
    texts.append(
        "".join(chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(stream=True, **chat))
    )
    assert {"stop"} == {choice.finish_reason for choice in answer.choices}
    assert all(isinstance(json.loads(text)["on"], bool) for text in texts)
    guided = client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"guided_choice": ["left", "right"]})
    assert guided.choices[0].text in ("left", "right")
    program = re.findall(r"^```python\n(.*?)^```$", FORMS, re.MULTILINE | re.DOTALL)[0]
    assert "'pages':" in output("-c", program.replace("localhost:8000", str(mesh["gateway"].http)))


def test_a_form_that_cannot_be_is_the_clients_fault(client: openai.OpenAI) -> None:
    """The message has the place in the schema."""
    for outputs, words in (
        ({"json": {"properties": {"a": {"not": {}}}}}, "structured_outputs.json at #/properties/a cannot be a grammar"),
        ({"regex": "("}, "unclosed group"),
        ({"xml": 1}, "must have exactly one of"),
    ):
        with pytest.raises(openai.BadRequestError, match=re.escape(words)):
            client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"structured_outputs": outputs})


def output(*command: str) -> str:
    """What a program prints; it ends well."""
    done = subprocess.run([sys.executable, "-P", *command], capture_output=True, text=True, timeout=60, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout


def test_both_programs_print_the_same_text(mesh: Mapping[str, Endpoint]) -> None:
    """They ask for the same tokens with the same seed, over HTTP and over gRPC, and lose nothing of them."""
    http, grpc = str(mesh["gateway"].http), str(mesh["router"].grpc)
    texts = [
        output("-c", program.replace("localhost:8000", http).replace("localhost:8001", grpc)) for program in PROGRAMS
    ]
    assert 2 == len(texts)
    assert texts[0]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("arguments", [["writer", "--param", "max_tokens=4", "--param", "temperature=0.5"], ["write"]])
def test_the_command_line_streams(mesh: Mapping[str, Endpoint], arguments: list[str]) -> None:
    """The model by itself, and the graph around it."""
    url = str(mesh["router"].grpc)
    printed = output("-m", "weft.cli", "infer", *arguments, "--text", "Return the", "--url", url)
    assert re.search(r"responses? in .* ms, the first after", printed)
