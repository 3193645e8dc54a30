"""Router arguments that ``weft up`` takes as well; imports nothing heavy."""

import argparse
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

from weft.base.repository.control import add_control_arguments, control_fault
from weft.base.text.argument_types import add, argument, given_arguments, is_metadata_name, positive
from weft.router import DEFAULT_RETRY_PERCENT
from weft.router.rollouts.place import LEASE
from weft.router.targets.specification import BalancingPolicy, parse_policy, policy_names

#: Title and description of a group of these arguments where a mesh has them.
GROUP = (
    "router",
    "poll and explicit are for models too, all of which are loaded first, but of a repository of Triton Inference "
    "Server those that --load-model names; the rest is for graphs alone",
)
#: As attributes, those that another process is given as they are.
_GIVEN = (
    *("model_control_mode", "repository_poll_secs", "load_model"),
    *("max_inflight", "adaptive_inflight", "max_inflight_per_client", "client_key_header", "default_priority"),
    *("retry_budget_percent", "state_dir", "rollouts", "allow_route_header", "record_dir"),
    *("record_max_mib", "record_max_s"),
)


def add_arguments(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add arguments for loading graphs and for admission."""
    add_control_arguments(parser, "graph")
    option = partial(add, parser)
    text = "requests in the router at once; the next is refused; 0: no limit (default %(default)s)"
    option("--max-inflight N", text, int, 2048)
    option(
        "--adaptive-inflight",
        "limit each graph, and each model called by its name, to what the servers behind can work on at once, as its "
        "latency shows",
    )
    text = "requests of one client at once; 0: no limit but its share (default %(default)s)"
    option("--max-inflight-per-client N", text, int, 0)
    option(
        "--client-key-header NAME",
        "metadata that tells clients apart which are not authenticated, for example x-client-id (default: they are one "
        "client)",
        default="",
    )
    text = "of requests without the parameter 'priority'; 1 is the highest (default %(default)s)"
    option("--default-priority N", text, int, 2)
    option(
        "--retry-budget-percent P",
        "of a hundred calls of a target so many may be repeated in the long run, and 100 at once: retries, hedges and "
        "calls that a replica had not begun; 'budget_percent' of a graph's 'retry' goes before it for the graph's "
        "calls (default %(default)g)",
        float,
        DEFAULT_RETRY_PERCENT,
    )
    option(
        "--target-policy NAME=POLICY ...",
        f"how a target's calls are spread over its replicas: {policy_names()} (default {BalancingPolicy().name}); may "
        "be repeated",
        argument(_target_policy),
    )
    option(
        "--mesh-key-file FILE",
        "secret that all services of the mesh share, in the first line of this file: without it no request of a "
        "language model is split into prefill and decode",
        Path,
    )
    option(
        "--state-dir DIR",
        "where bandits keep what they have learned, of this router alone, made if it is not there (default: nowhere; "
        "they forget at a stop)",
        Path,
    )
    option(
        "--rollouts WHERE",
        "what all routers of the same graphs share of rollouts: a folder, lease:NAMESPACE/NAME of Kubernetes, or off "
        "(default: .weft/rollouts in the repository if it can be written, else in --state-dir)",
        default="",
    )
    option("--allow-route-header", "let clients choose the steps of splitters with the header x-graph-route")
    option(
        "--record-dir DIR",
        "where weft record keeps requests and answers, made if it is not there (default: nowhere; recording is "
        "refused)",
        Path,
    )
    for name, default in (("mib", 1024), ("s", 3600)):
        option(f"--record-max-{name} N", f"of one recording, at most (default {default})", positive, default)


def usage_fault(options: argparse.Namespace) -> str:
    """Return what is wrong with these arguments, "" if nothing is."""
    if fault := control_fault(options, "graph"):
        return fault
    for name, minimum in (("max_inflight", 0), ("max_inflight_per_client", 0), ("default_priority", 1)):
        if (value := getattr(options, name)) < minimum:
            return f"--{name.replace('_', '-')} must be at least {minimum}, got {value}"
    if options.client_key_header and not is_metadata_name(options.client_key_header):
        return (
            f"--client-key-header '{options.client_key_header}' must be a name of ASCII metadata: lower-case letters, "
            "digits, '-', '_' and '.', not ending in '-bin'"
        )
    if not 0 <= options.retry_budget_percent <= 100:
        return f"--retry-budget-percent must be from 0 to 100, got {options.retry_budget_percent:g}"
    policies = [name for name, _ in options.target_policy]
    if len(policies) != len(set(policies)):
        return f"--target-policy: each name may be given once, got {', '.join(policies)}"
    if options.state_dir is not None and options.state_dir.exists() and not options.state_dir.is_dir():
        return f"--state-dir {options.state_dir} is no folder"
    if options.rollouts.startswith("lease:") and not LEASE.fullmatch(options.rollouts):
        return f"--rollouts {options.rollouts} is not lease:NAMESPACE/NAME, names of lower-case letters, digits, '-'"
    return ""


def given(options: argparse.Namespace, *, unless: Collection[str] = ()) -> Iterator[str]:
    """Yield the arguments again, for the command line of another process, without loading ``unless`` it is "*"."""
    models = {f"--load-model={name}" for name in unless if name != "*"}
    yield from (one for one in given_arguments(options, _GIVEN) if one not in models)
    yield from (f"--target-policy={name}={policy.text}" for name, policy in options.target_policy)


def _target_policy(text: str) -> tuple[str, BalancingPolicy]:
    name, separator, policy = text.partition("=")
    if not (name and separator):
        raise ValueError(f"'{text}' must be NAME=POLICY, for example model=round_robin")
    return name, parse_policy(policy)
