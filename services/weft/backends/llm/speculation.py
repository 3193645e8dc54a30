"""Speculation of a loaded engine: its proposer, and the measured cost of further rows in a step."""

import logging
import time

import numpy as np

from weft.llm.config import EngineConfig
from weft.llm.runner import ModelRunner
from weft.llm.scheduler.acceptance import UNKNOWN_TOKEN
from weft.llm.scheduler.plan import PARAM_COLUMNS, ForwardPlan
from weft.llm.speculation.depth import AdaptiveDepth, CostCurve
from weft.llm.speculation.lookahead import LookaheadProposer
from weft.llm.speculation.ngram import NgramProposer
from weft.llm.speculation.proposer import ProposerFactory
from weft.llm.speculation.speculator import NONE, Speculator

_log = logging.getLogger("weft.model.llm")

#: Proposers on the host; all others are the runner's.
HOST_PROPOSERS: dict[str, ProposerFactory] = {"ngram": NgramProposer, "lookahead": LookaheadProposer}

#: Rows of a step whose time is measured, as far as the step and the time limit allow.
_NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
#: Steps per point, of which the fastest counts: at least, at most, and the time that is enough.
_MIN_RUNS, _MAX_RUNS = 3, 20
_RUNS_S = 0.05
_MAX_S = 1.5


def make_speculator(config: EngineConfig, runner: ModelRunner) -> Speculator | None:
    """The speculator that ``config`` asks for; None: there is none.

    Measures the times of steps first, for at most a few seconds, with the threads that the engine will use.
    """
    if config.speculation == NONE:
        return None
    runner.bind_thread()
    factory = HOST_PROPOSERS.get(config.speculation)
    num_drafts = 0 if factory else config.num_speculative_tokens
    costs = [
        measured_cost(config, runner, num_drafts=num_drafts, temperature=temperature) for temperature in (0.0, 1.0)
    ]
    return Speculator(config.speculation, AdaptiveDepth(config.num_speculative_tokens, *costs), factory)


def measured_cost(config: EngineConfig, runner: ModelRunner, *, num_drafts: int, temperature: float = 0.0) -> CostCurve:
    """Time of steps by rows, of short sequences.

    Args:
        config: Resolved.
        runner: Not in use yet. Its cache is not changed but for the null block.
        num_drafts: Drafts to time a proposer on the device with; 0: there is none.
        temperature: Of all sequences; above 0 a row costs more.
    """
    points: list[tuple[int, float]] = []
    end_s = time.perf_counter() + _MAX_S
    for num_rows in _NUM_ROWS:
        if num_rows > config.max_num_batched_tokens or (len(points) > 1 and time.perf_counter() > end_s):
            break
        num_seqs = min(-(-num_rows // (1 + config.num_speculative_tokens)), config.max_num_seqs)
        points.append((num_rows, _fastest_s(config, runner, _plan(num_seqs, num_rows, 0, temperature))))
    draft_s = 0.0
    if num_drafts:
        known, unknown = (_plan(1, 1 + num_drafts, drafts, temperature) for drafts in (0, num_drafts))
        added_s = _fastest_s(config, runner, unknown) - _fastest_s(config, runner, known)
        draft_s = max(added_s, 0.0) / num_drafts
    _log.info(
        "milliseconds of a step at temperature %g by rows: %s; of a draft: %.3f",
        temperature,
        ", ".join(f"{num_rows}: {1e3 * seconds:.2f}" for num_rows, seconds in points),
        1e3 * draft_s,
    )
    return CostCurve(points, draft_s)


def _fastest_s(config: EngineConfig, runner: ModelRunner, plan: ForwardPlan) -> float:
    # On a shared machine, time of the thread varies less than time of the clock; it has to be the only one that works.
    clock_s = time.thread_time if config.device == "cpu" and config.num_threads == 1 else time.perf_counter
    times_s: list[float] = []
    while len(times_s) <= _MIN_RUNS or (len(times_s) < _MAX_RUNS and sum(times_s) < _RUNS_S):
        start_s = clock_s()
        runner.run(plan._replace(token_ids=plan.token_ids.copy()))  # a proposer fills in unknown ones
        times_s.append(clock_s() - start_s)
    return min(times_s[1:])  # the first may compile or allocate


def _plan(num_seqs: int, num_rows: int, num_drafts: int, temperature: float = 0.0) -> ForwardPlan:
    """A step of ``num_seqs`` sequences at their beginning, with tokens 0, that samples at each row.

    Keys and values go to the null block, so no cache is changed.
    """
    q_start = np.linspace(0, num_rows, num_seqs + 1).astype(np.int32)
    lens = np.diff(q_start)
    positions = (np.arange(num_rows) - np.repeat(q_start[:-1], lens)).astype(np.int32)
    slots = np.arange(num_seqs, dtype=np.int32)
    token_ids = np.zeros(num_rows, np.int32)
    if num_drafts:
        token_ids[-num_drafts:] = UNKNOWN_TOKEN
    none = np.empty(0, np.int32)
    neutral = dict.fromkeys(PARAM_COLUMNS, 0.0) | {"temperature": temperature, "top_p": 1.0, "repetition_penalty": 1.0}
    return ForwardPlan(
        slots=slots,
        q_start=q_start,
        ctx_len=lens,
        num_drafts=np.full(num_seqs, num_drafts, np.int32),
        positions=positions,
        token_ids=token_ids,
        slot_mapping=np.zeros(num_rows, np.int64),
        sample_rows=np.arange(num_rows, dtype=np.int32),
        sample_slots=np.repeat(slots, lens),
        sample_positions=positions + 1,
        num_logprobs=np.full(num_rows, -1, np.int32),
        table_delta=none.reshape(0, 3),
        copies=none.reshape(0, 2),
        new_slots=slots,
        new_params=np.tile(np.array([neutral[name] for name in PARAM_COLUMNS], np.float32), (num_seqs, 1)),
        new_top_k=np.zeros(num_seqs, np.int32),
        new_seeds=np.zeros(num_seqs, np.int64),
        penalty_start=np.zeros(num_rows + 1, np.int32),
        penalty_tokens=none,
        penalty_counts=none,
        penalty_bias=np.empty(0, np.float32),
        max_q_len=int(lens.max()),
        max_ctx_len=int(lens.max()),
    )
