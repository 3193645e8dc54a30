"""A model with speculation behind the backend: clients see the same answer, in fewer and longer responses."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.backends.llm.builders import make_request
from tests.unit.backends.llm.conftest import make_tokenizer
from tests.unit.llm.engine_fixture import MODEL

from weft.backends.llm import LlmBackend
from weft.backends.llm.loading import measured_cost
from weft.backends.llm.metric_names import EngineExport
from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature
from weft.llm.config import EngineConfig
from weft.llm.models.model import TransformerModel
from weft.llm.models.weights import random_weights
from weft.llm.runner import ModelRunner
from weft.llm.speculation.speculator import CostCurve
from weft.serving.backends.base import Batch, InstanceContext, ModelContext

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 261,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
_OUTPUTS = ("text_output", "output_ids", "finish_reason", "num_output_tokens", "num_previous_tokens", "logprobs")


class _Stream:
    """Reads each response at once."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.on_taken: Any = None
        self.ended = threading.Event()

    def deliver(self, response: Any, *, is_final: bool) -> None:
        """See ``ResponseStream``."""
        self.answers.append(response)
        self.on_taken()
        if is_final:
            self.ended.set()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    make_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path


def _backend(folder: Path, **parameters: str) -> LlmBackend:
    signature = ModelSignature("m", "1", "llm", 0, (), (), is_decoupled=True)
    parameters = {"load_format": "dummy", "deterministic": "true", "num_blocks": "64", **parameters}
    backend = LlmBackend(ModelContext(signature, folder, {}, parameters), InstanceContext("m_0", "CPU"))
    backend.load()
    return backend


@pytest.fixture
def backends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LlmBackend, LlmBackend]]:
    """The same model without and with speculation, where further rows of a step count as free."""
    monkeypatch.setattr("weft.backends.llm.loading.measured_cost", lambda *args, **kwargs: CostCurve([(1, 1.0)]))
    made = _backend(folder), _backend(folder, speculation="ngram", num_speculative_tokens="5")
    yield made
    for backend in made:
        backend.close()


def _answers(backend: LlmBackend, **params: Any) -> list[Any]:
    request = make_request(
        text_input="abcabcabcabc", stream=True, sampling_parameters=json.dumps(params), outputs=_OUTPUTS
    )
    stream = request.stream = _Stream()  # type: ignore[assignment]
    backend.execute(Batch([request]))
    assert stream.ended.wait(60)
    return stream.answers


def _whole(answers: list[Any]) -> dict[str, Any]:
    """All responses together, as one that is not streamed would be."""
    tokens: list[Any] = []
    num_tokens = 0
    for answer in answers:
        outputs = answer.outputs
        own = json.loads(outputs["logprobs"][0])
        assert len(own) == len(outputs["output_ids"]) == outputs["num_output_tokens"][0]
        assert outputs["num_previous_tokens"][0] == num_tokens
        num_tokens += len(own)
        tokens += own
    return {
        "text": "".join(answer.outputs["text_output"][0].decode() for answer in answers),
        "ids": [token for answer in answers for token in answer.outputs["output_ids"].tolist()],
        "reason": answers[-1].outputs["finish_reason"][0],
        "logprobs": tokens,
    }


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1, "seed": 3, "top_k": 3, "logit_bias": {"70": 9, "71": 9}},
        {"temperature": 0, "frequency_penalty": 0.02},
    ],
)
def test_a_client_sees_the_same_answer(backends: tuple[LlmBackend, LlmBackend], params: dict[str, Any]):
    """Text, ids, log probabilities, counts and the reason are those without speculation."""
    without, with_drafts = (_answers(backend, max_tokens=150, logprobs=2, **params) for backend in backends)
    assert _whole(without) == _whole(with_drafts)


def test_a_response_has_all_tokens_of_a_step(backends: tuple[LlmBackend, LlmBackend]):
    """A greedy model that repeats itself is proposed its period, so that responses have several tokens each."""
    speculator = backends[1]._engine.speculator
    answers = _answers(backends[1], max_tokens=150, temperature=0, logprobs=0)
    assert speculator.num_accepted > 50
    assert max(len(answer.outputs["output_ids"]) for answer in answers) > 2


def test_a_stop_string_within_the_drafts_ends_the_text(backends: tuple[LlmBackend, LlmBackend]):
    """Of the tokens of a step, those behind a stop string are neither text nor counted."""
    text = _whole(_answers(backends[0], max_tokens=120, temperature=0, logprobs=0))["text"]
    for stop in (text[60:63], text[75:77]):
        without, with_drafts = (
            _whole(_answers(backend, max_tokens=120, temperature=0, logprobs=0, stop=[stop])) for backend in backends
        )
        assert without == with_drafts
        assert without["reason"] == b"stop"


def test_a_request_may_choose(backends: tuple[LlmBackend, LlmBackend]):
    """None turns drafts off for one request; a proposer that the model has not is refused with those it has."""
    speculator = backends[1]._engine.speculator
    _answers(backends[1], max_tokens=100, temperature=0, logprobs=0, speculation="none")
    assert speculator.num_drafts == 0
    _answers(backends[1], max_tokens=100, temperature=0, logprobs=0, speculation="ngram")
    assert speculator.num_drafts > 0
    request = make_request(text_input="a", sampling_parameters='{"speculation": "medusa"}', is_collected=True)
    (outcome,) = backends[1].execute(Batch([request]))
    assert isinstance(outcome, InvalidArgumentError)
    assert "'none' or 'ngram'" in outcome.message


def test_drafts_are_counted_by_proposer(backends: tuple[LlmBackend, LlmBackend]):
    """Drafts, accepted ones, and new tokens per step; a model without speculation exports none of these."""
    _answers(backends[1], max_tokens=100, temperature=0, logprobs=0)
    engine = backends[1]._engine
    exported = {
        sample.name: (sample.labels.get("proposer"), sample.value)
        for family in EngineExport(engine, backends[1].model.signature, "m_0").read()
        for sample in family.samples
    }
    speculator = engine.speculator
    assert exported["weft_llm_draft_tokens_total"] == ("ngram", speculator.num_drafts)
    assert exported["weft_llm_accepted_draft_tokens_total"] == ("ngram", speculator.num_accepted)
    assert exported["weft_llm_mean_accepted_length"] == ("ngram", speculator.mean_accepted_len)
    names = {family.name for family in EngineExport(backends[0]._engine, backends[0].model.signature, "m_0").read()}
    assert not any("draft" in name or "accepted" in name for name in names)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_costs_are_measured_without_a_trace(num_drafts: int):
    """Steps of 1 to as many rows as a step may have take time, and change nothing but the null block."""
    config = EngineConfig(num_blocks=8, max_num_seqs=3, max_num_batched_tokens=20).resolved(MODEL)
    runner = ModelRunner(
        TransformerModel(MODEL, random_weights(MODEL, 1)), config, proposer=_Zeros() if num_drafts else None
    )
    cost = measured_cost(config, runner, num_drafts=num_drafts)
    assert 0 < cost(1) <= cost(16) <= cost(10_000)
    assert (cost.draft_s > 0) == (num_drafts > 0)
    assert not runner.kv[1:].any()


def test_costs_are_measured_within_the_context(monkeypatch: pytest.MonkeyPatch):
    """No sequence of a measured step is longer than the block table of a model's context."""
    config = EngineConfig(num_blocks=8, max_num_seqs=2, num_speculative_tokens=15, max_model_len=12).resolved(MODEL)
    runner = ModelRunner(TransformerModel(MODEL, random_weights(MODEL, 1)), config, proposer=_Zeros())
    plans, run = [], runner.run
    monkeypatch.setattr(runner, "run", lambda plan: (plans.append(plan), run(plan))[1])
    measured_cost(config, runner, num_drafts=15)
    assert [12] == [max(max(np.diff(plan.q_start)) for plan in plans)]


class _Zeros:
    """Takes its time, and proposes zeros."""

    def bind(self, state: Any, num_blocks: int, block_size: int) -> None:
        """See ``DeviceProposer``."""

    def propose(self, plan: Any, token_ids: torch.Tensor) -> None:
        """See ``DeviceProposer``."""
        if plan.num_drafts.any():
            end_s = time.thread_time() + 0.02
            while time.thread_time() < end_s:
                pass
        token_ids.clamp_(min=0)

    def observe(self, plan: Any, hidden: Any, num_accepted: Any) -> None:
        """See ``DeviceProposer``."""
        assert (num_accepted <= plan.num_drafts).all()
