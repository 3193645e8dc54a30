"""The examples of docs/python-models.md that write and test a model run as they stand there."""

import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/python-models.md").read_text()


def code(section: str) -> list[str]:
    """Python of a section."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_a_model_as_a_function_and_its_test(tmp_path, monkeypatch):
    """The function of the page is a model, which is written, and the test of the page passes with it."""
    path = tmp_path / "readings.py"
    (function,), (test, _) = code("Write a model as a function"), code("Test a model without a server")
    path.write_text(f"{function}\n\n{test}")
    spec = importlib.util.spec_from_file_location("readings", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "readings", module)
    spec.loader.exec_module(module)
    module.test_top2()
    assert "\n\nNUM_BEST = 2\n\n\ndef top2(PROBS):" in module.top2.text
