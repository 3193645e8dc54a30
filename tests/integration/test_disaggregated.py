"""Prefill apart from decode, over processes: what clients get is what one service answers, whatever happens."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.integration.disaggregated import MODEL, Disaggregated, disaggregated
from tests.integration.language_model import Answer, Stream, write_folder

WORDS = "the quick brown fox jumps over the lazy dog; zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; "
OUTPUTS = ("text_output", "output_ids", "finish_reason", "num_input_tokens", "num_output_tokens", "logprobs")
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 3},
    "log probabilities": {"logprobs": 2, "prompt_logprobs": 1},
    "penalties": {"repetition_penalty": 1.2, "min_tokens": 5},
    "stop string": {"stop": ["e"]},
    "grammar": {"guided_regex": "[a-z]{3} [a-z]{30}"},
    "one token": {"max_tokens": 1},
    "several choices": {"n": 2, "temperature": 1.0, "seed": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder."""
    folder = tmp_path_factory.mktemp("hf")
    write_folder(folder)
    return folder


@pytest.fixture(scope="module", params=["unix", pytest.param("tcp", marks=pytest.mark.long)])
def mesh(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Disaggregated]:
    root = tmp_path_factory.mktemp(request.param)
    with disaggregated(root, folder, is_local=request.param == "unix", deterministic="true") as made:
        yield made


def prompt(number: int) -> str:
    """A long prompt, unlike those of other numbers."""
    return f"{number:04d} {WORDS * 2}"


def told(answers: Sequence[Answer]) -> list[Any]:
    """What a stream told: texts, ids and log probabilities joined by choice, reasons, and numbers of tokens."""
    assert not any(answer.error for answer in answers), answers
    full = [answer.outputs for answer in answers if answer.outputs]
    num_choices = len(full[0]["text_output"])
    texts = ["".join(one["text_output"][choice] for one in full) for choice in range(num_choices)]
    counts = [sum(int(one["num_output_tokens"][choice]) for one in full) for choice in range(num_choices)]
    ids = [int(token) for one in full for token in one["output_ids"]] if num_choices == 1 else []
    logprobs = (
        "".join(one["logprobs"][0] for one in full).replace("null", "").replace("][", ", ") if num_choices == 1 else ""
    )
    return [texts, counts, ids, logprobs, full[-1]["finish_reason"], {int(one["num_input_tokens"][0]) for one in full}]


def ask(service: Any, text: str, **sampling: Any) -> list[Answer]:
    """All responses of a stream."""
    stream = Stream(service)
    stream.send(MODEL, text, outputs=OUTPUTS, sampling={"max_tokens": 24} | sampling)
    answers = stream.rest()
    stream.close()
    return answers


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())
def test_apart_as_together(mesh: Disaggregated, sampling: dict[str, Any]) -> None:
    """Clients get the same texts, tokens, log probabilities and counts, and no lease remains."""
    text = prompt(len(str(sampling)))
    before = mesh.decode.figure("kv_transfers_total", outcome="complete")
    assert told(ask(mesh.both, text, **sampling)) == told(ask(mesh.router, text, **sampling))
    is_split = "n" not in sampling and sampling.get("max_tokens") != 1
    assert is_split == mesh.decode.figure("kv_transfers_total", outcome="complete") - before
    mesh.check_clean()
