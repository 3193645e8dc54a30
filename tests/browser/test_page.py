"""The page over the samples in a real Chromium: what is seen and done there, by a person or against one."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.browser.conftest import SAMPLES, Mesh, under_load
from tests.browser.repository import BAD_NAME, MARKUP

VIEWS = ("#/graphs/triage/1", "#/try/digits", "#/requests", "#/models", "#/api")
DIGIT = SAMPLES / "data/digits/3.png"
NUMBERS = str([list(range(16))])


@pytest.fixture(scope="module")
def loaded(samples: Mesh) -> Iterator[Mesh]:
    """The samples, under load while the module runs."""
    with under_load(samples):
        yield samples


def ready(page: Any) -> Any:
    """The page, when its view is there and the first numbers are."""
    page.locator("main[data-view]").wait_for()
    page.wait_for_function("() => document.getElementById('total').textContent.includes('requests/s')")
    return page


def number(text: str) -> float:
    """The first number of a text; 0 if there is none."""
    found = re.search(r"[\d,]+(\.\d+)?", text)
    return float(found[0].replace(",", "")) if found else 0.0


def wait_for_text(page: Any, selector: str, pattern: str) -> None:
    """Some element of the selector has a text of this pattern (of JavaScript)."""
    found = "[...document.querySelectorAll(selector)].some((one) => RegExp(pattern).test(one.textContent))"
    page.wait_for_function(f"([selector, pattern]) => {found}", arg=[selector, pattern])


def test_a_graph_shows_its_traffic(loaded: Mesh, open_page: Callable[..., Any]) -> None:
    """Steps have their rates and latencies, the branches their shares, the edges widths; a click opens the step."""
    page = ready(open_page(loaded.url + "#/graphs/triage/1"))
    wait_for_text(page, ".figures", r"[1-9][\d.]* requests/s · p50 [1-9]")
    wait_for_text(page, ".live", r"^[\d.]+/s")
    widths = page.evaluate(
        "[...document.querySelectorAll('[data-from] path')].map((one) => parseFloat(one.style.strokeWidth))"
    )
    assert max(widths) > 2 * min(widths) > 0
    page.locator("[data-step='root/score']").first.click()
    aside = page.get_by_role("complementary")
    assert aside.get_by_text("support_labels version 1").is_visible()
    assert number(aside.locator("dd").first.inner_text()) > 0


def test_a_failing_step_stands_out(loaded: Mesh, open_page: Callable[..., Any]) -> None:
    """By a mark and a text, not by colour alone; the list marks its graph; the one before it is well."""
    page = ready(open_page(loaded.url + "#/graphs/roots/1"))
    failing = page.locator(".failing")
    failing.first.wait_for()
    assert ["root/root"] == sorted({one.get_attribute("data-step") for one in failing.all()} - {"root"})
    assert re.search(r"▲ \d+ % fail", failing.first.text_content())
    wait_for_text(page, "nav.list a", r"roots.*▲")


FORMS: list[tuple[str, dict[str, str], list[str]]] = [
    ("embed", {"TEXT": "a sentence"}, ["--text", "a sentence"]),
    ("triage", {"TEXT": "Where is my parcel?"}, ["--text", "Where is my parcel?"]),
    ("digits", {}, ["--file", str(DIGIT)]),
    ("digits_ab", {}, ["--file", str(DIGIT)]),
    ("digits_cascade", {}, ["--file", str(DIGIT)]),
    ("identity3", {"INPUT0": NUMBERS}, ["--input", f"INPUT0={NUMBERS}"]),
    (
        "simple",
        {"INPUT0": NUMBERS, "INPUT1": NUMBERS},
        [f"--input=INPUT{i}={NUMBERS}" for i in (0, 1)],
    ),
]


@pytest.mark.parametrize(("graph", "fields", "arguments"), FORMS, ids=[form[0] for form in FORMS])
def test_a_form_answers_as_the_command_line(
    graph: str, fields: dict[str, str], arguments: list[str], loaded: Mesh, open_page: Callable[..., Any]
) -> None:
    """Texts, numbers and pictures; the outputs are those of `weft infer`, and a graph's steps are on its picture."""
    page = ready(open_page(f"{loaded.url}#/try/{graph}"))
    for name, text in fields.items():
        page.get_by_role("textbox", name=name).fill(text)
    if not fields:
        page.get_by_label("File for IMAGE").set_input_files(DIGIT)
    page.get_by_text("Priority, timeout, headers").click()
    page.get_by_label("request id").fill("ann")
    command = [sys.executable, "-m", "weft.cli", "infer", graph, "--json", "--url", loaded.endpoints["router"].grpc]
    expected = json.loads(subprocess.check_output([*command, "--request-id", "ann", *arguments]))
    with page.expect_response(re.compile("/infer$")) as response:
        page.get_by_role("button", name="Send").click()
    answer = page.get_by_role("region", name="Answer")
    answer.get_by_role("heading", name=f"{graph} version 1").wait_for()
    outputs = {one["name"]: one["data"] for one in response.value.json()["outputs"]}
    for output in expected["outputs"]:
        is_text = output["datatype"] == "BYTES"
        assert output["data"] == (
            outputs[output["name"]] if is_text else pytest.approx(outputs[output["name"]], rel=1e-3)
        )
        assert answer.get_by_role("heading", name=output["name"]).is_visible()
        assert not is_text or answer.locator("pre").get_by_text(output["data"][0], exact=True).is_visible()
    if graph != "simple":
        assert answer.get_by_role("region", name="Waterfall").get_by_role("row").count() >= 2
        assert answer.locator(".taken").count() >= 2


def test_a_stream_appears_as_it_comes(loaded: Mesh, open_page: Callable[..., Any]) -> None:
    """The text grows while the model writes; its parts make what `weft infer` answers."""
    page = ready(open_page(loaded.url + "#/try/write"))
    page.get_by_role("textbox", name="text_input").fill("Return a list of")
    page.get_by_text("Optional inputs").click()
    page.get_by_role("textbox", name="sampling_parameters").fill('{"max_tokens": 200, "seed": 1}')
    page.evaluate("""() => { window.lengths = []; new MutationObserver(() => {
      const length = document.querySelector('.stream')?.textContent.length;
      if (length && length !== lengths.at(-1)) lengths.push(length);
    }).observe(document.querySelector('main'), {subtree: true, childList: true, characterData: true}) }""")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("region", name="Waterfall").wait_for()
    lengths = page.evaluate("lengths")
    assert len(lengths) > 5
    assert lengths == sorted(lengths)


def test_a_request_is_explained_and_copied(loaded: Mesh, open_page: Callable[..., Any]) -> None:
    """Explained without being sent; what `curl` and `tritonclient` are given runs as it is, and answers the same."""
    page = ready(open_page(loaded.url + "#/try/triage"))
    page.get_by_role("textbox", name="TEXT").fill('Don\'t you have "my" parcel, or is it true, lost?')
    answer = page.get_by_role("region", name="Answer")
    page.get_by_role("button", name="Explain").click()
    answer.get_by_text("answer_shipping").first.wait_for()
    for language, interpreter in (("curl", ["bash", "-c"]), ("tritonclient", [sys.executable, "-c"])):
        page.get_by_role("button", name=language).click()
        code = answer.locator("pre", has_text=f"{language}").first
        code.wait_for()
        said = subprocess.run([*interpreter, code.inner_text()], capture_output=True, text=True, timeout=60, check=True)
        assert "'shipping'" in said.stdout.replace('"', "'"), said.stderr


def test_markup_stays_text(loaded: Mesh, open_page: Callable[..., Any]) -> None:
    """In answers, errors, request ids, conditions, files and names that cannot be loaded: seen as it is, and inert."""
    page = ready(open_page(loaded.url + "#/graphs/hostile/1", allow_errors=True))
    assert page.locator("title", has_text=MARKUP).count()
    page.get_by_text("graph.pbtxt").first.click()
    assert MARKUP in page.locator("details pre").first.inner_text()
    assert page.get_by_role("navigation", name="Graphs").get_by_text(BAD_NAME).is_visible()

    page.goto(loaded.url + "#/models")
    page.get_by_role("region", name="Loaded").get_by_text(BAD_NAME, exact=True).wait_for()

    page.goto(loaded.url + "#/try/hostile")
    page.get_by_text("Priority, timeout, headers").click()
    page.get_by_label("request id").fill(MARKUP)
    for text, shown in (("a", MARKUP), ("fail", "the step failed " + MARKUP)):
        page.get_by_role("textbox", name="TEXT").fill(text)
        page.get_by_role("button", name="Send").click()
        page.get_by_role("region", name="Answer").get_by_text(shown).first.wait_for()

    page.goto(loaded.url + "#/requests")
    page.get_by_label("Which requests").select_option("failed")
    page.get_by_role("row", name=MARKUP).get_by_role("link").first.click()
    page.get_by_role("region", name="One request").get_by_text("the step failed " + MARKUP).first.wait_for()
    assert 0 == page.locator("main :is(img, script, b[onclick])").count()


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_calm_and_fits_a_phone(view: str, loaded: Mesh, open_page: Callable[..., Any]) -> None:
    """Nothing shifts while numbers change; on a phone nothing makes the page wider than the screen."""
    page = ready(open_page(loaded.url + view))
    for number_of_change in range(3):
        before = page.locator("#total").inner_text()
        page.wait_for_function("(before) => document.getElementById('total').textContent !== before", arg=before)
        if not number_of_change:  # until then the view is opening
            page.evaluate("shifts.length = 0")
    assert sum(page.evaluate("shifts")) < 0.005
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_serious(view: str, loaded: Mesh, open_page: Callable[..., Any]) -> None:
    """axe-core, by the rules of WCAG 2 A and AA, in both schemes; a step of a graph is open."""
    from axe_playwright_python.sync_playwright import Axe

    page = ready(open_page(loaded.url + view))
    if "#/graphs" in view:
        page.locator("[data-step='root/score']").first.click()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = Axe().run(page, {"exclude": [["tbody tr:nth-child(n + 6)"]]}).response["violations"]  # rows are alike
        serious = [one for one in found if one["impact"] in ("serious", "critical")]
        nodes = [
            (one["id"], node["html"][:200], node["failureSummary"]) for one in serious for node in one["nodes"][:3]
        ]
        assert [] == nodes, scheme


def test_keys_are_enough(loaded: Mesh, open_page: Callable[..., Any]) -> None:
    """Without a mouse: past the navigation to a step, into it and out of it; then to the form, and a request sent."""
    page = ready(open_page(loaded.url + "#/graphs/triage/1"))

    def tab_to(selector: str) -> None:
        for _ in range(120):
            if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"{selector} is not reached")

    page.keyboard.press("Tab")
    assert "Skip to the content" == page.evaluate("document.activeElement.textContent")
    tab_to("[data-step='root/score']")
    page.keyboard.press("Enter")
    assert page.get_by_role("complementary").get_by_role("heading", name="score").is_visible()
    tab_to("aside button")
    page.keyboard.press("Enter")
    assert page.get_by_role("complementary").is_hidden()

    page.goto(loaded.url + "#/try/triage")
    page.get_by_role("textbox", name="TEXT").focus()
    page.keyboard.type("Where is my parcel?")
    tab_to("form button.main")
    page.keyboard.press("Enter")
    page.get_by_role("region", name="Answer").get_by_role("heading", name="LABEL").wait_for()
