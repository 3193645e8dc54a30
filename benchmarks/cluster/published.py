"""Published figures of clusters beside those of the simulation: direction, size, and what differs.

``python -m benchmarks.cluster published [--traces DIR]``; ``DIR``: Mooncake's traces (FAST25-release/traces of
github.com/kvcache-ai/Mooncake), without which what needs them is left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.cluster.costs import SHAPES, costs_of
from benchmarks.cluster.replica import EngineSettings, PrefixCache
from benchmarks.cluster.requests import Request, copies, fixed_lengths, read_mooncake, sessions
from benchmarks.cluster.simulation import CHOICES, Cluster, Figures, Run


class Row(NamedTuple):
    """A published figure and ours; ``is_given``: it was fitted to, not found."""

    what: str
    published: str
    ours: str
    is_given: bool = False


#: Of OPT-13B on an A100 by vLLM of 2023: what is fitted so that prefill alone and decode alone carry what they did.
_DISTSERVE = replace(
    (fitted := costs_of(SHAPES["opt-13b"], "A100-80GB", compute_share=0.42, exchange_s=0.010)), kv_s=2 * fitted.kv_s
)
_WHOLE = EngineSettings(mixes=False, chunk_tokens=512, has_cache=False)
#: A node of eight A100 whose products reach half of the peak; Mooncake's caches hold 3 million tokens.
_MOONCAKE = replace(costs_of(SHAPES["70b"], "A100-80GB", 8, compute_share=0.5), num_kv_tokens=3_000_000)


def goodput(make: Callable[[], Cluster], ttft_ms: float = 400.0, tpot_ms: float = 40.0) -> float:
    """The most requests of 512 and 64 tokens per second with 90 of 100 within both times."""
    low, high = 0.1, 40.0
    for _ in range(12):
        rate = (low + high) / 2
        found = Run(make(), fixed_lengths(rate, 2000, 512, 64)).run()
        low, high = (rate, high) if found.ttft_p90_ms <= ttft_ms and found.tpot_p90_ms <= tpot_ms else (low, rate)
    return low


def distserve() -> Iterator[Row]:
    """Figure 1 of DistServe (OSDI 2024): 13B, A100, prompts of 512 and answers of 64; requests per second and GPU."""

    def cluster(**numbers: int) -> Callable[[], Cluster]:
        return lambda: Cluster(_DISTSERVE, settings=_WHOLE, link_bytes_per_s=300e9, **numbers)

    yield Row("DistServe: prefill alone, 1/s", "5.6", f"{goodput(cluster(prefill=1, decode=8)):.1f}", is_given=True)
    yield Row("DistServe: decode alone, 1/s", "10", f"{goodput(cluster(prefill=16, decode=1)):.1f}", is_given=True)
    together, apart = goodput(cluster(replicas=1)), goodput(cluster(prefill=2, decode=1)) / 3
    yield Row("DistServe: together, 1/s and GPU", "1.6", f"{together:.1f}")
    yield Row("DistServe: two prefill and one decode, 1/s and GPU", "3.3", f"{apart:.1f}")
    yield Row("DistServe: apart over together", "2.1", f"{apart / together:.1f}")


def ideal_hit_rate(requests: list[Request], num_tokens: int = 1 << 60) -> float:
    """Part of the prompts' tokens found in one cache for all, in order of arrival."""
    cache, hits = PrefixCache(num_tokens), 0
    for one in requests:
        hits += min(cache.match(one.blocks) * one.block_tokens, one.num_prompt)
        cache.add(one.blocks, one.block_tokens)
    return hits / sum(one.num_prompt for one in requests)


def mooncake(traces: Path) -> Iterator[Row]:
    """Mooncake (FAST 2025): hit rates of table 2, schedulers of figure 5, P/D ratios of figure 15."""
    chats = read_mooncake(traces / "conversation_trace.jsonl")
    synthetic = read_mooncake(traces / "synthetic_trace.jsonl")
    yield Row("Mooncake: most hits, conversation", "40 %", f"{ideal_hit_rate(chats):.0%}")
    yield Row("Mooncake: most hits, synthetic", "66 %", f"{ideal_hit_rate(synthetic):.0%}")
    small = ideal_hit_rate(chats, 3_000_000) / ideal_hit_rate(chats)
    yield Row("Mooncake: of them with 3 million tokens, conversation", "below 50 %", f"{small:.0%}")

    def run(policy: str, *, is_shared: bool = False) -> Figures:
        cluster = Cluster(_MOONCAKE, prefill=8, decode=8, policy=policy, shared_cache=is_shared, link_bytes_per_s=50e9)
        return Run(replace(cluster, settings=EngineSettings(chunk_tokens=8192)), copies(chats)).run()

    published = {"random": 19.65, "fewest_tokens": 5.27, "shortest_ttft": 3.58, "": 3.07}
    ours = {name: run(name or "shortest_ttft", is_shared=not name).ttft_mean_ms / 1e3 for name in published}
    names = ("random", "load balancing", "local cache", "global cache")
    for what, name in zip(names, published, strict=True):
        yield Row(f"Mooncake: mean TTFT, 8 + 8 nodes, {what}, s", f"{published[name]}", f"{ours[name]:.2f}")
    for what, one, other in (
        ("random over load balancing", "random", "fewest_tokens"),
        ("load balancing over local cache", "fewest_tokens", "shortest_ttft"),
        ("local over global cache", "shortest_ttft", ""),
    ):
        yield Row(f"Mooncake: {what}", f"{published[one] / published[other]:.2f}", f"{ours[one] / ours[other]:.2f}")
    held = {}
    for prefill in range(5, 12):
        made = Cluster(_MOONCAKE, prefill=prefill, decode=16 - prefill, policy="shortest_ttft", shared_cache=True)
        done = copies(synthetic)
        Run(replace(made, settings=EngineSettings(chunk_tokens=8192), link_bytes_per_s=50e9), done).run()
        held[prefill] = sum(one.ttft_s <= 10 and one.tpot_s <= 0.1 for one in done) / len(done)
    best = [prefill for prefill, share in held.items() if share >= max(held.values()) - 1e-3]
    shown = f"{best[0]}P{16 - best[0]}D" + (f" to {best[-1]}P{16 - best[-1]}D" if len(best) > 1 else "")
    yield Row("Mooncake: best of 16 nodes for the synthetic trace", "8P8D", shown)


def sglang() -> Iterator[Row]:
    """SGLang 0.4: its router on eight GPUs; 64 groups of prompts that begin alike, as its benchmark makes them."""
    costs = costs_of(SHAPES["8b"], "A100-80GB")
    requests = sessions(1e6, 1024, num_prompts=64, system=2048, turn=128, output=256, num_turns=1, skew=0.0)
    for one in requests:
        one.key = str(one.blocks[0])
    found = {
        name: Run(Cluster(costs, replicas=8, policy=name), copies(requests)).run()
        for name in ("round_robin", "sticky", "prefix")
        if name in CHOICES
    }
    base = found.pop("round_robin")
    for name, figures in found.items():
        yield Row(
            f"SGLang: throughput of a cache-aware router ({name} here)",
            "up to 1.9",
            f"{figures.rate_per_s / base.rate_per_s:.1f}",
        )
        yield Row(f"SGLang: hits ({name} here)", "20 % to 75 %", f"{base.hit_rate:.0%} to {figures.hit_rate:.0%}")
