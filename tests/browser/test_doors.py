"""Who may see the page's contents, what its buttons do, and a router that goes away."""

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.browser.conftest import Mesh, chromium, mesh_with_page
from tests.browser.repository import write_repository

import weft
from weft.base.security.keys import new_key


@pytest.fixture(scope="module")
def keys() -> dict[str, str]:
    """Keys by the name of their holder."""
    return {}


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory, keys: dict[str, str]) -> Iterator[Mesh]:
    """A small mesh that asks for keys, of one process, where models are loaded by hand."""
    chromium()
    folder = tmp_path_factory.mktemp("closed")
    lines = []
    grants: dict[str, dict[str, object]] = {"admin": {"control": True}, "guest": {"control": False}}
    grants["owner"] = {"control": True, "models": ["roots"]}
    for name, more in grants.items():
        keys[name], grant = new_key(name)
        lines.append(json.dumps({**json.loads(grant), **more}))
    (folder / "weft.keys").write_text("\n".join(lines))
    (folder / "weft.keys").chmod(0o600)
    repository = write_repository(folder / "repository", None)
    arguments = ("--auth-keys", str(folder / "weft.keys"), "--model-control-mode", "explicit", "--load-model", "*")
    with mesh_with_page(repository, folder / "log", "--in-process", *arguments) as mesh:
        yield mesh


def enter(page: Any, key: str) -> None:
    """Type a key where one is asked for."""
    page.get_by_role("dialog").get_by_label("Key").fill(key)
    page.get_by_role("button", name="Use it").click()


def status_of(url: str, headers: dict[str, str], body: object | None = None) -> int:
    """HTTP status of one request."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=20) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_without_a_key_nothing_is_told(closed: Mesh, keys: dict[str, str]) -> None:
    """The page itself is no secret; each figure, picture and action is; a key without the right gets none of them."""
    assert 200 == status_of(closed.url, {})
    paths = ("live", "requests", "requests/1", "machines", "graphs/roots")
    assert [401] * 5 == [status_of(f"{closed.url}api/{path}", {}) for path in paths]
    assert [401] * 5 == [status_of(f"{closed.url}api/{path}", {"x-api-key": keys["admin"][:-1]}) for path in paths]
    assert [403] * 5 == [status_of(f"{closed.url}api/{path}", {"x-api-key": keys["guest"]}) for path in paths]
    json_type = {"content-type": "application/json", "x-weft-ui": "1"}
    unload = {"action": "unload", "name": "roots"}
    assert 401 == status_of(f"{closed.url}api/control", json_type, unload)
    assert 403 == status_of(f"{closed.url}api/control", json_type | {"x-api-key": keys["guest"]}, unload)


@pytest.mark.parametrize(
    ("headers", "what"),
    [
        ({"content-type": "text/plain", "x-weft-ui": "1"}, "a form of another page can send it"),
        ({"content-type": "application/json"}, "no header of our page"),
        ({"content-type": "application/json", "x-weft-ui": "1", "origin": "http://evil.example"}, "another origin"),
        ({"content-type": "application/json", "x-weft-ui": "1", "sec-fetch-site": "cross-site"}, "another site"),
    ],
)
def test_another_page_changes_nothing(headers: dict[str, str], what: str, closed: Mesh, keys: dict[str, str]) -> None:
    """A request to unload that is not of this page is refused, whatever its key."""
    refused = status_of(
        f"{closed.url}api/control", headers | {"x-api-key": keys["admin"]}, {"action": "unload", "name": "roots"}
    )
    assert refused in (403, 415), what
    assert 200 == status_of(f"{closed.url}api/graphs/roots", {"x-api-key": keys["admin"]})


def test_a_guest_sees_nothing(closed: Mesh, keys: dict[str, str], open_page: Callable[..., Any]) -> None:
    """Neither without a key nor with one that lacks the right; the page says why, and has no button that acts."""
    page = open_page(closed.url + "#/models", allow_errors=True)
    enter(page, keys["guest"])
    page.get_by_role("alert").get_by_text("control").first.wait_for()
    assert "roots" not in page.content()
    page.get_by_role("button", name="Cancel").click()
    assert ["Key"] == [one.inner_text() for one in page.get_by_role("button").all()]


def test_a_key_is_kept_in_its_tab(closed: Mesh, keys: dict[str, str], open_page: Callable[..., Any]) -> None:
    """It opens every view, also after a reload; it is in no address, no cookie, no text of the page, no other tab."""
    page = open_page(closed.url, allow_errors=True)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    enter(page, keys["admin"])
    page.get_by_role("heading", name="canary").first.wait_for()
    page.reload()
    page.locator("main[data-view=graphs]").wait_for()
    page.goto(closed.url + "#/try/roots")
    page.get_by_role("button", name="curl").click()
    page.get_by_role("region", name="Answer").get_by_text("WEFT_KEY").wait_for()
    secret = keys["admin"].partition(".")[2]
    assert secret not in page.content()
    assert not [url for url in asked if secret in url]
    assert [] == page.context.cookies()
    other = page.context.new_page()
    other.goto(closed.url)
    other.get_by_role("dialog").wait_for()


def test_buttons_act(closed: Mesh, keys: dict[str, str], open_page: Callable[..., Any]) -> None:
    """Where the mode and the key allow, a graph is unloaded, after a question, and loaded again."""
    page = open_page(closed.url + "#/models", allow_errors=True)
    enter(page, keys["admin"])
    row = page.get_by_role("region", name="Loaded").get_by_role("row", name="roots")
    page.get_by_role("button", name="unload roots").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="unload roots").click()
    page.get_by_role("dialog").get_by_role("button", name="Unload").click()
    row.get_by_text("UNAVAILABLE").wait_for()
    page.get_by_role("button", name="load roots", exact=True).click()
    row.get_by_text("READY").wait_for()

    served = closed.repository / "graphs/roots/1/graph.pbtxt"
    served.write_text("# changed\n" + served.read_text())
    page.get_by_role("button", name="load roots", exact=True).click()
    page.get_by_role("status").get_by_text("load of roots").wait_for()
    page.get_by_role("button", name="rollback roots").click()
    page.get_by_role("dialog").get_by_role("button", name="Rollback").click()
    page.get_by_role("status").get_by_text("rollback of roots").wait_for()
    page.goto(closed.url + "#/graphs/roots/1")
    page.get_by_text("graph.pbtxt").click()
    assert page.locator("details pre").inner_text().startswith("# Square roots")


def test_a_rollout_is_driven(closed: Mesh, keys: dict[str, str], open_page: Callable[..., Any]) -> None:
    """Its card has share, verdict and guards; it is paused, resumed, promoted and, after a question, aborted."""
    page = open_page(closed.url + "#/graphs/canary/1", allow_errors=True)
    enter(page, keys["admin"])
    card = page.get_by_role("region", name="Rollout of new")
    card.get_by_text("10 % of the requests · step 1 of 3").wait_for()
    assert card.get_by_role("region", name="Guards").get_by_role("cell", name="max_error_rate").is_visible()
    for action, phase in (("pause", "PAUSED"), ("resume", "RUNNING")):
        card.get_by_role("button", name=action).click()
        card.get_by_text(phase, exact=False).first.wait_for()
    card.get_by_role("button", name="promote").click()
    page.get_by_role("dialog").get_by_role("button", name="Promote").click()
    card.get_by_text("50 % of the requests").wait_for()
    card.get_by_role("button", name="abort").click()
    page.get_by_role("dialog").get_by_role("button", name="Abort").click()
    card.get_by_text("ABORTED").first.wait_for()
    page.wait_for_function("document.querySelectorAll('.cards button:disabled').length === 4")


def test_a_key_drives_only_its_graphs(closed: Mesh, keys: dict[str, str], open_page: Callable[..., Any]) -> None:
    """A key of one graph sees no other, and has no button for it; what its page sends all the same is refused."""
    page = open_page(closed.url + "#/models", allow_errors=True)
    enter(page, keys["owner"])
    page.get_by_role("button", name="unload roots").wait_for()
    assert "canary" not in page.content()
    page.goto(closed.url + "#/graphs/canary/1")
    page.get_by_role("alert").get_by_text("there is no graph 'canary'").wait_for()
    send = """(action) => fetch("api/control", {
      method: "POST",
      body: JSON.stringify({action, name: "canary"}),
      headers: {"content-type": "application/json", "x-weft-ui": "1", "x-api-key": sessionStorage["weft-key"]},
    }).then((response) => response.status)"""
    for action in ("load", "unload", "rollback", "pause", "resume", "promote", "abort"):
        assert 403 == page.evaluate(send, action), action


def test_a_bandit_shows_its_arms(closed: Mesh, keys: dict[str, str], open_page: Callable[..., Any]) -> None:
    """How often each step was chosen and what it earned, while it learns."""
    page = open_page(closed.url + "#/graphs/learner/1", allow_errors=True)
    enter(page, keys["admin"])
    arms = page.get_by_role("region", name="Arms")
    arms.get_by_role("cell", name="new").wait_for()
    with weft.connect(closed.endpoints["router"].grpc, headers={"x-api-key": keys["admin"]}) as client:
        for _ in range(20):
            client["learner"](X=[4.0])
    page.wait_for_function(
        "() => [...document.querySelectorAll('[aria-label=Arms] tbody tr')].reduce((n, row) => n + "
        "Number(row.cells[1].textContent), 0) === 20"
    )


def test_a_router_goes_away_and_comes_back(closed: Mesh, keys: dict[str, str], open_page: Callable[..., Any]) -> None:
    """A banner says so while it is away; the numbers run again afterwards, without a reload."""
    page = open_page(closed.url, allow_errors=True)
    enter(page, keys["admin"])
    page.locator("main[data-view=graphs]").wait_for()
    banner = page.get_by_role("alert").get_by_text("not reachable")
    router = closed.endpoints["router"].pid
    supervisor = int(Path(f"/proc/{router}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(supervisor, signal.SIGSTOP)  # or another router may run before the page looks again
    try:
        os.kill(router, signal.SIGKILL)
        banner.wait_for()
    finally:
        os.kill(supervisor, signal.SIGCONT)
    banner.wait_for(state="hidden")
    page.evaluate("window.told = document.getElementById('total').textContent = ''")
    page.wait_for_function("() => document.getElementById('total').textContent.includes('requests/s')")
