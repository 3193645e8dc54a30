"""``python -m tests.compat.tool_parsers --vllm DIR --smg DIR``: run others' tests of tool parsers with the gateway's.

What differs is listed with its reason in ``differences.txt``; anything else that fails is an error, and so is a listed
test that passes. With ``--write`` the counts go into docs/openai.md.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.case_files import table
from tests.compat.tool_parsers import smg

from weft.gateway.openai.tools import FORMATS

HERE = Path(__file__).parent
GUIDE = HERE.parents[2] / "docs/openai.md"
#: The files of vLLM's tests by the format of their parser.
FILES = {
    "test_hermes_tool_parser.py": "hermes",
    "test_granite4_tool_parser.py": "hermes",
    "test_llama3_json_tool_parser.py": "llama3_json",
    "test_pythonic_tool_parser.py": "pythonic",
    "test_llama4_pythonic_tool_parser.py": "pythonic",
    "test_qwen3coder_tool_parser.py": "qwen3_xml",
}
_TABLE = re.compile(r"(<!-- tool parsers: .*? -->\n).*?(<!-- end -->)", re.DOTALL)


def vllm_results(checkout: Path, tokens: str) -> Iterator[tuple[str, str, bool]]:
    """Format, test, and whether it fails, of each test."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "results.json"
        paths = [str(checkout), str(HERE), os.environ.get("PYTHONPATH", "")]
        environment = {"PYTHONPATH": os.pathsep.join(paths), "WEFT_RESULTS": str(written), "WEFT_TOKENS": tokens}
        files = [f"tests/tool_parsers/{name}" for name in FILES]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "vllm_plugin", "--noconftest", "-c", os.devnull]
        options = ["-p", "no:cacheprovider", f"--rootdir={checkout}"]
        said = subprocess.run(
            [*command, *options, *files],
            cwd=checkout,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if not written.exists():
            raise SystemExit(said.stdout + said.stderr)
        for name, outcome in json.loads(written.read_text()).items():
            yield FILES[name.partition("::")[0]], name, outcome == "failed"


def main() -> int:
    """Run them and print one table; exit status 0: what differs is what is listed."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat.tool_parsers", description=__doc__)
    parser.add_argument("--vllm", type=Path, required=True, help="a checkout of vllm-project/vllm, or its sdist")
    parser.add_argument("--smg", type=Path, required=True, help="a checkout of lightseekorg/smg")
    parser.add_argument("--write", action="store_true", help="write the counts into docs/openai.md")
    options = parser.parse_args()
    failed: dict[str, bool] = {}
    counts: dict[tuple[str, str], dict[str, bool]] = defaultdict(dict)
    for tokens in ("words", "characters"):
        for name, test, fails in vllm_results(options.vllm.resolve(), tokens):
            failed[test] = counts["vLLM", name][test] = fails or failed.get(test, False)
    for name, test, difference in smg.results(options.smg / "crates/tool_parser/tests"):
        failed[test] = counts["smg", name][test] = bool(difference)
        if difference:
            print(f"{test}: {difference[:200]}")
    reasons = {str(row.values[0]): str(row.values[1]) for row in table(HERE / "differences.txt", "test")}
    wrong = [test for test, fails in failed.items() if fails != (test in reasons)]
    lines = ["| format | vLLM's tests: pass of all | smg's tests: pass of all |", "|---|---|---|"]
    for name in FORMATS:
        cells = (counts[project, name].values() for project in ("vLLM", "smg"))
        shown = (f"{sum(not fails for fails in each)} of {len(each)}" if each else "has none" for each in cells)
        lines.append(f"| `{name}` | {' | '.join(shown)} |")
    tests_of: dict[str, list[str]] = defaultdict(list)
    for test, reason in reasons.items():
        tests_of[reason].append(test.partition("::")[2])
    lines += ["", "Those that fail, and why:", ""]
    lines += [f"- {reason}: {', '.join(f'`{test}`' for test in tests)}" for reason, tests in tests_of.items()]
    print("\n".join([*lines, *(f"not as listed: {test}" for test in wrong)]))
    if options.write and not wrong:
        written = "\n".join(lines)
        GUIDE.write_text(_TABLE.sub(lambda match: f"{match[1]}{written}\n{match[2]}", GUIDE.read_text()))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
