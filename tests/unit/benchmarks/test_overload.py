"""The report of the overload benchmark; what it measures is not tested here."""

import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks.overload import SHARES, Row, draw, render, write_repository

SVG = "{http://www.w3.org/2000/svg}"


def rows() -> list[Row]:
    """Figures of both routers at two loads."""
    return [
        Row(
            router, sent, factor, 100 * factor, good, dict.fromkeys(SHARES, 0.5), dict.fromkeys(SHARES, 9.0), {}, 5, 0.1
        )
        for router, goods in (("no limits", (100.0, 20.0)), ("limits", (100.0, 95.0)))
        for sent in (True, False)
        for factor, good in zip((1.0, 3.0), goods, strict=True)
    ]


def test_the_table_says_what_is_left_at_three_times_the_capacity() -> None:
    """For each router, by what it answers at its best."""
    text = render(rows(), 100.0)
    assert "no limits, deadline sent: 0.20 of the peak is left at 3 x" in text
    assert "limits, deadline kept: 0.95 of the peak is left at 3 x" in text


def test_the_picture_has_a_line_for_each_router_and_priority() -> None:
    """It is well-formed, and every point lies in its plot."""
    root = ET.fromstring(draw(rows(), 100.0))
    lines = root.findall(f"{SVG}polyline")
    assert 4 + len(SHARES) + 1 == len(lines)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for line in lines:
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 < x < width
            assert 0 < y < height


def test_the_graph_that_is_measured_is_written(tmp_path: Path) -> None:
    """In the layout of a model repository."""
    write_repository(tmp_path)
    assert (tmp_path / "model/work_model/1/model.py").is_file()
    text = (tmp_path / "graphs/work/1/graph.pbtxt").read_text()
    assert "work_model" in text
