"""Model control: its arguments, and changes that clients ask for."""

import argparse
import asyncio

import pytest

from weft.base.errors import UnavailableError
from weft.base.repository.control import ClientControl, add_control_arguments, control_arguments, control_fault


def parsed(*arguments: str) -> argparse.Namespace:
    """The arguments of a service that loads graphs."""
    parser = argparse.ArgumentParser()
    add_control_arguments(parser, "graph")
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], ""),
        (["--model-control-mode", "explicit", "--load-model", "g"], ""),
        (["--load-model", "g"], "--load-model needs --model-control-mode explicit; without it every graph is loaded"),
        (["--repository-poll-secs", "0"], "--repository-poll-secs must be above 0 and at most 86400, got 0"),
        (["--repository-poll-secs", "nan"], "--repository-poll-secs must be above 0 and at most 86400, got nan"),
    ],
)
def test_faults_of_arguments_are_named(arguments: list[str], fault: str) -> None:
    """With the option and its value; "" where there is none."""
    assert fault == control_fault(parsed(*arguments), "graph")


def test_arguments_are_passed_on_to_another_process() -> None:
    """What is parsed of them there is what was parsed here."""
    options = parsed("--model-control-mode", "explicit", "--load-model", "a", "--load-model", "b")
    assert options == parsed(*control_arguments(options))


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("none", "is not allowed; start the router with --model-control-mode explicit"),
        ("poll", "is not allowed if polling is enabled; change the files, or start the router with"),
    ],
)
def test_clients_change_nothing_but_in_explicit_mode(mode: str, message: str) -> None:
    """The error says what does."""
    with pytest.raises(UnavailableError, match=message):
        ClientControl(mode, "router").check()
    ClientControl("explicit", "router").check()


async def test_a_change_goes_on_when_its_client_leaves() -> None:
    """It is not left half done; only the end of the service cancels it."""
    control, has_begun, may_end, is_done = ClientControl("explicit", "router"), *(asyncio.Event() for _ in range(3))

    async def change() -> None:
        has_begun.set()
        await may_end.wait()
        is_done.set()

    client = asyncio.create_task(control.finish(change()))
    await has_begun.wait()
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    may_end.set()
    async with asyncio.timeout(10):
        await is_done.wait()
    await control.close()


async def test_the_end_of_the_service_cancels_changes() -> None:
    """`close` returns when none is left."""
    control = ClientControl("explicit", "router")
    client = asyncio.create_task(control.finish(asyncio.Event().wait()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await control.close()
    with pytest.raises(asyncio.CancelledError):
        await client
