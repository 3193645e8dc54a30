"""Files and batches in a folder, each with its owner. Nothing in it is ever half written."""

import json
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.base.errors import NotFoundError
from weft.gateway.errors import RequestError
from weft.jobs.atomic_files import replace_file

_ID = re.compile(r"(file|batch)-[0-9a-f]{32}")
_OWNER = "owner"


class Store:
    """Objects of the kinds ``file`` and ``batch``, by id; blocking, so called on threads.

    ``DIR/file-…/object.json`` and ``content``; ``DIR/batch-…/object.json`` and what its job writes.

    Args:
        folder: Made if it is missing, for this user alone.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder

    def new_id(self, kind: str) -> str:
        """An id that nobody can guess."""
        return f"{kind}-{secrets.token_hex(16)}"

    def path(self, own_id: str) -> Path:
        """Folder of an object."""
        return self._folder / own_id

    def content(self, file_id: str) -> Path:
        """Content of a file."""
        return self.path(file_id) / "content"

    def save(self, facts: Mapping[str, Any], owner: str) -> None:
        """Write an object, new or changed; ``facts`` has its ``id``."""
        folder = self.path(facts["id"])
        folder.mkdir(exist_ok=True, mode=0o700)
        replace_file(folder / "object.json", json.dumps({**facts, _OWNER: owner}).encode())

    def add_file(self, content: Path, filename: str, purpose: str, owner: str) -> dict[str, Any]:
        """Make a file of what was written to ``content``, which is moved."""
        own_id = self.new_id("file")
        facts = {
            "id": own_id,
            "object": "file",
            "bytes": content.stat().st_size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        self.path(own_id).mkdir(mode=0o700)
        content.replace(self.content(own_id))
        self.save(facts, owner)
        return facts

    def find(self, own_id: str, kind: str, owner: str) -> dict[str, Any]:
        """An object of an owner.

        Raises:
            NotFoundError: There is none, or it is another's.
        """
        match = _ID.fullmatch(own_id)
        facts = self._read(own_id) if match and match[1] == kind else None
        if facts is None or facts.pop(_OWNER) != owner:
            where = "/v1/files" if kind == "file" else "/v1/batches"
            raise NotFoundError(f"there is no {kind} '{own_id[:60]}'; GET {where} lists those of your key")
        return facts

    def all(self, kind: str, owner: str | None) -> list[dict[str, Any]]:
        """Objects of an owner, newest first; None: of every owner, each with ``owner``."""
        found = []
        for path in self._folder.glob(f"{kind}-*"):
            facts = self._read(path.name)
            if facts is not None and (owner is None or facts.pop(_OWNER) == owner):
                found.append(facts)
        return sorted(found, key=lambda facts: (facts["created_at"], facts["id"]), reverse=True)

    def delete_file(self, file_id: str, owner: str) -> None:
        """Delete a file and its content.

        Raises:
            NotFoundError: There is none.
            RequestError: A batch that is not finished reads it (409).
        """
        self.find(file_id, "file", owner)
        for batch in self.all("batch", owner):
            if batch["input_file_id"] == file_id and batch["status"] in ("in_progress", "cancelling", "finalizing"):
                raise RequestError(f"'{file_id}' is read by '{batch['id']}'; cancel that first", http_status=409)
        shutil.rmtree(self.path(file_id))

    def _read(self, own_id: str) -> dict[str, Any] | None:
        try:
            facts: dict[str, Any] = json.loads((self.path(own_id) / "object.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        return facts
