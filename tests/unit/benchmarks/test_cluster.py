"""The simulation of language models on many replicas: laws that hold for every engine, and by the step."""

from dataclasses import replace

import pytest
from benchmarks.cluster.__main__ import main
from benchmarks.cluster.costs import SHAPES, StepCosts, costs_of
from benchmarks.cluster.published import distserve
from benchmarks.cluster.replica import EngineSettings, PrefixCache
from benchmarks.cluster.requests import Request, copies, drawn_lengths, fixed_lengths, sessions
from benchmarks.cluster.simulation import CHOICES, Cluster, Run

COSTS = costs_of(SHAPES["8b"], "H100")
#: Steps of whole milliseconds: 10, and 1 more for each 100 tokens of a prompt.
PLAIN = StepCosts(0.0, 0.010, 0.0001, 0.0, 0.0, 10_000, 1000)


def test_one_request_takes_its_prompt_and_a_step_for_each_further_token() -> None:
    """And apart the transfer between: 200 KB at 1 MB/s and its latency."""
    request = Request(1.0, 200, 11)
    Run(Cluster(PLAIN, replicas=1), [request]).run()
    assert request.ttft_s == pytest.approx(0.020)
    assert request.tpot_s == pytest.approx(0.010)
    request = Request(1.0, 200, 11)
    Run(Cluster(PLAIN, prefill=1, decode=1, link_bytes_per_s=1e6, link_s=0.1), [request]).run()
    assert request.ttft_s == pytest.approx(0.020)
    assert request.tpot_s == pytest.approx((0.3 + 10 * 0.010) / 10)


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_steps_at_once_are_as_steps_one_by_one(mixes: bool, apart: bool) -> None:
    """Times of every request, though a run of steps is one event."""
    times = []
    for max_steps in (1, 1 << 30):
        requests = drawn_lengths(40, 300, 400, 60)
        settings = EngineSettings(mixes=mixes, chunk_tokens=512, max_num_seqs=16, max_steps=max_steps)
        cluster = Cluster(COSTS, prefill=2, decode=2) if apart else Cluster(COSTS, replicas=4)
        Run(replace(cluster, settings=settings), requests).run()
        times.append([(one.first_s, one.end_s) for one in requests])
    for one, other in zip(*times, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


@pytest.mark.parametrize("policy", CHOICES)
def test_nothing_is_lost_and_all_is_given_back(policy: str) -> None:
    """Every request ends with its tokens; no replica holds KV memory, no router counts a call."""
    for cluster in (Cluster(COSTS, replicas=5), Cluster(COSTS, prefill=3, decode=2)):
        run = Run(replace(cluster, policy=policy), sessions(50, 400, num_turns=3, pause_s=1.0))
        figures = run.run()
        assert figures.num_complete == figures.num_requests == 400
        replicas = [*run.fronts, *run.backs]
        assert all(one.num_tokens == 0 and not one.waiting for one in replicas)
        assert sum(one.num_decoded for one in replicas) == sum(one.num_output - 1 for one in run.requests)
        assert all(one.arrival_s < one.first_s <= one.end_s for one in run.requests)


def test_a_replica_with_work_never_rests() -> None:
    """At a load beyond what it carries, it is busy from the first arrival to the last answer."""
    requests = fixed_lengths(100, 300, 800, 50)
    run = Run(Cluster(COSTS, replicas=1), requests)
    run.run()
    span_s = max(one.end_s for one in requests) - requests[0].arrival_s
    assert run.fronts[0].busy_ns / 1e9 == pytest.approx(span_s)


def test_memory_bounds_what_runs_at_once() -> None:
    """Of 10,000 tokens, requests of 4,000 run two at a time, and all of them in the end."""
    requests = [Request(0.0, 3900, 100) for _ in range(6)]
    run = Run(Cluster(PLAIN, replicas=1), requests)
    run.run(0.001)
    held = [run.fronts[0].num_tokens]
    for until_ms in range(1, 8000, 5):
        run.clock.run(until_ms * 1_000_000)
        held.append(run.fronts[0].num_tokens)
    assert (max(held), held[-1], run.num_complete) == (8000, 0, 6)


def test_more_load_waits_longer_and_more_replicas_less() -> None:
    """Times to the first token, at one seed."""
    by_rate = [Run(Cluster(COSTS, replicas=4), drawn_lengths(rate, 800, 1000, 100)).run() for rate in (20, 60, 120)]
    assert by_rate[0].ttft_p99_ms < by_rate[1].ttft_p99_ms < by_rate[2].ttft_p99_ms
    by_size = [Run(Cluster(COSTS, replicas=n), drawn_lengths(120, 800, 1000, 100)).run() for n in (4, 8, 16)]
    assert by_size[0].ttft_p99_ms > by_size[1].ttft_p99_ms > by_size[2].ttft_p99_ms


def test_a_seed_gives_the_same_figures() -> None:
    """Another gives others."""
    requests = sessions(50, 300)
    one, again, other = (Run(Cluster(COSTS, replicas=5, seed=seed), copies(requests)).run() for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_a_cache_finds_beginnings_and_forgets_ends_first() -> None:
    """Of two chains in room for three blocks, the older one keeps its beginning."""
    cache = PrefixCache(300)
    cache.add((1, 2), 100)
    cache.add((7, 8), 100)
    assert (cache.match((1, 2)), cache.match((7, 8, 9)), cache.match((2,))) == (1, 2, 0)


def test_sessions_are_found_again_where_they_were() -> None:
    """The router's sticky rule has more hits than least outstanding; one replica has all that there are."""
    requests = sessions(40, 600, pause_s=2.0)
    hits = {
        name: Run(Cluster(COSTS, replicas=n, policy=name), copies(requests)).run().hit_rate
        for name, n in (("least_outstanding", 8), ("sticky", 8), ("round_robin", 1))
    }
    assert hits["least_outstanding"] < hits["sticky"] <= hits["round_robin"] + 0.01


def test_apart_tokens_do_not_wait_for_prompts() -> None:
    """The longest gaps between tokens are steps of decoding, where together they are steps with a prompt's chunk."""
    requests = drawn_lengths(24, 800, 1500, 150)
    together = Run(Cluster(COSTS, replicas=4), copies(requests)).run()
    apart = Run(Cluster(COSTS, prefill=2, decode=2), copies(requests)).run()
    assert apart.gap_p99_ms < together.gap_p99_ms / 2


@pytest.mark.long
def test_it_finds_what_distserve_published() -> None:
    """Two of their figures are fitted; goodput together and apart follows within a tenth."""
    for row in distserve():
        assert float(row.ours) == pytest.approx(float(row.published), rel=0.1)


def test_it_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each policy, and for each division."""
    assert 0 == main(["policies", "--replicas", "4", "--requests", "100", "--policy", "round_robin", "sticky"])
    assert ["round_robin", "sticky"] == [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert 0 == main(["ratios", "--replicas", "10", "--requests", "100"])
    assert "5 prefill, 5 decode" in capsys.readouterr().out
