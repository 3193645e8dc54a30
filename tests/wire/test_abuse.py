"""Clients that attack the server: what it holds is bounded, others are answered meanwhile, and nothing is left."""

import contextlib
import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.certificates import Authority, Pair
from tests.wire.arena import SCALE, Arena, Attack, Outcome, arena
from tests.wire.conftest import OUTCOMES
from tests.wire.echo_process import EchoService
from tests.wire.floods import FLOODS
from tests.wire.oversizes import OVERSIZES
from tests.wire.strangers import STRANGERS

pytestmark = pytest.mark.long

ATTACKS = (*FLOODS, *OVERSIZES, *STRANGERS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The service's certificate."""
    return Authority(tmp_path_factory.mktemp("pki")).issue("echo")


@pytest.fixture(scope="module")
def tls() -> ssl.SSLContext:
    """A client that believes every certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


@contextlib.contextmanager
def attacked(wire: str, folder: Path, pair: Pair, tls: ssl.SSLContext, attack: Attack | None) -> Iterator[Arena]:
    """A service with the attack's limits; None is any that has no limits of its own."""
    arguments = [f"--unix={folder}/socket", f"--tls-cert={pair.cert}", f"--tls-key={pair.key}", "--loop=asyncio"]
    arguments += attack.arguments if attack else []
    service = EchoService(wire, folder / "log", *arguments, limits=attack.limits if attack else {})
    with service as echo, arena(echo, tls) as made:
        yield made


@pytest.fixture(scope="module")
def shared(wire: str, tmp_path_factory: pytest.TempPathFactory, pair: Pair, tls: ssl.SSLContext) -> Iterator[Arena]:
    """One service for all attacks that need no limits of their own."""
    with attacked(wire, tmp_path_factory.mktemp("abuse"), pair, tls, None) as made:
        yield made


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack(
    attack: Attack,
    wire: str,
    shared: Arena,
    tmp_path: Path,
    pair: Pair,
    tls: ssl.SSLContext,
    outcomes: dict[str, Outcome],
) -> None:
    """Memory, time and log stay bounded, a neighbour gets right answers meanwhile, and nothing is left afterwards."""
    if not attack.limits and not attack.arguments:
        outcomes[attack.name] = shared.play(attack)
        return
    if wire != "weft":
        pytest.skip("limits of our own server")
    with attacked(wire, tmp_path, pair, tls, attack) as made:
        outcomes[attack.name] = made.play(attack)


@pytest.fixture(scope="session")
def outcomes(pytestconfig: pytest.Config) -> Iterator[dict[str, Outcome]]:
    """What was seen, by attack; written where WEFT_ABUSE_REPORT says, and as Markdown beside it."""
    found = pytestconfig.stash.setdefault(OUTCOMES, {})
    yield found
    if report := os.environ.get("WEFT_ABUSE_REPORT"):
        bounds = {attack.name: attack.max_mib for attack in ATTACKS}
        table = {name: {"max_mib": bounds[name], **outcome._asdict()} for name, outcome in found.items()}
        Path(report).parent.mkdir(parents=True, exist_ok=True)
        Path(report).write_text(json.dumps({"scale": SCALE, "attacks": table}, indent=1))
        Path(report).with_suffix(".md").write_text(as_markdown(found, bounds))


def as_markdown(found: dict[str, Outcome], bounds: dict[str, float]) -> str:
    """The table of docs/wire.md."""
    rows = ["| attack | memory, MiB: bound, seen | CPU s of the server | what the server did |", "|---|---|---|---|"]
    for name, outcome in found.items():
        memory = f"{bounds[name]:.0f}, {max(outcome.peak_mib, 0):.1f}"
        rows.append(f"| {name} | {memory} | {outcome.cpu_s:.2f} | {outcome.seen} |")
    return "\n".join([*rows, ""])
