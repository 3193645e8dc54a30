"""``weft replay``: sends recorded requests again, and tells which answers change."""

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import sys
import urllib.request
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from functools import partial
from pathlib import Path

from weft.authoring.models import models
from weft.authoring.writing import read
from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.base.security.arguments import add_channel_arguments
from weft.base.text.argument_types import add, not_negative, not_negative_integer, positive_integer
from weft.changes.comparison import RULES, Comparison
from weft.changes.replay import ReplayOptions, Target, local_target, read_records, replay, served_target
from weft.changes.report import Report
from weft.cli.arguments import add_json_argument, pair
from weft.mesh.registry import the_mesh
from weft.tools.offline import find_graph, repository_of
from weft.v2.client.v2_client import V2Client
from weft.v2.security.channel import channel_security

_TIMEOUT_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft replay``."""
    option = partial(add, parser)
    parser.description = (
        "Send the requests of recordings to a graph, and compare its answers with the recorded ones or with those of "
        "another. Exit status: 0 the same, 1 more differ than may, 2 wrong usage."
    )
    parser.epilog = "example: weft replay recordings/*.weft.zst --against new/graph.pbtxt"
    option("files FILE", "recordings of weft record", Path, nargs="+")
    text = "a graph file, run in this process with its repository's models; or a name, NAME/VERSION for one version"
    option("--against GRAPH", f"{text}, of the server at --url, else of the repository", required=True)
    option("--and GRAPH", "compare with the answers of this one in place of the recorded ones", dest="other")
    option("--url URL", "a server; default: names are graphs of the repository")
    option("--repository DIR", "default: the one that the file is in, else ./model_repository", Path)
    option("--metrics URL ...", "metrics of the server's services, for its CPU time; may be repeated")
    option("--compare OUTPUT=RULE ...", f"one of {', '.join(RULES)}; default: floats close, the rest exact", pair)
    option("--rtol X (1e-5)", "for close: allowed difference, of the value", not_negative)
    option("--atol X (1e-5)", "and as it is", not_negative)
    option("--max-differences N (0)", "requests whose answers may differ", not_negative_integer)
    option("--concurrency N (32)", "requests in flight at once", positive_integer)
    option("--pace X", "send as they came, 2: twice as fast; default: as fast as it goes", not_negative, default=0.0)
    option("--times N (1)", "send all of them so often", positive_integer)
    option("--markdown", "print Markdown, for a pull request")
    add_json_argument(parser)
    add_channel_arguments(parser.add_argument_group("security"))


def run(options: argparse.Namespace) -> int:
    """Replay; returns the exit status."""
    try:
        report, notes = asyncio.run(_replay(options))
    except (InvalidArgumentError, NotFoundError, OSError) as error:
        print(f"weft replay: {error}", file=sys.stderr)
        return 2
    for note in notes:
        print(f"weft replay: note: {note}", file=sys.stderr)
    print(json.dumps({**report.facts(), "notes": notes}) if options.json else report.text())
    return 1 if report.num_different > options.max_differences else 0


async def _replay(options: argparse.Namespace) -> tuple[Report, list[str]]:
    recorded = read_records(options.files)
    rules = dict.fromkeys(recorded.unknown, "ignore") if not options.other else {}
    comparison = Comparison(rules | dict(options.compare), options.rtol, options.atol)
    if unknown := [rule for rule in comparison.rules.values() if rule not in RULES]:
        raise InvalidArgumentError(f"--compare: '{unknown[0]}' is no rule; use one of {', '.join(RULES)}")
    how = ReplayOptions(options.concurrency, options.pace, options.times, comparison)
    notes = [f"'{path}' has no end: its recorder was killed, and its last second is lost" for path in recorded.cut]
    if recorded.num_withheld:
        notes.append(f"{recorded.num_withheld:,} requests were not sent: they lack inputs that were left out or hashed")
    async with contextlib.AsyncExitStack() as stack:
        names = [options.against, options.other] if options.other else [options.against]
        targets = [await stack.enter_async_context(_target(name, options)) for name in names]
        with _bar(len(recorded.records) * options.times * len(targets)) as show:
            return await replay(recorded.records, targets, how, show), notes


@contextlib.asynccontextmanager
async def _target(name: str, options: argparse.Namespace) -> AsyncGenerator[Target, None]:
    if options.url is None or Path(name).is_file():
        repository = options.repository or repository_of(Path(name))
        graph = read(find_graph(name, repository).file)
        if repository is not None:
            known = models(repository)
            graph.catalog, graph.graphs = known.catalog, known.graphs
        async with local_target(graph, name) as target:
            yield target
        return
    mesh = the_mesh(options.url, lambda mesh: mesh.router)
    metrics = options.metrics or (list(mesh.metrics_addresses().values()) if mesh is not None else [])
    name, _, version = name.partition("/")
    async with V2Client(options.url, security=channel_security(options)) as client:
        await client.signature(name, version, timeout_s=_TIMEOUT_S)  # there is one
        yield served_target(client, name, version, partial(_cpu_s, metrics) if metrics else lambda: None)


def _cpu_s(metrics: Sequence[str]) -> float | None:
    """CPU time of all services; None if one does not tell it."""
    total_s = 0.0
    for url in metrics:
        try:
            with urllib.request.urlopen(url if "/" in url else f"http://{url}/metrics", timeout=_TIMEOUT_S) as page:  # noqa: S310  # the user's own
                found = re.findall(rb"^process_cpu_seconds_total\S* (\S+)$", page.read(), re.MULTILINE)
        except OSError:
            return None
        total_s += sum(map(float, found))
    return total_s


@contextlib.contextmanager
def _bar(total: int) -> Generator[Callable[[], None], None, None]:
    """Show progress on a terminal with `rich`, else a line for each tenth."""
    if not sys.stderr.isatty():
        count = itertools.count(1)

        def show() -> None:
            if (done := next(count)) * 10 % total < 10:
                print(f"weft replay: {done:,} of {total:,} answers", file=sys.stderr)

        yield show
        return
    from rich.console import Console  # noqa: PLC0415  # an extra, jobs
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn  # noqa: PLC0415  # same

    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replay", total=total)
        yield partial(bar.advance, task)
