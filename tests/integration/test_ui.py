"""The page of the gateway over a real router: its data, and who gets them."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.integration.routing import Client, NamingCore, graph, naming_service, running_router
from tests.integration.talking import GatewayProcess, running_gateway
from tests.processes import WAIT_S

from weft.gateway.ui.routes import HEADERS

CASCADE = """cascade {
  step { name: "small" model_name: "alpha" accept { when: "outputs.NAME == 'x,alpha'" } }
  step { name: "large" model_name: "beta" }
}"""


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    for name, root in (("named", "alpha"), ("other", "beta")):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "graph.pbtxt").write_text(graph(name, root))
    return folder


@pytest.fixture(scope="module")
def page(graphs: Path) -> Iterator[tuple[GatewayProcess, Client]]:
    """The page before a router of two workers, and a client of that router."""
    arguments = ("--workers", "2", "--model-control-mode", "explicit", "--load-model", "*")
    with (
        naming_service() as address,
        running_router(graphs, address, arguments) as router,
        running_gateway(router.grpc, "--ui", "--ui-metrics", f"router=http://{router.metrics}/metrics") as gateway,
        grpc.insecure_channel(router.grpc) as channel,
    ):
        yield gateway, Client(channel)


@contextmanager
def live(gateway: GatewayProcess, query: str = "", **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a stream."""
    with closing(http.client.HTTPConnection(gateway.address, timeout=WAIT_S)) as connection:
        connection.request("GET", f"/ui/api/live{query}", headers=headers)
        response = connection.getresponse()
        assert 200 == response.status, response.read()
        yield (json.loads(line[6:]) for line in response if line.startswith(b"data: "))


def until(events: Iterator[dict[str, Any]], kind: str, holds: Any = lambda event: True) -> dict[str, Any]:
    """The next event of a kind for which something holds."""
    return next(event for event in events if event["type"] == kind and holds(event))


def test_a_viewer_sees_what_the_graphs_do(page: tuple[GatewayProcess, Client]) -> None:
    """Of all workers: first what there is, then rates of the graphs looked at, with their steps, and requests."""
    gateway, client = page
    with live(gateway, "?graph=named") as events:
        state = next(events)
        assert ("state", "explicit") == (state["type"], state["control"])
        assert ["load", "unload", "rollback", "rollout"] == state["actions"]
        told = {one["name"]: (one["is_graph"], one["state"]) for one in state["index"]}
        assert ((True, "READY"), (False, "READY")) == (told["named"], told["alpha"])
        until(events, "tick")
        for number in range(20):
            client.ask("named", f"id{number}")
        client.ask("other")
        kept: list[str] = []

        def is_whole(tick: dict[str, Any]) -> bool:
            kept.extend(one["request_id"] for one in tick["requests"] if one["graph"] == "named")
            return len(kept) == 20

        tick = until(events, "tick", is_whole)
        (row,) = tick["looked_at"]
        assert sorted(kept) == sorted(f"id{number}" for number in range(20))
        assert row["rate"] > 0
        assert row["steps"]["root/alpha"]["p99_ms"] >= row["steps"]["root/alpha"]["p50_ms"] > 0
