"""A tiny tokenizer, and an engine that says what it is told to."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from weft.backends.llm.text import TextCodec
from weft.backends.tokenizers import tokenizer_at
from weft.llm.request import Delta


def make_tokenizer(path: Path) -> None:
    """A byte-level tokenizer: one token a byte, and a few longer ones; it puts ``<s>`` before each text."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet, "ab", "cd", "abcd"])}
    merges = [("a", "b"), ("c", "d"), ("ab", "cd")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(3)
    tokenizer.save(str(path))


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tokenizer.json``."""
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    make_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def codec(tokenizer_path: Path) -> TextCodec:
    """Of the tiny tokenizer."""
    return TextCodec(tokenizer_at(tokenizer_path), max_text_bytes=100)


@pytest.fixture
def ids_of(codec: TextCodec) -> Any:
    """``ids_of(text)``: its token ids, without special ones."""
    return lambda text: codec.ids(text.encode(), "x", adds_special_tokens=False, parses_special_tokens=True)[1].tolist()


class NoMetrics:
    """What an engine measured: nothing."""

    def totals(self, now_ns: int) -> None:
        """Nothing."""


class FakeEngine:
    """Keeps what it is given; a test gives tokens by ``say``."""

    def __init__(self, after_deltas: Any = lambda: None, on_lost: Any = None) -> None:
        self.requests: list[Any] = []
        self.cancelled: list[Any] = []
        self.after_deltas, self.on_lost = after_deltas, on_lost
        self.refusal: Exception | None = None
        self.is_started = self.is_stopped = False
        self.metrics = NoMetrics()
        self.lora, self.max_len = None, 64

    def start(self) -> None:
        self.is_started = True

    def stop(self, grace_s: float) -> None:
        self.is_stopped = True

    def prepare(self, request: Any) -> None:
        if self.refusal is not None:
            raise self.refusal

    def enqueue(self, request: Any) -> None:
        self.requests.append(request)

    def cancel(self, request: Any) -> None:
        self.cancelled.append(request)

    finish = cancel

    def say(self, request: Any, ids: Any = (), **more: Any) -> None:
        """The request's sink gets a delta, as in a step of its own."""
        request.sink(Delta(request, more.pop("choice", 0), list(ids), **more))
        self.after_deltas()


class Sink:
    """Takes responses, and decodes their texts."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.is_over = False

    def deliver(self, response: Any, *, is_final: bool) -> None:
        assert not self.is_over
        self.is_over = is_final
        self.answers.append(response)

    def shown(self, name: str = "text_output") -> list[Any]:
        """One output of each response."""
        arrays = [answer.outputs[name] for answer in self.answers]
        return [[x.decode() for x in a] if a.dtype == np.object_ else a.tolist() for a in arrays]


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()
