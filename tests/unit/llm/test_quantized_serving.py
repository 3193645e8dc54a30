"""Engines of quantised folders: they answer, and a sequence's tokens do not depend on the others of a step."""

from pathlib import Path

import gguf
import pytest
import torch
from tests.unit.llm.engine_fixture import Answer, answer_all
from tests.unit.llm.quantized_folders import FORMATS, save_folder
from tests.unit.llm.test_gguf import write_gguf

from weft.backends.llm.loading import load_engine
from weft.backends.llm.settings import Settings
from weft.llm.config import EngineConfig

torch.set_num_threads(1)

_KINDS = ("gptq act-order", "awq", "nf4", "bitsandbytes 8 bits", "fp8", "compressed int8", "mixed gguf")


def _save(folder: Path, kind: str) -> None:
    if kind == "mixed gguf":
        types = {"v_proj": gguf.GGMLQuantizationType.Q6_K, "down_proj": gguf.GGMLQuantizationType.Q8_0}
        write_gguf(folder, lambda name: types.get(name.split(".")[-2], gguf.GGMLQuantizationType.Q4_K))
    else:
        save_folder(folder, *FORMATS[kind])


def _serve(folder: Path, answers: list[Answer], **settings: int) -> None:
    config = EngineConfig(deterministic=True, dtype="float32", num_blocks=64, **settings)  # type: ignore[arg-type]
    engine = load_engine(
        folder, Settings(config, 1 << 20, has_weights=True), after_deltas=lambda: None, on_lost=lambda error: None
    )
    answer_all(engine, answers)
    assert [] == [answer.error for answer in answers if answer.error is not None]


@pytest.mark.parametrize("kind", _KINDS)
def test_tokens_are_those_of_the_sequence_alone(tmp_path: Path, kind: str) -> None:
    """Deterministic, a sequence has bitwise the same log probabilities alone, beside others and in chunks."""
    _save(tmp_path, kind)
    prompts = [[(first * 7 + step * step) % 48 for step in range(3 + 5 * first)] for first in range(5)]
    together = [Answer(prompt, max_tokens=6, logprobs=2) for prompt in prompts]
    _serve(tmp_path, together)
    alone = Answer(prompts[4], max_tokens=6, logprobs=2)
    _serve(tmp_path, [alone], max_num_batched_tokens=8, max_num_seqs=1)
    assert together[4].tokens == alone.tokens
    assert together[4].logprobs == alone.logprobs
    assert 6 == len(alone.text)
