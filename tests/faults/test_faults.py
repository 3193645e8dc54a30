"""The mesh under load while parts of it die, hang, lie, slow down or are replaced."""

import contextlib
import os
from collections.abc import Iterator

import pytest
from tests.certificates import Authority
from tests.faults.mesh import Mesh
from tests.faults.scenarios import FAULTS, LATE, Fault, Outcome, expired, play

pytestmark = pytest.mark.long

#: How long each fault stays; `make faults` has it longer.
HOLD_S = float(os.environ.get("WEFT_FAULT_S", "1"))
IS_SHORT = "WEFT_FAULT_S" not in os.environ


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One mesh for all faults: each leaves it as it found it."""
    with contextlib.closing(Mesh(tmp_path_factory.mktemp("mesh"))) as made:
        made.start()
        yield made


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.is_quick or not IS_SHORT], ids=lambda f: f.name)
def test_every_request_ends_as_it_must(mesh: Mesh, fault: Fault, outcomes: dict[str, Outcome]) -> None:
    """Answered right, or with an error that fits the fault; none lost, none answered twice; soon all is right again."""
    outcome = outcomes[fault.name] = play(mesh, fault, hold_s=HOLD_S, after_s=max(1.0, fault.recover_s))
    assert (0, 0, 0) == (outcome.num_wrong, outcome.num_lost, outcome.num_twice), outcome
    assert outcome.recover_s <= fault.recover_s, outcome
    assert outcome.num_right > 0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Issues the certificates of the secured mesh."""
    return Authority(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Mesh]:
    """A mesh whose model replicas are called over TLS."""
    with contextlib.closing(Mesh(tmp_path_factory.mktemp("secured"), authority=authority)) as made:
        made.start()
        yield made


@pytest.mark.parametrize(
    ("names", "allowed", "recover_s"), [(("model0",), frozenset(), 0.0), (("model0", "model1"), LATE, 5.0)]
)
def test_certificates_run_out(
    secured: Mesh,
    authority: Authority,
    outcomes: dict[str, Outcome],
    names: tuple[str, ...],
    allowed: frozenset[str],
    recover_s: float,
) -> None:
    """One replica with an expired certificate costs nothing; with two, renewed files are enough, without a restart."""
    fault = Fault(f"certificates of {' and '.join(names)} run out", expired(authority, *names), allowed, recover_s)
    test_every_request_ends_as_it_must(secured, fault, outcomes)
