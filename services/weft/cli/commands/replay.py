"""``weft replay``: sends recorded requests again, and tells which answers change."""

import argparse
import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from functools import partial
from pathlib import Path

from weft.authoring.models import models
from weft.authoring.writing import read
from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.security.arguments import add_channel_arguments
from weft.base.text.argument_types import add, not_negative, not_negative_integer, positive_integer
from weft.changes.comparison import RULES, Comparison, Report
from weft.changes.replay import Recorded, Target, local_target, replay, served_target
from weft.cli.arguments import add_json_argument, pair
from weft.mesh.registry import the_mesh
from weft.tools.offline import find_graph, repository_of
from weft.v2.client.frames import scrape
from weft.v2.client.v2_client import V2Client
from weft.v2.security.channel import channel_security


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft replay``."""
    option = partial(add, parser)
    parser.description = (
        "Send the requests of recordings to a graph, and compare its answers with the recorded ones or with those of "
        "another. Exit status: 0 the same, 1 more differ than may, 2 wrong usage."
    )
    parser.epilog = "example: weft replay recordings/*.weft.zst --against new/graph.pbtxt"
    option("files FILE", "recordings of weft record", Path, nargs="+")
    text = "a graph file, run in this process with its repository's models, or a name, NAME/VERSION for one version"
    option("--against GRAPH", f"{text}, at --url, else of the repository", required=True)
    option("--and GRAPH", "compare with the answers of this one, and not with the recorded ones", dest="other")
    option("--url URL", "a server that has the names")
    option("--repository DIR", "default: the one that a file is in, else ./model_repository", Path)
    option("--compare OUTPUT=RULE ...", f"{', '.join(RULES)}; default: floats close, the rest exact", pair)
    option("--rtol X (1e-5)", "of close: allowed difference, relative", not_negative)
    option("--atol X (1e-5)", "and absolute", not_negative)
    option("--max-differences N (0)", "requests whose answers may differ", not_negative_integer)
    option("--concurrency N (32)", "requests in flight at once", positive_integer)
    option("--pace X (0)", "1: send as they came, 2: twice as fast, 0: as fast as it goes", not_negative)
    option("--times N (1)", "send all of them so often", positive_integer)
    option("--markdown", "print Markdown, for a pull request")
    add_json_argument(parser)
    add_channel_arguments(parser.add_argument_group("security"))


def run(options: argparse.Namespace) -> int:
    """Replay; returns the exit status. Raises WeftError: a target cannot be used."""
    log = logging.getLogger("weft")
    level = log.level
    log.setLevel(logging.ERROR)  # of models in this process
    try:
        report, notes = asyncio.run(replayed(options))
    except (WeftError, OSError) as error:
        print(f"weft replay: {error}", file=sys.stderr)
        return 2
    finally:
        log.setLevel(level)
    print(*(f"weft replay: note: {note}" for note in notes), sep="\n", end="\n" * bool(notes), file=sys.stderr)
    facts = report.facts() | {"notes": notes}
    print(json.dumps(facts) if options.json else report.text(is_markdown=options.markdown))
    return 1 if report.num_different > options.max_differences else 0


async def replayed(options: argparse.Namespace) -> tuple[Report, list[str]]:
    """What a replay found, and notes. Raises as ``run`` catches."""
    recorded = Recorded(options.files)
    rules = {} if options.other else dict.fromkeys(recorded.unknown, "ignore")
    comparison = Comparison(rules | dict(options.compare), options.rtol, options.atol)
    if unknown := [rule for rule in comparison.rules.values() if rule not in RULES]:
        raise InvalidArgumentError(f"--compare: '{unknown[0]}' is no rule; use one of {', '.join(RULES)}")
    notes = [f"'{path}' has no end: its recorder was killed, up to two seconds are lost" for path in recorded.cut]
    if recorded.num_withheld:
        notes.append(f"{recorded.num_withheld:,} requests were not sent: inputs or parameters are left out or hashed")
    how = {name: getattr(options, name) for name in ("concurrency", "pace", "times")}
    async with contextlib.AsyncExitStack() as stack:
        names = [*([options.other] if options.other else []), options.against]
        targets = [await stack.enter_async_context(_target(name, options)) for name in names]
        show = stack.enter_context(_bar(recorded.num_records * options.times * len(targets)))
        return await replay(recorded, targets, show, comparison=comparison, **how), notes


@contextlib.asynccontextmanager
async def _target(label: str, options: argparse.Namespace) -> AsyncGenerator[Target, None]:
    if options.url is None or Path(label).is_file():  # noqa: ASYNC240  # before any request
        repository = options.repository or repository_of(Path(label))
        graph = read(find_graph(label, repository).file)
        if repository is not None:
            known = models(repository)
            graph.catalog, graph.graphs = known.catalog, known.graphs
        async with local_target(graph, label) as target:
            yield target
        return
    mesh = the_mesh(options.url, lambda mesh: mesh.router)

    def cpu_s() -> float | None:
        pages = {} if mesh is None else scrape(mesh.metrics_addresses())
        return sum(page.value("process_cpu_seconds_total") for page in pages.values()) or None

    name, _, version = label.partition("/")
    async with V2Client(options.url, security=channel_security(options)) as client:
        await client.signature(name, version, timeout_s=10.0)  # there is one
        yield served_target(client, name, version, cpu_s)


@contextlib.contextmanager
def _bar(total: int) -> Generator[Callable[[], None], None, None]:
    """Show progress, on a terminal."""
    if not sys.stderr.isatty():
        print(f"weft replay: {total:,} requests", file=sys.stderr)
        yield lambda: None
        return
    from rich.console import Console  # noqa: PLC0415  # an extra
    from rich.progress import MofNCompleteColumn, Progress  # noqa: PLC0415  # same

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield partial(bar.advance, bar.add_task("replay", total=total))
