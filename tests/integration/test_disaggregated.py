"""Prefill apart from decode, over processes: what clients get is what one service answers, whatever happens."""

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.integration.disaggregated import MODEL, Disaggregated, disaggregated
from tests.integration.language_model import Answer, Stream, write_folder
from tests.processes import wait_until

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
    with disaggregated(
        root, folder, is_local=request.param == "unix", deterministic="true", kv_transfer_timeout_ms=1500
    ) as made:
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


def test_prompts_of_every_length_come_whole(mesh: Disaggregated) -> None:
    """Also with a first token that fills a block, which the source has not computed."""
    failed = mesh.decode.figure("kv_transfers_total", outcome="failed")
    for number in range(16):
        ask(mesh.router, prompt(500 + number) + "0123456789abcdef"[:number], max_tokens=2)
    assert failed == mesh.decode.figure("kv_transfers_total", outcome="failed")
    mesh.check_clean()


def test_a_cancelled_request_leaves_nothing(mesh: Disaggregated) -> None:
    """Neither while its prompt is computed, nor while it is decoded, nor without anybody to go on."""
    for number, num_answers in enumerate((0, 1, 5)):
        stream = Stream(mesh.router)
        stream.send(MODEL, prompt(100 + number), sampling={"max_tokens": 1000, "ignore_eos": True})
        for _ in range(num_answers):
            stream.take()
        stream.close(cancels=True)
        mesh.check_clean()


class Load:
    """Streams in flight until they have all ended, and what each is to be."""

    def __init__(self, mesh: Disaggregated, first: int, count: int, num_tokens: int = 120) -> None:
        options = {"outputs": OUTPUTS, "sampling": {"max_tokens": num_tokens, "ignore_eos": True}}
        self.expected, self.streams = [], []
        for service, streams in ((mesh.both, self.expected), (mesh.router, self.streams)):
            for number in range(first, first + count):
                streams.append(Stream(service))
                streams[-1].send(MODEL, prompt(number), **options)
            if streams is self.expected:
                self.expected = [told(stream.rest()) for stream in streams]

    def check(self) -> None:
        """Every stream is whole and right."""
        assert self.expected == [told(stream.rest()) for stream in self.streams]
        for stream in self.streams:
            stream.close()


@pytest.mark.long
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("num_answers", [0, 1, 40])
def test_kills_cost_no_stream(mesh: Disaggregated, role: str, num_answers: int) -> None:
    """Killed before the first token, at the handover or while it decodes, of either role: every stream goes on."""
    victim = getattr(mesh, role)
    load = Load(mesh, 200 + 10 * num_answers + 5 * (role == "decode"), 4)
    seen = [load.streams[0].take() for _ in range(num_answers)]
    victim.end(signal.SIGKILL)
    try:
        rest = told([*seen, *load.streams[0].rest()])
        assert load.expected[0] == rest
        load.streams[0].close()
        load.expected, load.streams = load.expected[1:], load.streams[1:]
        load.check()
    finally:
        victim.start()
    mesh.check_clean()
    wait_until(lambda: is_split(mesh), "a request that is split again")


def is_split(mesh: Disaggregated) -> bool:
    """Whether the next long prompt is computed apart."""
    before = mesh.decode.figure("kv_transfers_total", outcome="complete")
    is_split.number += 1  # type: ignore[attr-defined]
    ask(mesh.router, prompt(9000 + is_split.number), max_tokens=2)  # type: ignore[attr-defined]
    return mesh.decode.figure("kv_transfers_total", outcome="complete") > before


is_split.number = 0  # type: ignore[attr-defined]


def test_blocks_that_do_not_come_in_time_are_computed(mesh: Disaggregated) -> None:
    """The process that has them hangs from the handover on: the request waits for so long and goes on; leases end."""
    load = Load(mesh, 700, 3)
    seen = [load.streams[0].take()]
    assert mesh.prefill.process is not None
    mesh.prefill.process.send_signal(signal.SIGSTOP)
    try:
        assert load.expected[0] == told([*seen, *load.streams[0].rest()])
    finally:
        mesh.prefill.process.send_signal(signal.SIGCONT)
    assert load.expected[1:] == [told(stream.rest()) for stream in load.streams[1:]]
    for stream in load.streams:
        stream.close()
    mesh.check_clean()
