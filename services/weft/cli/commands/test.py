"""``weft test``: runs the cases beside graphs, without a server, and tells which parts of a graph they reach."""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as Xml

from weft.base.errors import WeftError
from weft.base.text.argument_types import add, not_negative
from weft.base.text.pbtxt import Diagnostic, render
from weft.base.text.suggestion import printable
from weft.cli.arguments import add_json_argument
from weft.language.description import counted
from weft.language.plan import steps_of
from weft.router.reporting.path import SKIPPED
from weft.testing.graph_cases import CaseResult, suites_of
from weft.tools.offline import GRAPH_FOLDER, OfflineCatalog, diagnostics_of

_FILENAME = "cases.pbtxt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft test``."""
    option = partial(add, parser)
    parser.description = "Run the cases beside graphs, on the router's executor and a fake clock, without a server."
    parser.epilog = "example: weft test triage --require-coverage 80"
    option("paths PATH", f"a {_FILENAME}, a folder with some, or a graph's name; default: the repository", nargs="*")
    option("--repository DIR (model_repository)", "where graphs are found by name", Path)
    option("-k NAME", "run only cases that have this in their names", default="")
    option("--update", "write the answers of cases with golden: true")
    option("--require-coverage PERCENT", "fail if cases reach less of a graph", not_negative, default=0.0)
    option("--junit FILE", "write the results as JUnit XML", Path)
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Run cases; 0 all pass, 1 one fails or the coverage is too low, 2 there is none or a file has errors."""
    found, results, catalogs = list[Diagnostic](), list[CaseResult](), dict[Path, OfflineCatalog]()
    for file in _files(options):
        try:
            for suite in suites_of(file, catalogs):
                results += suite.run(options.k, is_update=options.update)
        except (WeftError, OSError) as error:
            found += diagnostics_of(error, file)
    reached = _reached(results)
    if options.junit is not None:
        options.junit.write_bytes(_junit(results))
    if options.json:
        keys = ("title", "path", "ms", "graph_ms", "faults")
        cases = [{key: getattr(one, key) for key in keys} for one in results]
        print(json.dumps({"cases": cases, "reached": reached}))
    elif results:
        print(_table(results, reached))
    if found or not results:
        cure = f"with '{options.k}' in its name" if options.k else f"write a {_FILENAME} beside a graph.pbtxt"
        print(render(found) or f"weft test: no case; {cure}", file=sys.stderr)
        return 2
    least = min(100 * sum(parts.values()) / len(parts) for parts in reached.values())
    return int(any(one.faults for one in results) or least < options.require_coverage)


def _files(options: argparse.Namespace) -> list[Path]:
    """The files of cases that are meant by files, folders and names of graphs."""
    found = dict[Path, None]()
    for given in options.paths or [options.repository]:
        place, named = Path(given), options.repository / GRAPH_FOLDER / given
        place = named if named.is_dir() and not place.exists() else place
        found |= dict.fromkeys(sorted(place.rglob(_FILENAME)) if place.is_dir() else [place])
    return [*found]


def _reached(results: Sequence[CaseResult]) -> Mapping[str, Mapping[str, bool]]:
    """Of each graph, whether a case has reached a step, branch, fallback or default."""
    reached: dict[str, dict[str, bool]] = defaultdict(lambda: defaultdict(bool))
    for result in results:
        parts, statuses = reached[result.suite.title], defaultdict(set, result.statuses)
        for node, step in steps_of(result.suite.plan.root):
            kind = "fallback" if ">" in step.path.rpartition("/")[2] else node.kind
            parts[f"{'step' if kind == 'sequence' else kind} {step.path}"] |= bool(statuses[step.path] - {SKIPPED})
            if step.defaults:
                last = step.fallback or step
                is_used = SKIPPED in statuses[step.path] or statuses[last.path] - {"OK", SKIPPED}
                parts[f"default of {step.path}"] |= bool(is_used)
    return reached


def _table(results: Sequence[CaseResult], reached: Mapping[str, Mapping[str, bool]]) -> str:
    """A line for each case, with milliseconds and path, and below it what is not as expected; then the coverage."""
    width = max([4, *(len(one.title) for one in results)])
    lines = [f"{'case':<{width}}  result       ms  path"]
    for one in results:
        lines.append(f"{one.title:<{width}}  {'FAILED' if one.faults else 'passed'}  {one.ms:7.1f}  {one.path}")
        lines += [f"    {line}" for text in one.faults for line in str(text).splitlines()]
    for title, parts in reached.items():
        num_reached = sum(parts.values())
        lines.append(f"{title}: {100 * num_reached / len(parts):.0f} % covered, {num_reached} of {len(parts)}")
        lines += [f"    no case reaches {name}" for name, is_reached in parts.items() if not is_reached]
    num_failed, total_ms = sum(bool(one.faults) for one in results), sum(one.ms for one in results)
    return printable("\n".join([*lines, f"{counted(len(results), 'case')}, {num_failed} failed, {total_ms:.0f} ms"]))


def _junit(results: Sequence[CaseResult]) -> bytes:
    root = Xml.Element("testsuite", name="weft", tests=str(len(results)))
    for one in results:
        names = {"classname": one.suite.title, "name": printable(one.case.name), "file": str(one.suite.path)}
        case = Xml.SubElement(root, "testcase", names, time=f"{one.ms / 1e3:.4f}")
        if one.faults:
            Xml.SubElement(case, "failure", message="not as expected").text = printable("\n".join(one.faults))
    return bytes(Xml.tostring(root, "utf-8", xml_declaration=True))
