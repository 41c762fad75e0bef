"""Extent ids and write session ids.

An extent id is 12 bytes, unique for ever: leadership epoch, a counter of that epoch, and chance
(against a registry restored from a backup). A session id is 32 characters of [a-z2-7]: the 20
characters of the extent id and a 12-character check keyed with the registry's secret and bound to
the instance. The id of a session that granted nothing has the top bit set and carries its expiry,
so such a session is stored nowhere.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from typing import NamedTuple

from kvcm.core.errors import SessionNotExist
from kvcm.core.limits import HOME_SHARDS

EXTENT_ID_BYTES = 12
SESSION_ID_CHARS = 32
_NAME_CHARS = 20
_TAG_BYTES = 8
_EMPTY_BIT = 0x80


def make_extent_id(epoch: int, counter: int, chance: bytes) -> bytes:
    """12-byte extent id; ``chance`` is 4 random bytes."""
    return struct.pack(">II", epoch & 0x7FFFFFFF, counter & 0xFFFFFFFF) + chance[:4]


def home_shard(extent_id: bytes) -> int:
    """The shard that holds the extent and its state: one of the first 16."""
    return extent_id[7] % HOME_SHARDS


def extent_name(extent_id: bytes) -> str:
    """20 characters of [a-z2-7]: the extent in file names and session ids."""
    return base64.b32encode(extent_id).decode("ascii").rstrip("=").lower()


def location_id(extent_id: bytes, position: int) -> str:
    """8 characters of [a-z2-7] for one location (wire.md §5)."""
    digest = hashlib.blake2b(extent_id + struct.pack(">H", position), digest_size=5).digest()
    return base64.b32encode(digest).decode("ascii").lower()


class Session(NamedTuple):
    """A session id that passed its check. ``extent_id`` None: it granted nothing."""

    extent_id: bytes | None
    expires_ms: int


class SessionIds:
    """Makes and reads the session ids of one instance."""

    def __init__(self, secret: bytes, instance_uid: str) -> None:
        self._key = hashlib.blake2b(instance_uid.encode(), key=secret[:64], digest_size=32).digest()

    def _tag(self, body: bytes) -> str:
        digest = hashlib.blake2b(body, key=self._key, digest_size=_TAG_BYTES).digest()
        return base64.b32encode(digest).decode("ascii").lower()[: SESSION_ID_CHARS - _NAME_CHARS]

    def of_extent(self, extent_id: bytes) -> str:
        """The session id of an extent."""
        return extent_name(extent_id) + self._tag(extent_id)

    def of_nothing(self, expires_ms: int, chance: bytes) -> str:
        """A session id without an extent, valid until ``expires_ms`` (epoch milliseconds)."""
        body = bytes([_EMPTY_BIT]) + expires_ms.to_bytes(6, "big") + chance[:5]
        return extent_name(body) + self._tag(body)

    def read(self, session_id: str) -> Session:
        """Check and take apart a session id.

        Raises:
            SessionNotExist: not an id that this instance gave out.
        """
        name, tag = session_id[:_NAME_CHARS], session_id[_NAME_CHARS:]
        try:
            body = base64.b32decode(name.upper() + "====") if len(session_id) == 32 else b""
        except ValueError:
            body = b""
        if len(body) != EXTENT_ID_BYTES or tag != self._tag(body) or extent_name(body) != name:
            raise SessionNotExist(f"write_session_id {session_id[:64]!r} is unknown")
        if body[0] & _EMPTY_BIT:
            return Session(None, int.from_bytes(body[1:7], "big"))
        return Session(body, 0)
