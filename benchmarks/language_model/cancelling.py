"""C6: half of the requests are cancelled, whatever they are doing; how soon what they owned is free."""

import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue

import numpy as np

from benchmarks.language_model.drive import Answer, Driver
from benchmarks.language_model.figures import Figure, Target, figure
from benchmarks.language_model.shapes import Model
from benchmarks.language_model.sizes import Sizes
from benchmarks.language_model.workloads import Job, alike
from weft.llm.engine import Engine
from weft.llm.request import EngineRequest

_CASE = "C6"
_SHARE = 0.5
#: A prompt takes several steps, so that some are cancelled while it is computed.
_PROMPT_LEN, _NUM_TOKENS = 200, 24
#: Nothing comes to be cancelled for so long only if the engine is lost.
_PATIENCE_S = 60.0
_NOTE = (
    "Cancelled from another thread than the engine's: a third at a random time before or about its turn, a third when "
    "it has a slot, a third after a random token. Free means that the scheduler has let go of slot and blocks; until "
    "then the step under way has to end."
)


class Trial:
    """One run: jobs, of which some are cancelled.

    Attributes:
        delays_ms: From each cancel to when the request was free.
        delays_steps: Steps that ended between.
        phases: What the requests were doing when they were cancelled.
        num_late: Cancels that came when the request had been answered.
    """

    def __init__(self, model: Model, sizes: Sizes, seed: int) -> None:
        config = model.engine_config(max_num_seqs=sizes.num_slots, max_num_batched_tokens=sizes.num_step_tokens)
        self.driver = Driver(model, config, on_end=self._ended)
        self.delays_ms: list[float] = []
        self.delays_steps: list[int] = []
        self.phases: Counter[str] = Counter()
        self.num_late = 0
        self._jobs = alike(sizes.cancel_jobs, model.shape.vocab_size, _PROMPT_LEN, _NUM_TOKENS, seed)
        self._due: SimpleQueue[Answer | None] = SimpleQueue()
        self._ends: dict[EngineRequest, tuple[str, int, int]] = {}
        self._num_tokens = 0
        self._answers: list[Answer] = []
        self._after_own: dict[int, int] = {}  # job: tokens of its own
        self._after_all: list[tuple[int, int]] = []  # tokens of all jobs, job; the next one last
        self._with_slot: deque[int] = deque()  # jobs that go as soon as they have a slot, in the order of their turn
        self._draw(self._jobs, random.Random(seed))

    def run(self) -> None:
        """Run all jobs and cancel those that are to be."""
        self._answers += [
            self.driver.submit(job, on_delta=partial(self._token_came, number)) for number, job in enumerate(self._jobs)
        ]
        asked: dict[EngineRequest, tuple[int, int]] = {}
        engine = self.driver.engine
        with self.driver.measured(self._answers, len(self._jobs)):
            while (answer := self._due.get(timeout=_PATIENCE_S)) is not None:
                request = answer.request
                self.phases[_phase(engine, request)] += 1
                asked[request] = (time.monotonic_ns(), engine.metrics.num_steps)
                engine.cancel(request)
        engine.pool.check()
        for request, (asked_ns, num_steps_before) in asked.items():
            outcome, end_ns, num_steps = self._ends[request]
            if outcome == "cancelled":
                self.delays_ms.append((end_ns - asked_ns) / 1e6)
                self.delays_steps.append(num_steps - num_steps_before)
            else:
                self.num_late += 1

    def _draw(self, jobs: Sequence[Job], rng: random.Random) -> None:
        chosen = rng.sample(range(len(jobs)), round(_SHARE * len(jobs)))
        for place, number in enumerate(chosen):
            if place % 3 == 0:
                self._after_own[number] = rng.randrange(1, jobs[number].num_tokens)
            elif place % 3 == 1:  # those before it give about half of their tokens
                self._after_all.append((rng.randint(1, 1 + number * _NUM_TOKENS // 2), number))
            else:
                self._with_slot.append(number)
        self._with_slot = deque(sorted(self._with_slot))
        self._after_all.sort(reverse=True)

    def _token_came(self, number: int, answer: Answer) -> None:
        """On the engine's thread."""
        self._num_tokens += 1
        if self._after_own.get(number) == len(answer.token_ids):
            self._due.put(answer)
        while self._after_all and self._after_all[-1][0] <= self._num_tokens:
            self._due.put(self._answers[self._after_all.pop()[1]])
        while self._with_slot and _phase(self.driver.engine, self._answers[self._with_slot[0]].request) != "waiting":
            self._due.put(self._answers[self._with_slot.popleft()])

    def _ended(self, request: EngineRequest, outcome: str, now_ns: int) -> None:
        """On the engine's thread."""
        self._ends[request] = (outcome, now_ns, self.driver.engine.metrics.num_steps)
        if len(self._ends) == len(self._jobs):
            self._due.put(None)


def measure(model: Model, sizes: Sizes) -> list[Figure]:
    """Blocks that are free at the end, and how long each release took."""
    trials = [Trial(model, sizes, seed) for seed in range(sizes.num_rounds)]
    for trial in trials:
        trial.run()
    pools = [trial.driver.engine.pool for trial in trials]
    phases = sum((trial.phases for trial in trials), Counter[str]())
    told = ", ".join(f"{count} {phase}" for phase, count in sorted(phases.items()))
    num_cancelled = [len(trial.delays_ms) for trial in trials]
    return [
        figure(_CASE, f"cancelled of {sizes.cancel_jobs} ({told} in all rounds)", num_cancelled, "requests"),
        figure(_CASE, "blocks not free at the end", [p.num_used for p in pools], "blocks", target=Target("=", 0)),
        figure(
            _CASE,
            "steps until free, most",
            [max(trial.delays_steps) for trial in trials],
            "steps",
            target=Target("<=", 1),
            note=_NOTE,
        ),
        *(
            figure(_CASE, f"time until free, p{percent}", [_percentile(t, percent) for t in trials], "ms", note=_NOTE)
            for percent in (50, 99)
        ),
    ]


def _percentile(trial: Trial, percent: int) -> float:
    return float(np.percentile(trial.delays_ms, percent))


def _phase(engine: Engine, request: EngineRequest) -> str:
    """What a request does, as another thread sees it."""
    sequences = engine.sequences(request)
    if not sequences or sequences[0].slot < 0:
        return "waiting"
    return "answering" if sequences[0].num_output else "reading"
