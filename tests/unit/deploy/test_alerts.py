"""Alert rules, by Prometheus itself: each fires and resolves."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

CASES = Path(__file__).with_name("alerts_test.yml")
RUNBOOKS = Path(__file__).parents[3] / "docs/runbooks.md"
RULES = Path(__file__).parents[3] / "deploy/kubernetes/components/prometheus/alerts.yml"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_alerts_fire_and_resolve() -> None:
    """As the cases say, in Prometheus's own evaluation."""
    for arguments in (["check", "rules", RULES], ["test", "rules", CASES]):
        done = subprocess.run(
            ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_resolves() -> None:
    """It is silent, then fires, then is silent again, in one case."""
    rules = [rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    cases = yaml.safe_load(CASES.read_text())["tests"]
    shown = {
        case["alert_rule_test"][0]["alertname"]
        for case in cases
        if [bool(test.get("exp_alerts")) for test in case["alert_rule_test"]] == [False, True, False]
    }
    assert set(rules) == shown


def test_every_alert_has_a_section_of_the_runbooks() -> None:
    """The page that it names has what to look at and what to do."""
    for rule in [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]:
        assert f"docs/runbooks.md#{rule['alert'].lower()}" == rule["annotations"]["runbook_url"]
        (section,) = re.findall(
            rf"^## {rule['alert']}\n(.*?)(?=^## |\Z)", RUNBOOKS.read_text(), re.DOTALL | re.MULTILINE
        )
        assert ("- Look:" in section and "- Do:" in section) or section.startswith("\nAs above"), rule["alert"]
