"""Mermaid, DOT and text: syntax, and that nothing of a diagram is lost."""

import random
import re
from itertools import pairwise

import pytest
from tests.unit.tools.graphs import PLANS

from weft.language.draw.build import Edge, Group, Item, Role, Stroke, build_diagram
from weft.language.draw.formats import render_dot, render_mermaid, render_text

#: Pieces of text that mean something to Mermaid, DOT, HTML or Markdown.
HOSTILE = ['"', "\\", "\n", "#", "&lt;", "<b>", "`", "%%", "%%{init: {}}%%", "end", "]", "}", "|", ":x", "style a:#b;",
           "$$", "-->", "\\N", "\\n", "fa:fa-car", "style x", "1. ", ";", "\x01", "日本", "subgraph", "x"]  # fmt: skip

_LABEL = r'"(?:[^"#&<>`\\$\x00-\x1f]|#\d+;|<br/>)*"'
_MERMAID = [
    re.compile(r"flowchart TB"),
    re.compile(rf"( +)subgraph n\d+\[{_LABEL}\]"),
    re.compile(r"( +)direction TB"),
    re.compile(r"( +)end"),
    re.compile(rf"( +)n\d+(?:\[{_LABEL}\]|\({_LABEL}\)|\(\[{_LABEL}\]\)|\{{\{{{_LABEL}\}}\}})"),
    re.compile(rf"( +)n\d+ (?:-->|-\.->)(?:\|{_LABEL}\|)? n\d+"),
    re.compile(r"( +)classDef \w+ [\w-]+: \d+ \d+"),
    re.compile(r"( +)class n\d+(?:,n\d+)* \w+"),
    re.compile(r"( +)linkStyle \d+(?:,\d+)* [\w-]+: \d+ \d+"),
]
_DOT_TOKEN = re.compile(r'\s+|"(?:[^"\\\x00-\x1f]|\\[^\x00-\x1f])*"|->|[A-Za-z_]\w*|[0-9.]+|[{}\[\]=,]')


def mermaid_lines(text: str) -> list[str]:
    """The lines of a flowchart, each of them one that Mermaid's grammar has."""
    lines = text.splitlines()
    assert [] == [line for line in lines if not any(form.fullmatch(line) for form in _MERMAID)]
    assert sum(line.strip() == "end" for line in lines) == sum("subgraph" in line.split('"')[0] for line in lines)
    return lines


def dot_tokens(text: str) -> list[str]:
    """The tokens of a DOT file, its brackets closed and its edges between declared nodes."""
    tokens, at = [], 0
    while at < len(text):
        found = _DOT_TOKEN.match(text, at)
        assert found is not None, text[at : at + 80]
        at = found.end()
        tokens.append(found[0])
    tokens = [token for token in tokens if token.strip()]
    depth: list[str] = []
    for token in tokens:
        if token in ("{", "["):
            depth.append({"{": "}", "[": "]"}[token])
        elif token in ("}", "]"):
            assert token == depth.pop()
    assert [] == depth
    declared = {one for one, after in pairwise(tokens) if re.fullmatch(r"n\d+", one) and after == "["}
    ends = {tokens[i + step] for i, token in enumerate(tokens) if token == "->" for step in (-1, 1)}
    assert ends <= declared
    return tokens


def unescaped(label: str) -> list[str]:
    """Lines of a Mermaid label as they are shown; nothing is left that it would take for a formula, line or icon."""
    lines = [re.sub(r"#(\d+);", lambda found: chr(int(found[1])), line) for line in label.split("<br/>")]
    assert not any(re.search(r"\$\$|\\n|fa:fa-", line) for line in lines)
    return [line.replace("\u2060", "") for line in lines]


@pytest.mark.parametrize("name", PLANS)
def test_every_graph_is_valid_in_every_format(name):
    """Each line of Mermaid and each token of DOT is legal, and every box and edge is there once."""
    diagram = build_diagram(PLANS[name])
    boxes = list(diagram.boxes())
    edges = [edge for box in boxes if isinstance(box, Group) for edge in box.edges]
    lines = mermaid_lines(render_mermaid(diagram))
    declared = [found[1] for line in lines if (found := re.match(r" +(?:subgraph )?(n\d+)[\[({]", line))]
    assert [box.id for box in boxes] == declared
    assert len(edges) == sum(bool(re.match(r" +n\d+ -", line)) for line in lines)
    tokens = dot_tokens(render_dot(diagram))
    assert len(edges) == tokens.count("->")
    assert sum(isinstance(box, Group) for box in boxes) == tokens.count("subgraph")
    titles = [f"{box.title} [{box.kind}]" if isinstance(box, Group) else box.title for box in boxes]
    outline = render_text(diagram)
    assert all(title in outline for title in titles)


@pytest.mark.parametrize("seed", range(30))
def test_hostile_text_stays_text(seed):
    """Whatever a name or condition holds, the files stay valid and show just that."""
    generator = random.Random(seed)

    def words() -> str:
        return "s" + "".join(generator.choices(HOSTILE, k=6))

    first, second = Item("n2", words(), [words(), words()]), Item("n3", words(), role=Role.CHOICE)
    inner = Group(
        "n4", words(), [words()], kind="switch", items=[Item("n5", words(), role=Role.MERGE)], stroke=Stroke.DASHED
    )
    edges = [Edge("n2", "n3", [words()], stroke=Stroke.DOTTED), Edge("n3", "n4", [words(), words()], words())]
    diagram = Group("n1", words(), [words()], words(), kind="sequence", items=[first, second, inner], edges=edges)
    lines = mermaid_lines(render_mermaid(diagram))
    label = next(line for line in lines if line.strip().startswith("n2["))
    assert [first.title, *first.lines] == unescaped(label.strip().removeprefix('n2["').removesuffix('"]'))
    assert not any("%%" in line or re.search(r":\S*#\d", line) for line in lines)
    dot_tokens(render_dot(diagram))
    assert render_text(diagram).count("\n") >= 5


def test_dot_ends_an_edge_to_a_box_at_its_border():
    """An edge to a cluster really ends at a node in it; lhead and ltail cut it at the border."""
    text = render_dot(build_diagram(PLANS["loop"]))
    clusters = re.findall(r"subgraph (cluster_n\d+)", text)
    assert "compound=true" in text
    assert f'lhead="{clusters[1]}"' in text
    assert f'ltail="{clusters[1]}"' in text
    assert 'constraint="false"' in text


def test_mermaid_marks_soft_steps_and_shadows():
    """Soft boxes have a class, shadows another; links of shadows are dotted more finely than soft ones."""
    diagram = build_diagram(PLANS["rich"])
    text = render_mermaid(diagram)
    ids = {box.title: box.id for box in diagram.boxes()}
    assert {ids["lid"], ids["large"], ids["two"], ids["three"]} == set(
        re.search(r"class (\S+) soft", text)[1].split(",")
    )
    assert {ids["C"], ids["audit"]} == set(re.search(r"class (\S+) shadow", text)[1].split(","))
    links = [line for line in text.splitlines() if re.match(r" +n\d+ -", line)]
    numbers = map(int, re.search(r"linkStyle (\S+) ", text)[1].split(","))
    assert {ids["C"], ids["audit"]} == {links[number].split()[-1] for number in numbers}
