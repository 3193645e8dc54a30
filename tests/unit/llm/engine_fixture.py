"""Engines over tiny random models, and requests that keep what they are answered."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from weft.llm.config import EngineConfig, TransformerConfig
from weft.llm.device_state import DeviceProposer
from weft.llm.engine import Engine
from weft.llm.grammar import GrammarCompiler
from weft.llm.metrics import EngineMetrics
from weft.llm.models.model import TransformerModel
from weft.llm.models.weights import random_weights
from weft.llm.request import Delta, EngineRequest, SamplingParams, TokenLogprobs
from weft.llm.runner import ModelRunner, StepTokens
from weft.llm.scheduler.plan import ForwardPlan
from weft.llm.speculation.speculator import Speculator

torch.set_num_threads(1)

VOCAB_SIZE = 96
MODEL = TransformerConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=256,
)
#: The wide one is such that a product of many rows takes another path in the library than one of a single row.
SHAPES = {
    "narrow": MODEL,
    "wide": replace(MODEL, hidden_size=192, intermediate_size=320, num_heads=6, num_kv_heads=2, head_dim=32),
}

#: Nothing here takes a hundredth of it; who waits longer hangs.
_TIMEOUT_S = 60.0


@cache
def _model(shape: str, dtype: str, is_deterministic: bool, quantization: str) -> TransformerModel:
    config, num_bits = SHAPES[shape], {"int8": 8, "int4": 4}.get(quantization, 0)
    weights = random_weights(config, seed=3)
    return TransformerModel(
        config, weights, dtype=getattr(torch, dtype), deterministic=is_deterministic, num_bits=num_bits
    )


class HookedRunner(ModelRunner):
    """Calls ``before_step(plan)`` on the engine's thread before it runs a step; if that raises, so does the step."""

    before_step: Callable[[ForwardPlan], None] = staticmethod(lambda plan: None)

    def run(self, plan: ForwardPlan) -> StepTokens:
        """Run the step."""
        self.before_step(plan)
        return super().run(plan)

    def launch(self, plan: ForwardPlan) -> Callable[[], StepTokens]:
        """Start the step."""
        self.before_step(plan)
        return super().launch(plan)


def make_engine(
    *,
    shape: str = "narrow",
    model: TransformerModel | None = None,
    metrics_class: type[EngineMetrics] = EngineMetrics,
    on_lost: Callable[[Any], None] = lambda error: None,
    before_step: Callable[[ForwardPlan], None] = lambda plan: None,
    after_deltas: Callable[[], None] = lambda: None,
    clock_ns: Callable[[], int] = time.monotonic_ns,
    speculator: Speculator | None = None,
    proposer: DeviceProposer | None = None,
    grammars: GrammarCompiler | None = None,
    block_key: bytes = b"",
    **config: Any,
) -> Engine:
    """An engine that has not been started, of a random model of ``shape`` or of ``model``.

    ``config``: fields of ``EngineConfig``; deterministic unless they say otherwise.
    """
    config = {"deterministic": True, "num_blocks": 256, "block_size": 16} | config
    model_config = SHAPES[shape] if model is None else model.config
    resolved = EngineConfig(**config).resolved(model_config)
    own = _model(shape, resolved.dtype, resolved.deterministic, resolved.quantization)
    runner = HookedRunner(model or own, resolved, proposer=proposer)
    runner.before_step = before_step
    metrics = metrics_class(resolved, model_config)
    return Engine(
        runner,
        resolved,
        model_config=model_config,
        metrics=metrics,
        after_deltas=after_deltas,
        on_lost=on_lost,
        clock_ns=clock_ns,
        speculator=speculator,
        grammars=grammars,
        block_key=block_key,
        lora=(model or own).lora,
    )


class Answer:
    """A request and what came for it.

    Attributes:
        tokens: New tokens of each choice.
        logprobs: Of each choice; empty where the request did not ask.
        reasons: Finish reason of each choice, ``""`` until it has one.
    """

    def __init__(
        self, prompt: Sequence[int], *, on_delta: Callable[[Delta], None] | None = None, **options: Any
    ) -> None:
        names = EngineRequest.__dataclass_fields__.keys()
        own = {name: options.pop(name) for name in list(options) if name in names}
        params = SamplingParams(**({"temperature": 0.0} | options))
        self.request = EngineRequest(np.array(prompt, np.int32), params, self._take, **own)
        self.tokens: list[list[int]] = [[] for _ in range(params.n)]
        self.logprobs: list[list[TokenLogprobs]] = [[] for _ in range(params.n)]
        self.reasons = [""] * params.n
        self.error: Exception | None = None
        self.deltas: list[Delta] = []
        self._on_delta = on_delta
        self._ended = threading.Event()

    @property
    def text(self) -> list[int]:
        """New tokens of the only choice."""
        (tokens,) = self.tokens
        return tokens

    @property
    def is_ended(self) -> bool:
        """Whether its last delta has come."""
        return self._ended.is_set()

    def wait(self) -> "Answer":
        """This answer, once its last delta has come. Raises AssertionError if none comes."""
        if not self._ended.wait(_TIMEOUT_S):
            raise AssertionError(f"no last delta in {_TIMEOUT_S} s, {len(self.deltas)} deltas")
        return self

    def _take(self, delta: Delta) -> None:
        self.deltas.append(delta)
        if delta.error is not None:
            self.error = delta.error
        else:
            self.tokens[delta.choice] += delta.token_ids
            self.logprobs[delta.choice] += delta.logprobs or []
            self.reasons[delta.choice] = delta.finish_reason
        if delta.is_last:
            self._ended.set()
        if self._on_delta is not None:
            self._on_delta(delta)


def serve(answers: Sequence[Answer], **options: Any) -> Engine:
    """The engine, stopped, from which all answers have come without an error; it got them before its first step."""
    engine = make_engine(**options)
    answer_all(engine, answers)
    errors = [answer.error for answer in answers if answer.error is not None]
    assert [] == errors
    return engine


def submit(engine: Engine, answers: Sequence[Answer]) -> None:
    """Submit the requests in their order."""
    for answer in answers:
        engine.submit(answer.request)


def answer_all(engine: Engine, answers: Sequence[Answer]) -> None:
    """Submit the requests, start the engine and ``finish`` it."""
    submit(engine, answers)
    finish(engine, answers)


def finish(engine: Engine, answers: Sequence[Answer]) -> None:
    """The engine is started, has answered every one, has stopped, and owns no block any more."""
    engine.start()
    try:
        for answer in answers:
            answer.wait()
    finally:
        assert engine.stop(grace_s=5.0)
    assert_clean(engine)


def answer_in_turn(engine: Engine, rounds: Sequence[Sequence[Answer]]) -> None:
    """Each round is submitted when the one before has been answered; then the engine is stopped."""
    engine.start()
    try:
        for answers in rounds:
            submit(engine, answers)
            for answer in answers:
                answer.wait()
    finally:
        assert engine.stop(grace_s=5.0)
    assert_clean(engine)


def preempt(answers: Sequence[Answer], *, num_blocks: int = 7, **options: Any) -> Engine:
    """The engine that answered them after it had learned to expect short answers, and so preempted some of them.

    Seven blocks of 16 tokens are 1.2 times one sequence of 96 tokens, and the null block.
    """
    first = Answer([1], max_tokens=1, on_delta=lambda delta: submit(engine, answers))
    engine = make_engine(**{"num_blocks": num_blocks, "watermark": 0.0, "max_num_seqs": 3} | options)
    engine.submit(first.request)
    finish(engine, [first, *answers])
    assert engine.num_preemptions > 0
    return engine


def assert_clean(engine: Engine) -> None:
    """No block of the stopped engine has an owner, and its pool is consistent."""
    engine.pool.check()
    assert engine.pool.num_used == 0


def assert_equal(expected: Sequence[Answer], actual: Sequence[Answer]) -> None:
    """Tokens, finish reasons and log probabilities are bitwise equal."""
    for one, other in zip(expected, actual, strict=True):
        assert one.tokens == other.tokens
        assert one.reasons == other.reasons
        assert one.logprobs == other.logprobs


_alone: dict[str, Answer] = {}


def alone(prompt: Sequence[int], options: dict[str, Any] | None = None, **params: Any) -> Answer:
    """What an engine with nothing else to do answers, deterministic, without prefix cache and with whole prompts.

    The same question is answered once.
    """
    key = repr((list(prompt), options, sorted(params.items())))
    if key not in _alone:
        answer = Answer(prompt, **params)
        serve([answer], enable_prefix_caching=False, max_num_batched_tokens=256, max_num_seqs=1, **options or {})
        _alone[key] = answer
    return _alone[key]


def assert_as_alone(answers: Sequence[Answer], **options: Any) -> None:
    """Each choice has bitwise the tokens and log probabilities of a request of its own, ``alone``."""
    for answer in answers:
        params = {name: getattr(answer.request.params, name) for name in SamplingParams.__slots__}
        for choice, (tokens, logprobs) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
            seed = None if params["seed"] is None else params["seed"] + choice
            own = alone(answer.request.prompt_ids.tolist(), options, **params | {"n": 1, "seed": seed})
            assert own.text == tokens
            assert own.logprobs == [logprobs]


def random_prompts(count: int, least: int, most: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens and of random lengths from ``least`` to ``most``."""
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB_SIZE, random.integers(least, most + 1)).tolist() for _ in range(count)]


def logits_of_text(config: TransformerConfig, weights: dict[str, Any], token_ids: torch.Tensor) -> torch.Tensor:
    """Logits of every position of a text, ``[T, V]``, which one block of the cache holds; deterministic."""
    model = TransformerModel(config, weights, deterministic=True)
    count, block_size = len(token_ids), 32
    hidden = model.forward(
        token_ids,
        torch.arange(count, dtype=torch.int32),
        model.new_kv(2, block_size),
        torch.tensor([[1]], dtype=torch.int32),
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([count], dtype=torch.int32),
        block_size + torch.arange(count),
        count,
        count,
    )
    return model.logits(hidden)
