"""What clients of a Mooncake store and the manager agree on: the fields of its configuration and
the meaning of its result codes (of `mooncake-transfer-engine` 0.3.13, seen on a real master)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcm.core.errors import InvalidArgument

INSTALL_HINT = (
    "the Mooncake SDK cannot be loaded; install kvcm[mooncake], and Debian's libibverbs1 "
    "(the package's library needs it)"
)

OK = 0
NO_SPACE = -200
WRONG_SIZE = -600
"""The buffer is smaller than the object (or an argument is no good)."""
NOT_FOUND = -704
LEASED = -706
"""Readers hold a lease: not removed."""
LEASE_EXPIRED = -707
"""The read took longer than its lease; the bytes read may be another object's."""
TRANSFER_FAILED = -800
NO_MASTER = frozenset({-900, -901})
"""The call to the master failed, or its time ran out."""

_MEANINGS = {
    NO_SPACE: "no segment has room, or none is mounted",
    WRONG_SIZE: "the object has another size",
    NOT_FOUND: "no such object",
    LEASED: "readers hold a lease on it",
    LEASE_EXPIRED: "the read took longer than the object's lease",
    TRANSFER_FAILED: "the transfer failed: whoever holds the memory does not answer",
    -900: "the master does not answer",
    -901: "the master did not answer in time",
}

_ENTRY = re.compile(r"\[?[A-Za-z0-9_.:-]+\]?:[0-9]{1,5}")
_HA_ENTRY = re.compile(r"(?:etcd|redis|k8s)://[\x21-\x7e]+")
_HOST = re.compile(r"[A-Za-z0-9_.:\[\]-]*")
_PROTOCOL = re.compile(r"[a-z0-9_]*")
_DEVICES = re.compile(r"[A-Za-z0-9_.:,-]*")
_CONNSTRING = re.compile(r"[\x21-\x7e]*")


@dataclass(frozen=True, slots=True)
class MooncakeSpec:
    """A checked configuration; what was empty has Mooncake's own defaults."""

    local_hostname: str
    metadata_connstring: str
    protocol: str
    rdma_device: str
    master: str

    @property
    def master_address(self) -> tuple[str, int] | None:
        """Host and port of the master; None when it is found through a service."""
        if "://" in self.master:
            return None
        host, _, port = self.master.rpartition(":")
        return host.strip("[]"), int(port)


def check_spec(spec: Mapping[str, Any]) -> MooncakeSpec:
    """The fields of a Mooncake storage (wire.md §6), by either of the master's two names.

    Raises:
        InvalidArgument: naming the field.
    """
    master = _text(spec, "master_service_entry") or _text(spec, "master_server_entry")
    if not _HA_ENTRY.fullmatch(master):
        port = int(master.rpartition(":")[2]) if _ENTRY.fullmatch(master) else 0
        if not 1 <= port <= 65_535:
            raise InvalidArgument(f"master_service_entry {master!r} must be host:port")
    return MooncakeSpec(
        _match(spec, "local_hostname", _HOST) or "127.0.0.1",
        _match(spec, "metadata_connstring", _CONNSTRING) or "P2PHANDSHAKE",
        _match(spec, "protocol", _PROTOCOL) or "tcp",
        _match(spec, "rdma_device", _DEVICES),
        master,
    )


def meaning(code: int) -> str:
    """A result code in words."""
    return f"{_MEANINGS.get(code, 'Mooncake refused')} (code {code})"


def _text(spec: Mapping[str, Any], field: str) -> str:
    value = spec.get(field, "")
    if not isinstance(value, str):
        raise InvalidArgument(f"{field} {value!r} must be a string")
    return value


def _match(spec: Mapping[str, Any], field: str, pattern: re.Pattern[str]) -> str:
    value = _text(spec, field)
    if not pattern.fullmatch(value):
        raise InvalidArgument(f"{field} {value!r} has characters that do not belong there")
    return value
