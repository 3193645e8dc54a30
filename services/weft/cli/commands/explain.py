"""``weft explain``: the path of a request through a graph, without a server."""

import argparse
import sys
from functools import partial

from weft.base.errors import InvalidArgumentError
from weft.base.text.argument_types import add, positive
from weft.cli.arguments import add_graph_arguments, add_json_argument, add_request_arguments, pair
from weft.cli.plan import plan_or_status
from weft.tools.explain.question import read_question
from weft.tools.explain.render import render_json, render_text
from weft.tools.explain.tree import explain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft explain``."""
    option = partial(add, parser)
    parser.description = (
        "Show which path a request takes through a graph, as far as it is known before a model answers."
    )
    parser.epilog = "example: weft explain triage --param team=shipping --input TEXT='\"The parcel never came.\"'"
    add_graph_arguments(parser)
    add_request_arguments(parser)
    option("--shape NAME=1,3 ...", "an input's shape, values unknown", pair)
    for name, what in (("--gives", "there"), ("--lacks", "left out")):
        text = f"an optional output of a model's answer is {what}; default: unknown"
        option(f"{name} STEP/OUTPUT ...", text)
    option("--priority N", "the request parameter of that name", int)
    option("--remaining-ms N", "the client's deadline; default: none", positive)
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Explain; 0 done, even if the request would fail, 1 the graph has errors, 2 there is no such graph or request."""
    plan = plan_or_status(options)
    if isinstance(plan, int):
        return plan
    try:
        question = read_question(
            plan,
            inputs=options.input,
            shapes=options.shape,
            parameters=options.param,
            headers=options.header,
            outputs=options.output,
            gives=options.gives,
            lacks=options.lacks,
            request_id=options.request_id,
            priority=options.priority,
            remaining_ms=options.remaining_ms,
        )
    except InvalidArgumentError as error:
        print(f"weft explain: {error.message}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # nobody reads the output, which is no file
        raise
    except OSError as error:
        print(f"weft explain: cannot read '{error.filename}': {error.strerror}", file=sys.stderr)
        return 2
    for hint in question.hints:
        print(f"weft explain: note: {hint}", file=sys.stderr)
    render = render_json if options.json else render_text
    sys.stdout.write(render(explain(plan, question), question.num_rows))
    return 0
