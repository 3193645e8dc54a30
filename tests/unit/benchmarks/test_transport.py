"""The transport benchmark: its figures, and one hop of each kind for real."""

from pathlib import Path

from benchmarks import transport
from benchmarks.transport import Case, Measured


def test_figures_are_medians_and_compared_with_the_first_way():
    """Each figure's own median over the rounds; the ratio is that of both sides' CPU together."""
    grpcio = transport.summary("c", "grpcio", [Measured(10, 0.3, 0.5), Measured(30, 0.1, 0.9), Measured(20, 0.2, 0.8)])
    assert (20, 0.2, 0.8) == (grpcio.rate_per_s, grpcio.caller_s, grpcio.service_s)
    weft = transport.summary("c", "weft", [Measured(50, 0.1, 0.1)])
    lines = transport.render([grpcio, weft], {}).splitlines()
    assert "1.00" == lines[-2].split()[-1]
    assert "5.00" == lines[-1].split()[-1]


async def test_a_hop_is_measured_by_each_way(tmp_path: Path):
    """A row for each bare connection and each of a target's, against real processes."""
    rows = await transport.hops(tmp_path, 1, 0.05, [Case(64, 2)])
    ways = [row.way for row in rows]
    places = [f"{wire}, {place}" for wire in ("grpcio", "weft") for place in ("TCP", "Unix socket")]
    assert [
        "bare, framed, Unix socket",
        *(f"{caller}, {place}" for caller in ("bare", "target") for place in places),
    ] == ways
    assert all(row.rate_per_s > 0 for row in rows)
