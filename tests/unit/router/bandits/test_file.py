"""What bandits have learned outlives the router."""

import asyncio
import logging
import shutil
from pathlib import Path

import pytest

from weft.base.errors import UnavailableError
from weft.language.bandit_algorithms import Arm
from weft.router.bandits.exchange import FILENAME, BanditFile
from weft.router.bandits.store import BanditStore, KnownArm

FOR_EVER_S = 3_600.0
LOCK = "bandits.lock"
#: One file a line that was never written so.
DAMAGED = Path(__file__).with_name("damaged.jsonl")
LEARNED = KnownArm("g", "root/ab", "Ä", Arm(5, 3, 2.5, -0.25))


class LookedAtStore(BanditStore):
    """Tells when somebody looks whether it has changed; what the look before has found is then on disk."""

    def __init__(self) -> None:
        super().__init__()
        self._looked = asyncio.Event()

    @property
    def revision(self) -> int:
        self._looked.set()
        return super().revision

    async def looks(self, count: int) -> None:
        for _ in range(count):
            self._looked.clear()
            async with asyncio.timeout(10):
                await self._looked.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def kept(folder: Path, store: BanditStore) -> None:
    """The store was kept from start to close, and has changed meanwhile."""
    file = BanditFile(store, folder, period_s=FOR_EVER_S)
    await file.start()
    store.add(*LEARNED)
    await file.close()


async def restored(folder: Path) -> list[KnownArm]:
    store = BanditStore()
    file = BanditFile(store, folder, period_s=FOR_EVER_S)
    await file.start()
    await file.close()
    return list(store)


async def test_what_was_learned_is_there_after_a_restart(tmp_path: Path) -> None:
    """Every figure of every arm; no draft is left in the folder."""
    await kept(tmp_path, BanditStore())
    assert [LEARNED] == await restored(tmp_path)
    assert [FILENAME, LOCK] == names(tmp_path)


async def test_it_is_written_while_the_router_runs(tmp_path: Path) -> None:
    """A crash loses the last seconds only; nothing is written where nothing has changed."""
    store = LookedAtStore()
    file = BanditFile(store, tmp_path, period_s=0.001)
    await file.start()
    await store.looks(5)
    assert [LOCK] == names(tmp_path)
    store.add(*LEARNED)
    await store.looks(2)
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / FILENAME, tmp_path / "copy")  # as it is after a crash
    assert [LEARNED] == await restored(tmp_path / "copy")
    await file.close()
    assert 1 == len(asyncio.all_tasks())


@pytest.mark.parametrize("content", ["", "[" * 100_000, *DAMAGED.read_text().splitlines()])
async def test_a_damaged_file_is_kept_aside(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    """Bandits begin anew, the log says so, and the next file does not overwrite the damaged one."""
    (tmp_path / FILENAME).write_text(content)
    store = BanditStore()
    with caplog.at_level(logging.ERROR):
        await kept(tmp_path, store)
    assert "is damaged and is kept as bandits.damaged, bandits begin anew" in caplog.text
    assert content == (tmp_path / "bandits.damaged").read_text()
    assert [LEARNED] == await restored(tmp_path)


async def test_bytes_that_are_no_text_are_damage_too(tmp_path: Path) -> None:
    """UTF-8 is all that is read."""
    (tmp_path / FILENAME).write_bytes(b"\xff\x00")
    assert [] == await restored(tmp_path)


async def test_a_file_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    """Else what it has would be overwritten."""
    (tmp_path / FILENAME).mkdir()
    file = BanditFile(BanditStore(), tmp_path)
    with pytest.raises(UnavailableError, match=r"cannot be read from .*bandits\.json: Is a directory"):
        await file.start()
    await file.close()


async def test_a_folder_that_is_gone_does_not_end_the_router(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, and tried again."""
    folder = tmp_path / "state"
    folder.mkdir()
    store = LookedAtStore()
    file = BanditFile(store, folder, period_s=0.001)
    await file.start()
    shutil.rmtree(folder)
    store.add(*LEARNED)
    await store.looks(5)
    folder.mkdir()
    await file.close()
    assert 1 == sum("cannot be written" in record.message for record in caplog.records)
    assert [LEARNED] == await restored(folder)


async def test_the_folder_is_made(tmp_path: Path) -> None:
    """With all above it; where it cannot be, the start says so."""
    await kept(tmp_path / "a/b", BanditStore())
    assert [LEARNED] == await restored(tmp_path / "a/b")
    with pytest.raises(UnavailableError, match=r"--state-dir .*bandits\.json/c cannot be used: Not a directory"):
        await BanditFile(BanditStore(), tmp_path / "a/b" / FILENAME / "c").start()


async def test_two_routers_do_not_share_a_folder(tmp_path: Path) -> None:
    """Each would overwrite what the other has learned; when one has ended the next may have it."""
    first = BanditFile(BanditStore(), tmp_path, period_s=FOR_EVER_S)
    await first.start()
    second = BanditFile(BanditStore(), tmp_path)
    with pytest.raises(UnavailableError, match=r"another router uses --state-dir .*; give each its own"):
        await second.start()
    await second.close()
    await first.close()
    assert [] == await restored(tmp_path)


async def test_closing_what_was_never_started_is_fine(tmp_path: Path) -> None:
    """As after a start that failed."""
    await BanditFile(BanditStore(), tmp_path).close()
    assert [] == names(tmp_path)
