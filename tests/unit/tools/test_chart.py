"""Charts of lines and points."""

import xml.etree.ElementTree as ET
from itertools import pairwise

from weft.tools.chart import Line, Mark, Plot, render_svg

SVG = "{http://www.w3.org/2000/svg}"


def test_a_chart_of_nothing_and_odd_texts_is_a_chart() -> None:
    """No points, values of 0, and markup in a label."""
    root = ET.fromstring(render_svg("<&>", [Plot("a", "x", "y", [Line("<b>", [(0, 0)]), Line("c", [])])]))
    assert "<&>" == root.attrib["aria-label"]
    assert "<b>" in [text.text for text in root.iter(f"{SVG}text")]


def test_names_of_marks_do_not_lie_on_one_another() -> None:
    """Of ten at one point each is readable."""
    marks = [Mark(f"candidate-{number}", x, 0.0, 0.0, 0.1) for number in range(10) for x in (1.0, 2.0)]
    root = ET.fromstring(render_svg("a", [Plot("a", "x", "y", [Line("limit", [(0.0, 1.0), (2.0, 1.0)])], marks)]))
    names = [text for text in root.iter(f"{SVG}text") if text.text.startswith("candidate-")]
    for anchor in ("start", "end"):
        places = sorted(float(name.attrib["y"]) for name in names if name.attrib["text-anchor"] == anchor)
        assert 10 == len(places)
        assert all(after - before >= 13 for before, after in pairwise(places))
        assert places[0] > 0


def test_a_mark_beyond_the_limit_is_a_triangle_at_the_top() -> None:
    """The others keep their scale: a circle, filled or not."""
    marks = [Mark("small", 1.0, 0.5, 0.4, 0.6), Mark("refused", 2.0, 0.8, 0.7, 0.9, is_filled=False)]
    marks.append(Mark("off", 2.0, 60.0, 50.0, 70.0))
    root = ET.fromstring(render_svg("a", [Plot("a", "x", "y", [], marks, y_limit=1.0)]))
    circles = root.findall(f"{SVG}circle")
    assert ["mark disc", "mark"] == [circle.attrib["class"] for circle in circles]
    small, refused = (float(circle.attrib["cy"]) for circle in circles)
    triangle = next(path for path in root.findall(f"{SVG}path") if path.attrib["class"] == "mark disc")
    top = float(triangle.attrib["d"].split()[1].partition("l")[0]) + 6
    assert abs((small - top) - (refused - top) * 2.5) < 0.5


def test_ticks_are_round_and_reach_below_0_where_a_mark_does() -> None:
    """From the least interval to the largest value."""
    marks = [Mark("gain", 4.58, -0.8, -1.6, 0.1), Mark("loss", 1.0, 0.2, 0.1, 1.05)]
    root = ET.fromstring(render_svg("a", [Plot("a", "x", "y", [], marks, y_limit=2.0)]))
    ticks = [text.text for text in root.iter(f"{SVG}text") if text.attrib["class"] == "" and text.text[-1].isdigit()]
    assert ["-2", "-1", "0", "1", "2", "0", "1", "2", "3", "4", "5"] == ticks
    gain, loss = root.findall(f"{SVG}circle")
    assert float(gain.attrib["cy"]) > float(loss.attrib["cy"])
