"""Everything that an engine can be asked for, at once and at random: nothing but the time changes."""

import random
import threading
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from tests.unit.llm.engine_fixture import MODEL, VOCAB_SIZE, Answer, finish, make_engine
from tests.unit.llm.speculation import proposers
from tests.unit.llm.speculation.heads import random_head

from weft.base.errors import DeadlineExceededError, InternalError
from weft.llm.config import HEADS
from weft.llm.device_state import DeviceProposer
from weft.llm.engine import Engine
from weft.llm.models.model import TransformerModel
from weft.llm.models.weights import random_weights
from weft.llm.parallel.groups import ALONE
from weft.llm.request import Delta
from weft.llm.scheduler.plan import ForwardPlan
from weft.llm.speculation.draft_model import DraftModelProposer
from weft.llm.speculation.heads import HeadProposer
from weft.llm.speculation.ngram import NgramProposer
from weft.llm.speculation.speculator import FixedDepth, Speculator

_MAX_LEN, _WINDOW = 128, 24
_NUM_BITS = {"none": 0, "int8": 8, "int4": 4}


@cache
def _model(window: int, dtype: str, quantization: str) -> TransformerModel:
    config = replace(MODEL, sliding_window=window, intermediate_size=64)
    return TransformerModel(
        config,
        dict(random_weights(config, seed=3)),
        dtype=getattr(torch, dtype),
        deterministic=True,
        num_bits=_NUM_BITS[quantization],
    )


def _speculation(name: str, model: TransformerModel, num_drafts: int) -> dict[str, Any]:
    if name == "none":
        return {}
    if name == "ngram":
        return {"speculation": name, "speculator": Speculator(name, FixedDepth(num_drafts), NgramProposer)}
    kind = name if name in HEADS else "draft"
    proposer: DeviceProposer = DraftModelProposer(model if name == "self" else proposers.other(), max_num_tokens=20)
    if name in HEADS:
        proposer = HeadProposer(random_head(name, model), max_num_tokens=20)
    speculator = Speculator(kind, FixedDepth(num_drafts))
    folder = "" if kind == "mtp" else "of the test"
    return {"speculation": kind, "draft_model": folder, "speculator": speculator, "proposer": proposer}


def nothing(plan: ForwardPlan) -> None:
    """What a life does before a step, unless it is told otherwise."""


class Life:
    """Requests of an engine, and what happens to them, by a seed."""

    def __init__(self, seed: int) -> None:
        pick = random.Random(seed)
        self.pick = pick
        window = pick.choice((0, 0, _WINDOW))
        dtype, quantization = pick.choice(("float32", "float32", "bfloat16")), pick.choice(tuple(_NUM_BITS))
        self.plain: dict[str, Any] = {
            "model": _model(window, dtype, quantization),
            "dtype": dtype,
            "quantization": quantization,
            "kv_cache_dtype": pick.choice(("auto", "int8")),
            "max_model_len": _MAX_LEN,
        }
        block_size = pick.choice((4, 8, 16))
        name = pick.choice((*["none"] * 4, "ngram", "draft", "self", *HEADS))
        has_cache = pick.random() < 0.75
        self.options = self.plain | {
            "block_size": block_size,
            "num_blocks": 1 + _MAX_LEN // block_size + pick.randrange(2 + 48 // block_size),
            "max_num_seqs": pick.randint(1, 8),
            "max_num_batched_tokens": pick.choice((6, 17, 40, 128)),
            "enable_prefix_caching": has_cache,
            "kv_offload_bytes": pick.choice((0, 0, 1, 4, 30)) * has_cache * 512 * block_size,
            "watermark": pick.choice((0.0, 0.03)),
            "speculation": "none",
            "async_scheduling": "auto",
            **_speculation(name, self.plain["model"], pick.randint(1, 8)),
        }
        self.options["max_num_seqs"] = min(self.options["max_num_seqs"], self.options["max_num_batched_tokens"])
        if name in HEADS:  # which need states that the second tier does not keep
            self.options["kv_offload_bytes"] = 0
        if name == "none" and not window and pick.random() < 0.75:
            self.options |= {"async_scheduling": "true", "kv_offload_bytes": 0}
        base = [pick.randrange(VOCAB_SIZE) for _ in range(_MAX_LEN)]
        self.num_unknown = 0
        self.groups, self.before_step = ALONE, nothing
        self.requests = [self._request(base) for _ in range(pick.randint(3, 9))]
        self.num_resumed = [0] * len(self.requests)

    def __repr__(self) -> str:
        return repr({name: value for name, value in self.options.items() if name != "model"})

    def _request(self, base: list[int]) -> dict[str, Any]:
        pick = self.pick
        shared, own = pick.randrange(60), pick.randint(1, 30)
        prompt = base[:shared] + [pick.randrange(VOCAB_SIZE) for _ in range(own)]
        if pick.random() < 0.3:
            prompt = (prompt[:5] * 20)[: len(prompt)]
        params: dict[str, Any] = {"prompt": prompt, "max_tokens": pick.randint(1, 38), "seed": pick.randrange(100)}
        options: dict[str, Any] = {
            "temperature": pick.choice((0.0, 0.7, 1.5)),
            "n": pick.choice((1, 1, 2, 3)),
            "top_p": pick.choice((1.0, 0.8)),
            "top_k": pick.choice((0, 5)),
            "min_p": pick.choice((0.0, 0.05)),
            "repetition_penalty": pick.choice((1.0, 1.3)),
            "frequency_penalty": pick.choice((0.0, 0.5)),
            "presence_penalty": pick.choice((0.0, -0.5)),
            "logit_bias": [(pick.randrange(VOCAB_SIZE), 3.0)],
            "min_tokens": pick.randint(0, params["max_tokens"]),
            "stop_token_ids": [pick.randrange(VOCAB_SIZE) for _ in range(12)],
            "logprobs": pick.randrange(4),
        }
        share = pick.choice((0.15, 0.5))
        return params | {name: value for name, value in options.items() if pick.random() < share}

    def resume(self, expected: list[Answer]) -> None:
        """Some of the requests with one choice begin anew within their expected answers."""
        cut = random.Random(len(expected))
        for index, answer in enumerate(expected):
            if len(answer.tokens) == 1 and cut.random() < 0.3:
                self.num_resumed[index] = cut.randrange(len(answer.text))
                self.requests[index]["resume_token_ids"] = tuple(answer.text[: self.num_resumed[index]])

    def answers(self) -> list[Answer]:
        return [Answer(**request) for request in self.requests]

    def expected(self) -> list[Answer]:
        """Answers that a plain engine gives one by one."""
        self.plain["model"].groups = ALONE
        answers = self.answers()
        for answer in answers:
            engine = make_engine(
                **self.plain, enable_prefix_caching=False, max_num_batched_tokens=256, num_blocks=64, max_num_seqs=3
            )
            engine.submit(answer.request)
            finish(engine, [answer])
        return answers


def _run(life: Life) -> tuple[Engine, list[Answer]]:
    """Serve a life's requests with cancels, early finishes, deadlines and failed steps."""
    pick = life.pick
    answers = life.answers()
    steps, now_ns = count(), count(1)
    broken = {pick.randrange(60) for _ in range(pick.choice((0, 0, 1, 2)))}

    def break_some(plan: ForwardPlan) -> None:
        if life.options["speculation"] == "none":  # else they are a device's drafts
            life.num_unknown += int((plan.token_ids < 0).sum())
        if next(steps) in broken:
            raise RuntimeError("broken")
        life.before_step(plan)

    life.plain["model"].groups = life.groups
    engine = make_engine(before_step=break_some, clock_ns=lambda: next(now_ns), **life.options)
    waiting = answers[:]
    has_submitted_all = threading.Event()

    def submit(number: int) -> None:
        for answer in waiting[:number]:
            engine.submit(answer.request)
        del waiting[:number]
        if not waiting:
            has_submitted_all.set()

    plans: dict[int, str] = {}
    for index, answer in enumerate(answers):
        answer.request.level = pick.randrange(2)
        answer.request.salt = pick.choice((b"", b"", b"tenant"))
        plans[index] = pick.choice(("", "", "", "cancel", "finish", "deadline"))
        if plans[index] == "deadline":
            answer.request.deadline_ns = pick.randrange(20, 2000)
    for index, answer in enumerate(answers):
        after = pick.randrange(1, 10)

        def act(delta: Delta, answer: Answer = answer, plan: str = plans[index], after: int = after) -> None:
            is_due = len(answer.deltas) == after
            submit(len(answers) if is_due else 1)
            if is_due and plan == "cancel":
                engine.cancel(answer.request)
            elif is_due and plan == "finish":
                engine.finish(answer.request, answer.request.params.n - 1)

        answer._on_delta = act
    submit(pick.randint(1, len(waiting)))
    engine.start()
    try:
        assert has_submitted_all.wait(60.0)
    finally:
        assert engine.stop(grace_s=60.0)
    assert engine._end_error is not None
    for index, answer in enumerate(answers):
        assert answer.is_ended or plans[index] in ("cancel", "finish")
    return engine, answers


def check(life: Life) -> Counter[str]:
    """One life equals its plain answers; returns what happened in it."""
    expected = life.expected()
    life.resume(expected)
    engine, answers = _run(life)
    engine.pool.check()
    engine._core.scheduler.check()
    assert (0, 0, 0) == (engine.pool.num_used, engine.num_running, engine.num_waiting)
    for one, other, start in zip(expected, answers, life.num_resumed, strict=True):
        assert other.error is None or isinstance(other.error, DeadlineExceededError | InternalError), other.error
        for choice, (tokens, logprobs) in enumerate(zip(other.tokens, other.logprobs, strict=True)):
            whole = bool(other.reasons[choice])
            end = len(one.tokens[choice]) if whole else start + len(tokens)
            assert one.tokens[choice][start:end] == tokens, life
            assert one.logprobs[choice][start : start + len(logprobs)] == logprobs, life
            assert not whole or one.reasons[choice] == other.reasons[choice], life
    tier, speculator = engine.pool.tier, engine.speculator
    return Counter(
        {
            "whole answers": sum(all(answer.reasons) for answer in answers),
            "answers cut short": sum(not all(answer.reasons) for answer in answers),
            "preemptions": engine.num_preemptions,
            "loads": tier.num_loaded,
            "accepted drafts": speculator.num_accepted if speculator else 0,
            "rejected drafts": speculator.num_drafts - speculator.num_accepted if speculator else 0,
            "failed steps": engine.metrics.num_failed_steps,
            "cached tokens": sum(delta.num_cached_tokens for answer in answers for delta in answer.deltas),
            "unknown tokens": life.num_unknown,
            "resumed tokens": sum(life.num_resumed),
        }
    )


@pytest.mark.parametrize("first_seed", [8, pytest.param(16, marks=pytest.mark.long)])
def test_every_combination_answers_as_a_plain_engine(first_seed: int):
    """Tokens, log probabilities and finish reasons are bitwise those of each request alone, and nothing is owned after.

    What is cut short is the beginning of the same. Each of eight lives has other parameters, requests and mishaps.
    """
    events = sum((check(Life(seed)) for seed in range(first_seed, first_seed + 8)), Counter[str]())
    assert 10 == len(events), events
