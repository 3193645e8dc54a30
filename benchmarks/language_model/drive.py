"""Gives jobs to an engine in this process, and records when each token came."""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from benchmarks.language_model.shapes import Model
from benchmarks.language_model.workloads import Job
from weft.base.errors import WeftError
from weft.llm.config import EngineConfig, TransformerConfig
from weft.llm.device_state import DeviceProposer
from weft.llm.engine import Engine
from weft.llm.engine_core import Runner
from weft.llm.metrics import EngineMetrics
from weft.llm.request import Delta, EngineRequest, SamplingParams
from weft.llm.runner import ModelRunner
from weft.llm.speculation.speculator import Speculator

#: No run of a benchmark takes longer.
_TIMEOUT_S = 300.0


@dataclass(slots=True, eq=False)
class Answer:
    """What one job got.

    Attributes:
        job: The job.
        request: What the engine was given.
        start_ns: When it came: its arrival in an open loop, else when it was submitted, or the engine started if later.
        token_ids: New tokens.
        token_ns: When each of them came.
    """

    job: Job
    request: EngineRequest
    start_ns: int = 0
    token_ids: list[int] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return (self.token_ns[0] - self.start_ns) / 1e9

    @property
    def tpot_s(self) -> float:
        """Mean time of each token after the first; 0 without a second."""
        return (self.token_ns[-1] - self.token_ns[0]) / 1e9 / max(len(self.token_ns) - 1, 1)


@dataclass(frozen=True, slots=True)
class Run:
    """What all jobs got together.

    Attributes:
        answers: In the order of the jobs.
        duration_s: From the start to the last token, wall time.
        cpu_s: CPU time of the process meanwhile, all threads.
        thread_s: CPU time of the engine's thread alone, until the last job ended.
        num_steps: Steps of the engine.
        num_preemptions: Seats lost.
        hit_rate: Share of prompt tokens that the prefix cache had.
    """

    answers: list[Answer]
    duration_s: float
    cpu_s: float
    thread_s: float
    num_steps: int
    num_preemptions: int
    hit_rate: float

    @property
    def num_tokens(self) -> int:
        """New tokens that were wanted."""
        return sum(min(len(answer.token_ids), answer.job.num_tokens) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Of these, in a second."""
        return self.num_tokens / self.duration_s

    def ttft_ms(self, percent: float, level: int | None = None) -> float:
        """A percentile of the time to the first token, of all jobs or of those of a level."""
        chosen = [a.ttft_s for a in self.answers if level is None or a.job.level == level]
        return float(np.percentile(chosen, percent)) * 1e3

    def tpot_ms(self, percent: float) -> float:
        """A percentile of the mean time of each further token."""
        return float(np.percentile([a.tpot_s for a in self.answers if len(a.token_ns) > 1], percent)) * 1e3


class _Watched(EngineMetrics):
    """Metrics of an engine whose driver is told of every request that ends, also of cancelled ones."""

    def __init__(
        self, config: EngineConfig, model_config: TransformerConfig, on_end: Callable[[EngineRequest, str, int], None]
    ) -> None:
        super().__init__(config, model_config)
        self._on_end = on_end

    def record_end(self, request: EngineRequest, outcome: str, now_ns: int) -> None:
        """See ``EngineMetrics``."""
        super().record_end(request, outcome, now_ns)
        self._on_end(request, outcome, now_ns)


class Driver:
    """An engine of its own, for one run.

    Args:
        model: What it runs.
        config: Of the engine.
        on_end: Called on the engine's thread with every request that has ended and owns nothing any more, its outcome
            and the time.
        wrap: Gets the engine's runner and gives the one to be used.
        temperature: Of all answers; each draws with the seed 0.
        speculator: As of ``Engine``.
        proposer: As of ``ModelRunner``.

    Attributes:
        engine: Works within ``measured``.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        on_end: Callable[[EngineRequest, str, int], None] = lambda request, outcome, now_ns: None,
        wrap: Callable[[Runner], Runner] = lambda runner: runner,
        temperature: float = 0.0,
        speculator: Speculator | None = None,
        proposer: DeviceProposer | None = None,
    ) -> None:
        metrics = _Watched(config, model.config, self._ended)
        runner = wrap(ModelRunner(model.network, config, proposer=proposer))
        self.engine = Engine(runner, config, model_config=model.config, metrics=metrics, speculator=speculator)
        self._temperature = temperature
        self._on_end = on_end
        self._num_left = 0
        self._thread_s = 0.0
        self._error: WeftError | None = None
        self._is_done = threading.Event()

    def submit(self, job: Job, *, on_delta: Callable[[Answer], None] | None = None, num_tokens: int = 0) -> Answer:
        """The job waits for its turn.

        Args:
            job: The job.
            on_delta: Called on the engine's thread after every delta.
            num_tokens: Of the answer, instead of the job's.
        """

        def sink(delta: Delta) -> None:
            now_ns = time.monotonic_ns()
            if delta.error is not None:
                self._error = delta.error
                self._is_done.set()
            answer.token_ids += delta.token_ids
            answer.token_ns += [now_ns] * len(delta.token_ids)
            if on_delta is not None:
                on_delta(answer)

        params = SamplingParams(
            temperature=self._temperature, max_tokens=num_tokens or job.num_tokens, ignore_eos=True, seed=0
        )
        answer = Answer(job, EngineRequest(job.prompt, params, sink, level=job.level))
        answer.start_ns = time.monotonic_ns()
        self.engine.submit(answer.request)
        return answer

    @contextmanager
    def measured(self, answers: Sequence[Answer], num_jobs: int) -> Iterator[list[Run]]:
        """The engine works for the length of the block, and until as many jobs have ended.

        Args:
            answers: All of them, once the block is left.
            num_jobs: How many there will have been.

        Yields:
            A list that has the one ``Run`` once the block is left.

        Raises:
            TimeoutError: The jobs did not end within minutes.
            WeftError: One of them failed.
        """
        runs: list[Run] = []
        self._num_left = num_jobs
        gc.collect()
        start_ns = time.monotonic_ns()
        for answer in answers:
            answer.start_ns = start_ns  # what came before the engine started is none of its time
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        self.engine.start()
        try:
            yield runs
            if not self._is_done.wait(_TIMEOUT_S):
                raise TimeoutError(f"{self._num_left} of {num_jobs} requests did not end within {_TIMEOUT_S:.0f} s")
            if self._error is not None:
                raise self._error
            duration_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        finally:
            self.engine.stop(0.0)
        metrics = self.engine.metrics
        runs.append(
            Run(
                list(answers),
                duration_s,
                cpu_s,
                self._thread_s,
                metrics.num_steps,
                self.engine.num_preemptions,
                metrics.hit_rate,
            )
        )

    def _ended(self, request: EngineRequest, outcome: str, now_ns: int) -> None:
        self._on_end(request, outcome, now_ns)
        self._num_left -= 1
        if not self._num_left:
            self._thread_s = time.thread_time()
            self._is_done.set()


def run_burst(driver: Driver, jobs: Sequence[Job]) -> Run:
    """All jobs wait when the engine starts."""
    answers = [driver.submit(job) for job in jobs]
    with driver.measured(answers, len(jobs)) as runs:
        pass
    return runs[0]


def run_waves(driver: Driver, jobs: Sequence[Job], size: int, *, is_padded: bool = False) -> Run:
    """``size`` jobs at a time, in their order: the next ones come when all of these have ended.

    Args:
        driver: Of an engine that was not started.
        jobs: The jobs.
        size: Of a wave; 1: one after the other.
        is_padded: Jobs that have ended go on until the longest of their wave has; those tokens are not wanted.
    """
    waves = iter([jobs[first : first + size] for first in range(0, len(jobs), size)])
    answers: list[Answer] = []
    num_left = 0

    def start_next() -> None:
        nonlocal num_left
        wave = next(waves, [])
        num_left = len(wave)
        num_tokens = max((job.num_tokens for job in wave), default=0) if is_padded else 0
        answers.extend([driver.submit(job, on_delta=count_ended, num_tokens=num_tokens) for job in wave])

    def count_ended(answer: Answer) -> None:  # on the engine's thread, as the submits of all waves but the first
        nonlocal num_left
        if len(answer.token_ids) == answer.request.params.max_tokens:
            num_left -= 1
            if not num_left:
                start_next()

    start_next()
    with driver.measured(answers, len(jobs)) as runs:
        pass
    return runs[0]


def run_arrivals(driver: Driver, jobs: Sequence[Job]) -> Run:
    """Each job comes at its time; what it waits counts from then, so a late submit flatters nobody."""
    answers: list[Answer] = []
    with driver.measured(answers, len(jobs)) as runs:
        start_ns = time.monotonic_ns()
        for job in jobs:
            at_ns = start_ns + round(job.at_s * 1e9)
            if (left_ns := at_ns - time.monotonic_ns()) > 0:
                time.sleep(left_ns / 1e9)
            answer = driver.submit(job)
            answer.start_ns = at_ns
            answers.append(answer)
    return runs[0]


def capacity_per_s(model: Model, config: EngineConfig, jobs: Sequence[Job]) -> float:
    """Jobs that the engine does in a second with all slots taken: by its tokens until the last job has its slot."""
    answers = run_burst(Driver(model, config), jobs).answers
    start_ns = min(answer.token_ns[0] for answer in answers)
    end_ns = max(answer.token_ns[0] for answer in answers)
    num_tokens = sum(start_ns < token_ns <= end_ns for answer in answers for token_ns in answer.token_ns)
    return num_tokens * 1e9 / (end_ns - start_ns) * len(jobs) / sum(job.num_tokens for job in jobs)
