"""The table of architectures in the page of language models, which a benchmark writes."""

import os

import pytest
from benchmarks.language_model import architectures


def test_the_table_is_what_the_code_says() -> None:
    """A row for each architecture, with its formats and speculators; WEFT_UPDATE_GOLDEN adds rows without a cost."""
    page = architectures.PAGE.read_text(encoding="utf-8")
    expected = architectures.with_table(page, architectures.costs_of(page))
    if os.environ.get("WEFT_UPDATE_GOLDEN"):
        architectures.PAGE.write_text(expected, encoding="utf-8")
    else:
        assert page == expected


def test_costs_are_kept() -> None:
    """A cost stays beside its architecture, whatever rows come and go; what is not measured has a dash."""
    name = architectures.rows()[1].name
    page = architectures.with_table("a\n<!-- architectures -->\n| old |\n<!-- end -->\nb", {name: "1.25"})
    costs = architectures.costs_of(page)
    assert costs.pop(name) == "1.25"
    assert set(costs.values()) == {"-", "decode", "---"}
    assert page.startswith("a\n")
    assert page.endswith("<!-- end -->\nb")
    assert architectures.with_table(page, architectures.costs_of(page)) == page


def test_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    """The benchmark measures what is in the table."""
    assert architectures.main(["Other"]) == 2
    assert "no architecture Other; there are LlamaForCausalLM" in capsys.readouterr().err
