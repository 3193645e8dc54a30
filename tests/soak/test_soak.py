"""A mesh that is used hard for a long time holds no more at the end than at the beginning."""

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from tests.chain import MODEL
from tests.faults.mesh import Mesh, RunningLoad
from tests.soak.actors import ACTS, at_work
from tests.soak.watch import Growth, Sample, growths, take

pytestmark = pytest.mark.long

#: `make soak` has it for twenty minutes.
DURATION_S = float(os.environ.get("WEFT_SOAK_S", "9"))
NUM_SAMPLES = 30
#: Keeps 200 kB of every request.
LEAK = MODEL.replace("time.sleep(0.01)", "self.__dict__.setdefault('kept', []).append(b'x' * 200_000)")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A mesh whose graphs are loaded by request."""
    explicit = ["--model-control-mode=explicit", "--load-model=*"]
    with contextlib.closing(Mesh(tmp_path_factory.mktemp("soak"), 2, explicit)) as made:
        made.start()
        yield made


def soak(mesh: Mesh, duration_s: float) -> tuple[dict[str, list[Sample]], Counter[str], Counter[str]]:
    """Samples by service, the statuses of the plain load beside, and what else was done."""
    samples: dict[str, list[Sample]] = {service.log.stem: [] for service in mesh.services}
    plain = contextlib.closing(RunningLoad(mesh.router.address, rate_per_s=30.0))
    with plain as load, at_work(mesh.router.address) as done:
        for _ in range(NUM_SAMPLES):
            time.sleep(duration_s / NUM_SAMPLES)
            for service in mesh.services:
                samples[service.log.stem].append(take(service.pid, service.metrics_address))
        statuses = Counter(record.status for record in load.finish())
    return samples, statuses, done


def leaks(samples: Mapping[str, Sequence[Sample]]) -> dict[str, list[Growth]]:
    """What grows, by service."""
    found = {name: [growth for growth in growths(taken) if growth.is_leak] for name, taken in samples.items()}
    return {name: grown for name, grown in found.items() if grown}


def test_nothing_grows(mesh: Mesh) -> None:
    """Not with cancels, clients that vanish, wrong requests and reloads; and every plain request is answered right."""
    samples, statuses, done = soak(mesh, DURATION_S)
    if report := os.environ.get("WEFT_SOAK_REPORT"):
        found = {name: [growth._asdict() for growth in growths(taken)] for name, taken in samples.items()}
        Path(report).parent.mkdir(parents=True, exist_ok=True)
        Path(report).write_text(json.dumps({"growth": found, "statuses": statuses, "acts": done}, indent=1))
    assert {act.__name__ for act in ACTS} <= done.keys()
    assert statuses.keys() == {"OK"}
    assert leaks(samples) == {}


def test_a_planted_leak_is_found(mesh: Mesh) -> None:
    """The same test, with a model that keeps a part of every request, names the service and the memory."""
    for model in mesh.models:
        file = Path(model.repository) / "work/1/model.py"
        file.write_text(LEAK)
        model.restart()
    samples, _, _ = soak(mesh, min(DURATION_S, 9.0))
    found = leaks(samples)
    assert {"model0", "model1"} <= found.keys()
    assert {growth.figure for growth in found["model0"]} == {"rss_bytes"}
    assert not {"router", "preprocess", "postprocess"} & found.keys()


def test_what_counts_as_growth() -> None:
    """Noise around a level does not, a slow steady rise does, and what happens in the first third is not looked at."""
    level, mib = 100 << 20, 1 << 20
    noisy = [Sample(i, level + (i % 7 - 3) * mib, 50, 20, 10) for i in range(60)]
    filling = [Sample(i, level + min(i, 15) * 4 * mib, 50, 20, 10) for i in range(60)]
    rising = [Sample(i, level + i * mib // 2, 50, 20, 10) for i in range(60)]
    opening = [Sample(i, level, 50 + i, 20, 10) for i in range(60)]
    found = [
        [growth.figure for growth in growths(taken) if growth.is_leak] for taken in (noisy, filling, rising, opening)
    ]
    assert found == [[], [], ["rss_bytes"], ["num_descriptors"]]
