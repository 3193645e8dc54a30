"""Planted faults that unit tests must find: cosmic-ray's mutants of queue, batcher, scheduler, compiler, executor.

``python -m tests.mutants`` plants every mutation that ``mutants.txt`` lists as killed, in a copy of the sources, and
fails where one lives now. A mutation is known by the text of its line, so that it is found again where code has moved;
one whose line is gone is counted. ``--draw N`` draws N of each area and prints a new list.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".txt")
#: Tests that take longer than this hang, and so have found the mutant.
TIMEOUT_S = 240
OPERATORS = (
    "ReplaceComparison",
    "ReplaceTrue",
    "ReplaceFalse",
    "ReplaceAnd",
    "ReplaceOr",
    "AddNot",
    "NumberReplacer",
    "ReplaceBinaryOperator_Add_Sub",
    "ReplaceBinaryOperator_Sub_Add",
    "ReplaceBreak",
    "ReplaceContinue",
)


class Area(NamedTuple):
    """The sources that are mutated and the tests that must notice, as patterns below the repository's root."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


WEFT, UNIT = "services/weft", "tests/unit"
AREAS = {
    "queue": Area(
        (f"{WEFT}/serving/queues/*.py",), (f"{UNIT}/serving/test_*queue*.py", f"{UNIT}/serving/test_config.py")
    ),
    "batcher": Area(
        (f"{WEFT}/serving/scheduler/*.py", f"{WEFT}/serving/queues/*.py"),
        tuple(f"{UNIT}/serving/test_*{word}*.py" for word in ("queue", "grouping", "scheduler")),
    ),
    "scheduler": Area(
        (f"{WEFT}/llm/scheduler/*.py",),
        tuple(f"{UNIT}/llm/test_*{word}*.py" for word in ("scheduler", "preemption", "prefix", "blocks", "offload")),
    ),
    "compiler": Area((f"{WEFT}/language/**/*.py",), (f"{UNIT}/language",)),
    "executor": Area(
        (f"{WEFT}/router/*.py", f"{WEFT}/router/steps/*.py", f"{WEFT}/router/operators/**/*.py"),
        tuple(f"{UNIT}/router/{name}" for name in ("test_cases.py", "test_executor*.py", "operators", "steps")),
    ),
}


class Mutant(NamedTuple):
    """A mutation, by the text of its line before and after."""

    area: str
    operator: str
    before: str
    after: str


class Site(NamedTuple):
    """Where an operator of cosmic-ray applies: its occurrence in a file, and the text of the line."""

    path: Path
    operator: str
    occurrence: int
    line: int
    before: str

    def mutant(self, area: str) -> tuple[Mutant, str] | None:
        """The mutant and the mutated text of the file; None if more than the one line changes, or none."""
        code = self.path.read_text()
        text = mutate_code(code, get_operator(self.operator)(), self.occurrence)
        lines, changed = code.splitlines(), [] if text is None else text.splitlines()
        if text is None or len(changed) != len(lines) or changed[self.line - 1] == lines[self.line - 1]:
            return None
        after = changed[self.line - 1].strip()
        return Mutant(area, self.operator.removeprefix("core/"), self.before, after), text

    def order(self) -> str:
        """Where it stands in a drawing: by chance, and the same each time."""
        return hashlib.sha256(f"{self.operator} {self.before} {self.occurrence}".encode()).hexdigest()


def sites(path: Path) -> Iterator[Site]:
    """Yield every place of a file where one of the operators applies."""
    code = path.read_text()
    lines, tree = code.splitlines(), get_ast(code)
    for name in sorted(operator_names()):
        if name.removeprefix("core/").startswith(OPERATORS):
            operator = get_operator(name)()
            positions = (position for node in ast_nodes(tree) for position in operator.mutation_positions(node))
            for occurrence, ((line, _), _) in enumerate(positions):
                yield Site(path, name, occurrence, line, lines[line - 1].strip())


def matches(patterns: tuple[str, ...]) -> list[Path]:
    """Return the files and folders that match any of the patterns, each once."""
    return sorted({found for pattern in patterns for found in ROOT.glob(pattern)})


def outcome(path: Path, text: str, area: Area, copy: Path) -> str:
    """Run an area's tests with one source replaced; 'lives' if all pass, else 'killed'."""
    planted = copy / path.relative_to(ROOT / "services")
    planted.write_text(text)
    try:
        return "lives" if tests_pass(area, copy) else "killed"
    finally:
        shutil.copy(path, planted)


def tests_pass(area: Area, copy: Path) -> bool:
    """Whether an area's tests pass on the copy of the sources; tests that hang do not."""
    options = ("-q", "-x", "-m", "not long", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *options, *map(str, matches(area.tests))]
    paths = f"{copy}:{ROOT / 'protos'}:{ROOT / 'kernels'}"
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        tests = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return tests.returncode == 0


def main() -> int:
    """Check the list, or draw a new one; 1 if a mutant lives that was killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="print a new list, of N mutants of each area")
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(AREAS)}; default: all")
    options = parser.parse_args()
    num_drawn = options.draw
    listed = [line.split("\t") for line in LIST.read_text().splitlines()] if not num_drawn else []
    killed = {Mutant(*row[1:]) for row in listed if row[0] == "killed"}
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "services"
        shutil.copytree(ROOT / "services", copy, ignore=shutil.ignore_patterns("__pycache__"))
        for name in options.areas or AREAS:
            area = AREAS[name]
            if not tests_pass(area, copy):
                parser.exit(2, f"{name}: the tests fail without a mutant; see to that first\n")
            everywhere = [site for path in matches(area.sources) for site in sites(path)]
            wanted: set[Mutant] = set()
            if num_drawn:
                chosen = sorted(everywhere, key=Site.order)
            else:
                wanted = {mutant for mutant in killed if mutant.area == name}
                keys = {(f"core/{mutant.operator}", mutant.before) for mutant in wanted}
                chosen = [site for site in everywhere if (site.operator, site.before) in keys]
            outcomes: dict[Mutant, str] = {}
            for site in chosen:
                made = site.mutant(name)
                if made is None or (made[0] not in wanted and not num_drawn):
                    continue
                if made[0] in outcomes and (num_drawn or outcomes[made[0]] == "killed"):
                    continue  # of a line that stands in several places, one that the tests watch is enough
                outcomes[made[0]] = outcome(site.path, made[1], area, copy)
                if len(outcomes) == num_drawn:
                    break
            counts.update(outcomes.values())
            counts["gone"] += 0 if num_drawn else len(wanted) - len(outcomes)
            for mutant, result in outcomes.items():
                if num_drawn or result == "lives":
                    print("\t".join((result, *mutant)), flush=True)
    print(dict(counts), file=sys.stderr)
    return int(not num_drawn and counts["lives"] > 0)


if __name__ == "__main__":
    sys.exit(main())
