"""Location URIs: ``scheme://<storage><path>?k=v&…``, parameters sorted by name (wire.md §6)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from kvcm.core.errors import InvalidArgument

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+._-]*")


@dataclass(frozen=True, slots=True)
class LocationUri:
    """A parsed location URI. ``path`` starts with ``/`` and is percent-decoded."""

    scheme: str
    storage: str
    path: str
    params: Mapping[str, str]

    @property
    def size(self) -> int:
        """Bytes of the block's spec; 0 when absent."""
        return int(self.params.get("size", "0"))

    @property
    def offset(self) -> int:
        """Byte offset within the file: ``blkid × size``."""
        return int(self.params.get("blkid", "0")) * self.size


def format_uri(scheme: str, storage: str, path: str, params: Mapping[str, object]) -> str:
    """Build a location URI; ``path`` begins with ``/``."""
    query = "&".join(f"{k}={quote(str(params[k]), safe='')}" for k in sorted(params))
    return f"{scheme}://{storage}{quote(path)}{'?' if query else ''}{query}"


def parse_uri(uri: str) -> LocationUri:
    """Parse a location URI.

    Raises:
        InvalidArgument: no scheme or storage name, or no URI at all.
    """
    scheme, separator, rest = uri.partition("://")
    try:
        # Without the scheme: urlsplit knows none with an underscore, as ``vcns_hf3fs`` has.
        parts = urlsplit(f"//{rest}")
    except ValueError as error:
        raise InvalidArgument(f"location uri {uri!r}: {error}") from error
    if not separator or not _SCHEME.fullmatch(scheme) or not parts.netloc:
        raise InvalidArgument(f"location uri {uri!r} has no scheme or storage name")
    params = dict(parse_qsl(parts.query, keep_blank_values=True))
    return LocationUri(scheme.lower(), parts.netloc, unquote(parts.path), params)
