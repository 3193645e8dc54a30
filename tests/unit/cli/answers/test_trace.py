"""Traces of requests as trees."""

import pytest

from weft.cli.answers import painter, read_trace, render_trace, span_ms


def entry(path: str, **fields: object) -> dict[str, object]:
    """One step, as the router reports it."""
    return {"path": path, "target": "", "model": "", "version": "", "status": "OK", **fields}


def test_a_trace_is_a_tree_with_times() -> None:
    """Each step stands below the node around it; a step that is no call has no model, a failure shows its status."""
    steps = [
        entry("root/lid", target="model", model="lang_id", version="2", ms=1.25),
        entry("root/clf", ms=20.5),
        entry("root/clf/by_lang[de]", target="model", model="bert", version="1", ms=20.1, status="UNAVAILABLE"),
    ]
    expected = (
        "root\n"
        "├─ lid                  1.25 ms  lang_id@2 on model\n"
        "└─ clf                 20.50 ms\n"
        "   └─ by_lang[de]      20.10 ms  bert@1 on model  UNAVAILABLE"
    )
    assert expected == render_trace(steps)


def test_bars_show_when_each_step_ran() -> None:
    """A line is the time of the whole graph: two steps, one after the other, half of it each."""
    steps = [entry("root/a", start_ms=0, ms=5.0, model="m"), entry("root/b", start_ms=5.0, ms=5.0, model="n")]
    first, second = (line.split(" ms  ")[1] for line in render_trace(steps).splitlines()[1:])
    assert "█" * 12 + " " * 14 + "m" == first
    assert " " * 12 + "█" * 12 + "  n" == second


def test_a_step_of_no_length_is_seen_even_at_the_end() -> None:
    """At least an eighth of a column, within the line."""
    steps = [entry("root/a", start_ms=0, ms=5.0), entry("root/b", start_ms=5.0, ms=0.0)]
    last = render_trace(steps).splitlines()[-1]
    assert last.endswith(" ms  " + " " * 23 + "▏")


def test_what_did_not_go_as_usual_is_told() -> None:
    """Attempts beyond the first, answers of a cache, rows, skipped steps."""
    steps = [
        entry("root/a", ms=1.0, model="m", attempts=2),
        entry("root/b", ms=1.0, model="m", cached=True, attempts=1),
        entry("root/c", ms=1.0, model="m", rows=1, cached=False),
        entry("root/d", ms=0.0, status="SKIPPED"),
    ]
    lines = [line.strip() for line in render_trace(steps).splitlines()[1:]]
    assert ["m  2 attempts", "m  cached", "m  1 row"] == [line.split("ms  ")[1] for line in lines[:3]]
    assert ["└─", "d", "skipped"] == lines[3].split()


def test_a_soft_failure_shows_its_message_and_its_fallback() -> None:
    """The fallback stands below the step that failed, the message between the two."""
    steps = [
        entry("root/a", ms=2.0, model="m", status="INTERNAL", error="root/a -> m@1: boom"),
        entry("root/a/b", ms=1.0, model="n", fallback_of="root/a"),
    ]
    lines = render_trace(steps).splitlines()
    assert ["root", "└─ a             2.00 ms  m  INTERNAL", "   │  root/a -> m@1: boom"] == lines[:3]
    assert "   └─ or b       1.00 ms  n" == lines[3]


def test_rounds_of_a_loop_are_numbered() -> None:
    """A path that comes again is a round of its own, with what ran in it."""
    steps = [entry("root/a"), entry("root/a/n/x"), entry("root/a"), entry("root/a/n/x")]
    labels = [line.strip() for line in render_trace(steps).splitlines()]
    assert ["root", "├─ a", "│  └─ n/x", "└─ a (round 2)", "└─ n/x"] == labels


def test_the_branch_of_a_root_stands_below_it() -> None:
    """A root that is no sequence; a model that was called itself is one line."""
    assert ["root", "└─ [de]       1.00 ms"] == render_trace([entry("root[de]", ms=1.0)]).splitlines()
    assert "double       1.00 ms  double" == render_trace([entry("double", ms=1.0, model="double")])


def test_nothing_that_a_server_sends_moves_the_cursor() -> None:
    """Control characters are blanks."""
    text = render_trace([entry("root/\x1b[2Ja", model="m\r", status="\x07", error="x\ny", ms=1.0)])
    assert "".join(text.splitlines()).isprintable()
    assert 3 == len(text.splitlines())


def test_colours_change_nothing_but_colours() -> None:
    """The text without escapes is the plain text."""
    steps = [entry("root/a", start_ms=0, ms=1.0, model="m", status="INTERNAL", error="boom")]
    coloured = render_trace(steps, painter(is_coloured=True))
    assert "\x1b[31mINTERNAL\x1b[0m" in coloured
    for code in ("\x1b[31m", "\x1b[36m", "\x1b[0m"):
        coloured = coloured.replace(code, "")
    assert render_trace(steps) == coloured


@pytest.mark.parametrize("text", ["", "no json", "3", "null", '[1, {}, {"path": ""}]', '{"path": "a"}'])
def test_what_is_no_trace_has_no_entries(text: str) -> None:
    """Any server's answer can be read."""
    assert [] == read_trace(text)


def test_the_time_of_a_graph_ends_with_its_last_step() -> None:
    """Steps overlap; entries without times count for nothing."""
    steps = [entry("a", start_ms=1.0, ms=5.0), entry("b", start_ms=2.0, ms=1.5), entry("c", ms="?")]
    assert 6.0 == span_ms(steps)
    assert 0.0 == span_ms([])


def test_nesting_without_end_is_no_trace() -> None:
    """A server that answers with text that is nested without end breaks nothing here."""
    assert [] == read_trace("[" * 200_000)
