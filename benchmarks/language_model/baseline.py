"""The same work in ``transformers``: ``generate`` in static batches, and its own continuous batching."""

import logging
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.language_model.shapes import Model, hugging_face_config
from benchmarks.language_model.workloads import Job

_PAGE_SIZE = 16


class Baseline(NamedTuple):
    """What one run gave.

    Attributes:
        token_ids: New tokens of each job that were wanted.
        duration_s: Wall time.
    """

    token_ids: list[list[int]]
    duration_s: float


def make_transformers(model: Model) -> Any:
    """``LlamaForCausalLM`` with the weights of ``model``."""
    import transformers  # noqa: PLC0415  # takes seconds

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    fields = {name: value for name, value in hugging_face_config(model.shape).items() if name != "architectures"}
    config = transformers.LlamaConfig(**fields, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    theirs = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    state = {}
    for name, parts in model.config.weight_parts().items():
        rows = model.weights[name].split([part.shape[0] for part in parts])
        state.update({part.name: tensor for part, tensor in zip(parts, rows, strict=True)})
    theirs.load_state_dict(state)
    return theirs.eval()


def run_static(theirs: Any, jobs: Sequence[Job], batch_size: int) -> Baseline:
    """Greedy ``generate`` over batches in the order of the jobs, padded on the left, each to its longest answer."""
    token_ids: list[list[int]] = []
    start_s = time.perf_counter()
    for first in range(0, len(jobs), batch_size):
        batch = jobs[first : first + batch_size]
        width = max(len(job.prompt) for job in batch)
        prompts = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(prompts)
        for row, job in enumerate(batch):
            prompts[row, width - len(job.prompt) :] = torch.from_numpy(job.prompt)
            mask[row, width - len(job.prompt) :] = 1
        num_tokens = max(job.num_tokens for job in batch)
        with torch.inference_mode():
            texts = theirs.generate(prompts, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens)
        answers = texts[:, width:].tolist()
        token_ids += [answer[: job.num_tokens] for answer, job in zip(answers, batch, strict=True)]
    return Baseline(token_ids, time.perf_counter() - start_s)


def run_continuous(theirs: Any, jobs: Sequence[Job], num_slots: int, num_step_tokens: int) -> Baseline:
    """Greedy continuous batching of ``transformers`` with as many slots and tokens in a step as the engine has.

    Raises:
        RuntimeError: It does not run here, or lost a request; the message says why.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: PLC0415  # takes seconds

    num_pages = num_slots * (max(len(job.prompt) + job.num_tokens for job in jobs) // _PAGE_SIZE + 2)
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
    config = ContinuousBatchingConfig(
        page_size=_PAGE_SIZE,
        num_blocks=num_pages,
        max_batch_tokens=num_step_tokens,
        max_requests_per_batch=num_slots,
        allow_block_sharing=False,
    )
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        manager = theirs.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
        start_s = time.perf_counter()
        numbers = {
            manager.add_request(job.prompt.tolist(), max_new_tokens=job.num_tokens): number
            for number, job in enumerate(jobs)
        }
        manager.start()
        answers: dict[int, list[int]] = {}
        try:
            while len(answers) < len(jobs):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("its thread ended before all requests did")
                if result is not None and result.is_finished():
                    if result.error:
                        raise RuntimeError(str(result.error))
                    answers[numbers[result.request_id]] = list(result.generated_tokens)
            duration_s = time.perf_counter() - start_s
        finally:
            manager.stop(block=True, timeout=5)
    return Baseline([answers[number] for number in range(len(jobs))], duration_s)
