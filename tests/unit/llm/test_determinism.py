"""Seeded sampling: what a request gets depends on its own prompt, parameters and seed alone."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.unit.llm.engine_fixture import (
    SHAPES,
    Answer,
    answer_all,
    assert_equal,
    make_engine,
    random_prompts,
    serve,
)
from tests.unit.llm.fake_runner import is_shared
from tests.unit.llm.speculation.proposers import Oracle

from weft.llm.models.model import TransformerModel
from weft.llm.models.weights import random_weights
from weft_kernels import jit
from weft_kernels.linear import onednn, products

_NEEDLE = random_prompts(1, 33, 33, seed=7)[0]
_SAMPLED = {"temperature": 1.0, "seed": 12345, "max_tokens": 12, "logprobs": 5}


def _others(count: int, seed: int) -> list[Answer]:
    """Requests with all kinds of parameters, some seeded, most not."""
    random = np.random.default_rng(seed)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 7, "seed": 12345},
        {"temperature": 0.7, "top_p": 0.8, "logprobs": 1},
        {"min_p": 0.05, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
        {"logit_bias": ((3, 50.0), (5, -100.0)), "presence_penalty": -1.0, "n": 2},
    ]
    prompts = random_prompts(count, 1, 50, seed=seed + 1)
    return [
        Answer(prompt, max_tokens=int(random.integers(1, 20)), **({"temperature": 1.0} | kinds[random.integers(5)]))  # type: ignore[operator]
        for prompt in prompts
    ]


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("float32", "int4")],
)
def test_a_needle_among_64_others_is_as_alone(dtype: str, quantization: str):
    """Sampled at temperature 1 at a random place among 64 others, tokens and log probabilities are bitwise the same."""
    expected = Answer(_NEEDLE, **_SAMPLED)  # type: ignore[arg-type]
    serve([expected], dtype=dtype, quantization=quantization, max_num_seqs=1)
    for seed in range(3):
        others, needle = _others(64, seed), Answer(_NEEDLE, **_SAMPLED)  # type: ignore[arg-type]
        others.insert(int(np.random.default_rng(seed).integers(65)), needle)
        options = {"max_num_seqs": 65, "max_num_batched_tokens": 200, "num_blocks": 1024}
        serve(others, dtype=dtype, quantization=quantization, **options)
        assert_equal([expected], [needle])


@pytest.mark.parametrize(("dtype", "deterministic"), [("float32", True), ("bfloat16", True), ("float32", False)])
def test_neighbours_are_felt_only_without_deterministic_mode(
    dtype: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
):
    """The test above could fail: with the mode off, log probabilities depend on the number of rows in a step.

    So they do where BLAS multiplies float32; the sums of compiled kernels depend on the row alone, in any mode.
    """
    monkeypatch.setattr(jit, "is_available", lambda: False)
    monkeypatch.setattr(onednn, "is_native", lambda dtype: False)
    weights = random_weights(SHAPES["wide"], seed=3)
    model = TransformerModel(SHAPES["wide"], weights, dtype=getattr(torch, dtype), deterministic=deterministic)
    logprobs = []
    for num_others in (0, 63):
        needle = Answer(_NEEDLE, **_SAMPLED)  # type: ignore[arg-type]
        answers = [*(Answer(prompt, max_tokens=12) for prompt in random_prompts(num_others, 1, 2)), needle]
        options = {"dtype": dtype, "deterministic": deterministic, "max_num_batched_tokens": 256}
        serve(answers, shape="wide", model=model, **options)
        logprobs.append(needle.logprobs)
    assert deterministic == (logprobs[0] == logprobs[1])


@pytest.mark.parametrize(
    ("dtype", "quantization", "needed"),
    [
        ("float32", "none", torch.float32),
        ("bfloat16", "none", torch.bfloat16),
        ("bfloat16", "int8", torch.int8),
        ("bfloat16", "int4", torch.int8),
    ],
)
def test_compiled_products_need_no_mode(
    dtype: str, quantization: str, needed: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """By default, where all products are kernels of this project, answers are bitwise those of each alone.

    So they are with drafts, with a KV cache of codes, and where sampled.
    """
    if not (products.has_panels(getattr(torch, dtype)) and products.has_panels(needed)):
        pytest.skip("this CPU lacks the instructions, or numba is not installed")
    monkeypatch.setattr(products, "_are_panels_faster", lambda dtype, shape: True)
    config = replace(SHAPES["wide"], intermediate_size=320)
    num_bits = {"none": 0, "int8": 8, "int4": 4}[quantization]
    model = TransformerModel(config, random_weights(config, seed=3), dtype=getattr(torch, dtype), num_bits=num_bits)
    options = {"model": model, "deterministic": False, "dtype": dtype, "kv_cache_dtype": "int8"}

    def answers() -> list[Answer]:
        prompts = random_prompts(6, 5, 60, seed=1)
        return [
            Answer(prompt, max_tokens=20, logprobs=1, temperature=index % 2, seed=3)
            for index, prompt in enumerate(prompts)
        ]

    expected, together, drafted = answers(), answers(), answers()
    for answer in expected:
        serve([answer], enable_prefix_caching=False, max_num_seqs=1, **options)
    serve(together, **options)
    speculator = Oracle(expected, 0.2).speculator(4)
    serve(drafted, speculation="ngram", speculator=speculator, **options)
    assert 0 < speculator.num_accepted < speculator.num_drafts
    assert_equal(expected, together)
    assert_equal(expected, drafted)


def test_requests_without_a_seed_differ():
    """Two requests that name no seed draw different tokens; with the same seed they draw the same."""
    unseeded = [Answer(_NEEDLE, temperature=1.0, max_tokens=20) for _ in range(2)]
    seeded = [Answer(_NEEDLE, temperature=1.0, max_tokens=20, seed=-(2**63)) for _ in range(2)]
    serve([*unseeded, *seeded])
    assert unseeded[0].text != unseeded[1].text
    assert seeded[0].text == seeded[1].text


_ON_KERNELS = """
from tests.unit.llm.test_determinism import texts_of_both_caches
print(texts_of_both_caches())
"""


def texts_of_both_caches() -> list[list[int]]:
    """Tokens of a greedy and of a sampled request with a cache of numbers and with one of codes."""
    texts = []
    for kv_cache_dtype in ("auto", "int8"):
        sampled = Answer([8] * 18, max_tokens=3, temperature=1.0, seed=4, top_k=20)
        answers = [Answer([5, 9, 11, 3, 70], max_tokens=3), sampled]
        options = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "kv_cache_dtype": kv_cache_dtype}
        serve(answers, deterministic=False, **options)
        texts += [answer.text for answer in answers]
    return texts


def test_the_engine_says_the_same_on_the_kernels():
    """On the kernels, run by the Triton language's interpreter, tokens are those of the references."""
    environment = os.environ | {"WEFT_KERNELS": "triton", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", _ON_KERNELS]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (f"{texts_of_both_caches()}\n", "") == (run.stdout, run.stderr)


def test_requests_without_a_seed_differ_between_engines():
    """Two engines without `seed` answer one prompt differently; with `seed: 5` they answer it alike."""

    def texts(**config: object) -> list[list[int]]:
        answers = [Answer(_NEEDLE, max_tokens=12, temperature=1.0) for _ in range(4)]
        serve(answers, **config)
        return [answer.tokens[0] for answer in answers]

    assert texts() != texts()
    assert texts(seed=5) == texts(seed=5)


def test_no_step_writes_to_a_shared_block():
    """Of the blocks that a step writes, each belongs to one sequence and is in no cache."""
    shared: list[int] = []
    engines = []

    def find_shared(plan) -> None:
        written = set((plan.slot_mapping // 16).tolist())
        shared.extend(block for block in written if is_shared(engines[0].pool, block))

    answers = [Answer(_NEEDLE, n=5, temperature=1.0, max_tokens=40), Answer(_NEEDLE, n=3, temperature=0.8)]
    answers += [Answer(prompt, n=2, temperature=1.0, max_tokens=20) for prompt in random_prompts(5, 1, 60)]
    engines.append(make_engine(num_blocks=30, max_num_seqs=8, before_step=find_shared))
    answer_all(engines[0], answers)
    assert [] == shared
