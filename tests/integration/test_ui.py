"""The page of the gateway over a real router: its data, and who gets them."""

import base64
import http.client
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.integration.routing import Client, NamingCore, graph, naming_service, running_router
from tests.integration.talking import GatewayProcess, running_gateway
from tests.processes import WAIT_S, wait_until

from weft.base.core import TIMES_HEADER, CallContext, InferCall, InferResult
from weft.base.security.keys import new_key
from weft.gateway.ui.live import MAX_VIEWERS
from weft.gateway.ui.routes import HEADERS

BRANCHES = """splitter {
  step { name: "a" model_name: "alpha" weight: 1 }
  step { name: "b" model_name: "beta" weight: 1 }
}"""


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    for name, root in (("named", "alpha"), ("branches", BRANCHES)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "graph.pbtxt").write_text(graph(name, root))
    return folder


class TimedCore(NamingCore):
    """Tells of its calls, if it is asked, how long they took and with what."""

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        if TIMES_HEADER in context.headers:
            context.trailing_metadata.append((TIMES_HEADER, "0.5,0.25,4,2,7"))
        return await super().infer(call, context)


@pytest.fixture(scope="module")
def page(graphs: Path) -> Iterator[tuple[GatewayProcess, Client]]:
    """The page before a router of two workers, and a client of that router."""
    arguments = ("--workers", "2", "--model-control-mode", "explicit", "--load-model", "*")
    with (
        naming_service(TimedCore()) as address,
        running_router(graphs, address, arguments) as router,
        running_gateway(router.grpc, "--ui", "--metrics-from", f"router=http://{router.metrics}/metrics") as gateway,
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
    with live(gateway, "?graph=named&graph=branches") as events:
        state = next(events)
        assert ("state", "explicit") == (state["type"], state["control"])
        assert ["load", "unload", "rollback", "rollout"] == state["actions"]
        told = {one["name"]: (one["is_graph"], one["state"]) for one in state["index"]}
        assert ((True, "READY"), (False, "READY")) == (told["named"], told["alpha"])
        until(events, "tick")
        for number in range(20):
            client.ask("named", f"id{number}")
        for _ in range(8):
            client.ask("branches")
        kept: list[str] = []

        def is_whole(tick: dict[str, Any]) -> bool:
            kept.extend(one["request_id"] for one in tick["requests"] if one["graph"] == "named")
            return len(kept) == 20

        tick = until(events, "tick", is_whole)
        assert sorted(kept) == sorted(f"id{number}" for number in range(20))
        rows = {row["name"]: row for row in tick["looked_at"]}
        assert {"named", "branches"} == rows.keys()
        assert rows["named"]["rate"] > 0
        step = rows["named"]["steps"]["root/alpha"]
        assert step["p99_ms"] >= step["p50_ms"] > 0
        shares = [one["share"] for one in rows["branches"]["steps"].values()]
        assert shares == [None, None] or 1 == pytest.approx(sum(shares))


def test_a_graph_is_drawn_as_it_serves(page: tuple[GatewayProcess, Client]) -> None:
    """Its boxes and edges name their steps, and nothing in the picture needs an inline style."""
    gateway, _ = page
    status, shown, _ = gateway.ask("GET", "/ui/api/graphs/branches")
    assert (200, "branches", "1") == (status, shown["name"], shown["version"])
    assert {"alpha", "beta"} == {step["model"] for step in shown["steps"]}
    assert {("root", "splitter")} == {(step["node"], step["kind"]) for step in shown["steps"]}
    for step in shown["steps"]:
        assert f'data-role="step" data-step="{step["path"]}"' in shown["svg"]
        assert re.search(rf'data-to="\w+" data-step="{re.escape(step["path"])}"', shown["svg"])
    assert "style=" not in shown["svg"]
    assert 'name: "branches"' in base64.b64decode(shown["files"][0]["text"]).decode()
    assert 404 == gateway.ask("GET", "/ui/api/graphs/nobody")[0]


def test_a_request_is_found_with_its_steps(page: tuple[GatewayProcess, Client]) -> None:
    """At whichever worker it was, with what the services tell of its calls, and those that were in a batch with it.

    One that is not kept is not found.
    """
    gateway, client = page
    gateway.ask("GET", "/ui/api/requests")  # from now on they are kept
    client.ask("branches", "sought")
    for number in range(4):
        client.ask("named", f"mate{number}")
    lists = gateway.ask("GET", "/ui/api/requests")[1]
    line = next(one for one in lists["recent"] if one["request_id"] == "sought")
    assert ("branches", "OK") == (line["graph"], line["status"])
    assert line["key"] in [one["key"] for one in lists["slowest"]]
    found = gateway.ask("GET", f"/ui/api/requests/{line['key']}")[1]
    (step,) = found["steps"]
    assert step["path"].startswith("root[")
    assert 0 < step["ms"] <= found["ms"]
    times = {"queue_ms": 0.5, "compute_ms": 0.25, "batch_rows": 4, "batch_requests": 2}
    assert times.items() <= step.items()
    mates = {one["request_id"] for one in found["mates"]}
    assert {"mate0", "mate1", "mate2", "mate3"} <= mates
    assert "sought" not in mates
    assert 404 == gateway.ask("GET", "/ui/api/requests/1-1")[0]


def test_nothing_is_served_but_the_page(page: tuple[GatewayProcess, Client]) -> None:
    """Every answer, errors too, forbids what is inline or foreign; files are those of one folder."""
    gateway, _ = page
    for path in ("/ui/", "/ui", "/ui/api/machines", "/ui/static/nothing.js", "/ui/api/graphs/nobody"):
        connection = http.client.HTTPConnection(gateway.address, timeout=WAIT_S)
        with closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            text = response.read().decode()
            assert HEADERS.items() <= dict(response.getheaders()).items(), path
            if path.startswith("/ui/api"):
                assert "no-store" == response.headers["cache-control"]
            elif response.status == 200:
                assert not re.search(r"<style|style=|<script(?![^>]*src=)|\son\w+=", text)
    for path in ("/ui/static/../routes.py", "/ui/static/..%2froutes.py", "/ui/static/%2e%2e/live.py", "/ui/static/"):
        status, answer, _ = gateway.ask("GET", path)
        assert 404 == status, path
        assert "routes" not in answer["error"]


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/ui/", {"host": "evil.example"}),
        ("GET", "/ui/api/machines", {"host": "evil.example:8080"}),
        ("GET", "/ui/api/live", {"sec-fetch-site": "cross-site"}),
        ("POST", "/ui/api/control", {}),
        ("POST", "/ui/api/control", {"x-weft-ui": "1", "sec-fetch-site": "cross-site"}),
        ("POST", "/ui/api/control", {"x-weft-ui": "1", "sec-fetch-site": "same-site"}),
        ("POST", "/ui/api/control", {"x-weft-ui": "1", "origin": "http://evil.example"}),
    ],
)
def test_other_sites_pages_get_nothing(
    page: tuple[GatewayProcess, Client], method: str, path: str, headers: dict[str, str]
) -> None:
    """Neither under a name that leads here, nor from where it is; nor do they change anything."""
    gateway, client = page
    body = {"action": "unload", "name": "named"} if method == "POST" else None
    status, answer, _ = gateway.ask(method, path, body, content_type="application/json", **headers)
    assert 403 == status, answer
    assert client.is_ready("named")


def test_the_page_changes_what_the_mode_allows(page: tuple[GatewayProcess, Client]) -> None:
    """Graphs are unloaded and loaded at all workers; what is no action, or does not exist, is refused with a reason."""
    gateway, client = page

    def change(**body: str) -> int:
        own = {"x-weft-ui": "1", "sec-fetch-site": "same-origin", "origin": f"http://{gateway.address}"}
        return gateway.post("/ui/api/control", body, **own)[0]

    assert 200 == change(action="unload", name="branches")
    assert not client.is_ready("branches")
    assert 200 == change(action="load", name="branches")
    assert client.is_ready("branches")
    assert (400, 404) == (change(action="burn", name="named"), change(action="load", name="nobody"))


def test_a_request_is_explained_without_being_sent(page: tuple[GatewayProcess, Client]) -> None:
    """By the texts and signatures that serve; what is wrong with it is told as `weft explain` does."""
    gateway, _ = page
    body = {"graph": "branches", "version": "", "inputs": {"X": ["@/etc/passwd"]}, "headers": {"x-a": "1"}}
    status, answer, _ = gateway.post("/ui/api/explain", body, x_weft_ui="1")
    assert (200, True) == (status, "alpha" in answer["text"]), answer
    assert "passwd" not in json.dumps(answer)
    status, answer, _ = gateway.post("/ui/api/explain", body | {"inputs": {"Y": "x"}}, x_weft_ui="1")
    assert (400, True) == (status, "has no input 'Y'" in answer["error"]), answer
    assert 404 == gateway.post("/ui/api/explain", {"graph": "nobody"}, x_weft_ui="1")[0]


def test_what_a_key_may_not_see_is_left_out(graphs: Path, tmp_path: Path) -> None:
    """Without a key, or without the right, there is nothing; with it there are the models of the key."""
    lines = {}
    for name, more in (("viewer", {}), ("owner", {"control": True, "models": ["named", "alpha"]})):
        key, line = new_key(name)
        lines[key] = json.dumps(json.loads(line) | more)
    (tmp_path / "keys").write_text("\n".join(lines.values()))
    viewer, owner = lines
    with (
        naming_service() as address,
        running_router(graphs, address, ("--auth-keys", str(tmp_path / "keys"))) as router,
        running_gateway(router.grpc, "--ui") as gateway,
    ):
        for path in ("live", "machines", "requests", "requests/1-1", "graphs/named"):
            assert 401 == gateway.ask("GET", f"/ui/api/{path}")[0], path
            assert 403 == gateway.ask("GET", f"/ui/api/{path}", x_api_key=viewer)[0], path
        assert 403 == gateway.ask("GET", "/ui/api/graphs/branches", x_api_key=owner)[0]
        body = {"action": "load", "name": "named"}
        assert 403 == gateway.post("/ui/api/control", body, x_weft_ui="1", x_api_key=viewer)[0]
        with live(gateway, "?graph=branches&graph=named", **{"x-api-key": owner}) as events:
            assert {"named", "alpha"} == {one["name"] for one in until(events, "state")["index"]}
            assert {"named"} == {one["name"] for one in until(events, "tick")["looked_at"]}
            (tmp_path / "keys").write_text(lines[viewer])
            assert until(events, "denied")["reason"]
            assert not list(events)


def test_a_stream_outlives_its_router(graphs: Path) -> None:
    """It tells that the router is down, and what there is when another one serves on its port."""
    with (
        naming_service() as address,
        running_router(graphs, address) as router,
        running_gateway(router.grpc, "--ui") as gateway,
        live(gateway) as events,
    ):
        assert ["rollout"] == until(events, "state")["actions"]
        router.kill()
        assert "the router" in until(events, "down")["reason"]
        port = ("--grpc-port", router.grpc.rpartition(":")[2], "--model-control-mode", "poll")
        with running_router(graphs, address, port):
            assert ["rollback", "rollout"] == until(events, "state")["actions"]
            assert until(events, "tick")


def test_viewers_are_bounded(page: tuple[GatewayProcess, Client]) -> None:
    """One more than may be is refused, and taken when another one has left."""
    gateway, _ = page
    with ExitStack() as first:
        first.enter_context(live(gateway))
        with ExitStack() as others:
            for _ in range(MAX_VIEWERS - 1):
                until(others.enter_context(live(gateway)), "state")
            assert 429 == gateway.ask("GET", "/ui/api/live")[0]

        def is_taken() -> bool:
            with closing(http.client.HTTPConnection(gateway.address, timeout=WAIT_S)) as connection:
                connection.request("GET", "/ui/api/live")
                return connection.getresponse().status == 200

        wait_until(is_taken)
