"""``weft diff``: what a change of a graph means for its clients, its users and its costs."""

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from weft.base.errors import WeftError
from weft.base.security.arguments import add_channel_arguments
from weft.base.text.argument_types import add
from weft.changes.diff import CLASSES, Section, compare, json_of, markdown_of, text_of
from weft.cli.arguments import add_json_argument
from weft.cli.commands import replay
from weft.cli.plan import sides_or_status
from weft.tools.offline import repository_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft diff``."""
    option = partial(add, parser)
    parser.description = (
        "Compare two graphs: the clients that break, the steps, the users that move, calls and time at most. A graph "
        "is a file, NAME or NAME/VERSION, or REVISION:GRAPH, as a revision of Git has it with its repository."
    )
    parser.epilog = "example: weft diff main:triage triage --markdown --exit-code"
    option("before BEFORE", "the graph as it was")
    option("after AFTER", "the graph as it would be")
    option("--repository DIR", "models and other graphs; default: that around a file, else ./model_repository", Path)
    option("--lock FILE", "take the signatures of models from this file of weft lock", Path)
    option("--url ADDRESS", "NAME and NAME/VERSION are what this router serves")
    option(
        "--recording FILE ...",
        "requests of weft record: which answers change, p50, p99, with the models of AFTER",
        Path,
    )
    option("--replay ARGUMENTS", "of weft replay: '--compare PROBS=top1 --concurrency 8'", default="")
    option("--markdown", "for a pull request")
    add_json_argument(parser)
    text = f"exit with 1 if there is a change of this class: {', '.join(CLASSES)}; without a value: breaking"
    option("--exit-code CLASS ...", text, nargs="?", const="breaking", choices=CLASSES)
    add_channel_arguments(parser.add_argument_group("security"))


def run(options: argparse.Namespace) -> int:
    """Compare; 0 done, 1 a graph has errors, or --exit-code applies, 2 there is no such graph."""
    with tempfile.TemporaryDirectory() as folder:
        sides = sides_or_status((options.before, options.after), options, Path(folder))
        if isinstance(sides, int):
            return sides
        found = [*compare(*(plan for plan, _ in sides))]
        if options.recording:
            try:
                found.append(_answers([graph for _, graph in sides], options))
            except (WeftError, OSError, ValueError) as error:
                print(f"weft diff: {error}", file=sys.stderr)
                return 2
    render = json_of if options.json else markdown_of if options.markdown else text_of
    sys.stdout.write(render(options.before, options.after, found))
    return int(any(not set(one.classes).isdisjoint(options.exit_code) for one in found))


def _answers(graphs: Sequence[str], options: argparse.Namespace) -> Section:
    """Replay recorded requests to both. Raises WeftError."""
    parser = argparse.ArgumentParser("weft diff --replay")
    replay.add_arguments(parser)
    files = [str(file) for file in options.recording]
    given = parser.parse_args([*files, "--and", graphs[0], "--against", graphs[1], *shlex.split(options.replay)])
    own = {name: vars(options)[name] for name in vars(given) if name in vars(options)}
    own["repository"] = options.repository or repository_of(Path(options.after))
    report, notes = asyncio.run(replay.replayed(argparse.Namespace(**vars(given) | own)))
    lines = report.text(is_markdown=False).replace(graphs[0], options.before).replace(graphs[1], options.after)
    headline = f"{report.num_different:,} of {report.num_requests:,} change"
    classes = ("answers",) if report.num_different else ()
    return Section("answers", headline, [*lines.splitlines()[1:], *notes], report.facts(), classes)
