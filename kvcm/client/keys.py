"""Block keys from token ids.

`block_keys` chains SHA-256 over the blocks of a prompt, so a key stands for its whole prefix and
two different prefixes share one only if SHA-256 collides in its first 8 bytes. It depends on
nothing but its arguments: not on the process, PYTHONHASHSEED, the platform or the byte order.
`token_block_keys` is the protocol's own hash, for callers that must agree with clients that send
``token_ids``; it resists no collisions.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from kvcm.core.errors import InvalidArgument
from kvcm.core.hashing import token_block_keys

__all__ = ["ExtraKeys", "KeyChain", "Tokens", "block_keys", "hash_fingerprint", "token_block_keys"]

Tokens = Sequence[int] | npt.NDArray[np.integer]
"""Token ids: any sequence of int64, an ``array('q')`` or an integer NumPy array."""
ExtraKeys = Mapping[str, str] | Sequence[tuple[str, str]]
"""What else makes cache differ: pairs of (kind, value), such as ("lora", adapter)."""

_VERSION = b"kvcm-block-keys-1"
_TOKEN_BYTES = 8


def block_keys(
    tokens: Tokens,
    block_size: int,
    *,
    salt: str = "",
    extra: ExtraKeys = (),
    model_fingerprint: str = "",
) -> list[int]:
    """Keys of the full blocks of ``tokens``, each covering the prefix up to its block's end.

    Args:
        tokens: int64 token ids of the whole prompt.
        block_size: tokens a block, > 0; a partial last block gets no key.
        salt: separates tenants: equal tokens under different salts share no key.
        extra: further parts of the identity by kind. Their order does not matter, and an empty
            value counts as absent.
        model_fingerprint: separates models or weights inside one instance.

    Returns:
        ``len(tokens) // block_size`` int64 keys: the first 8 bytes, big-endian and signed, of
        the digest of each block.

    Raises:
        InvalidArgument: a block size that is not positive, or a token that is not an int64.
    """
    chain = KeyChain(block_size, salt=salt, extra=extra, model_fingerprint=model_fingerprint)
    return chain.append(tokens)


class KeyChain:
    """The keys of a growing sequence: append tokens as they are generated, get the new keys.

    However the tokens are cut into calls, the keys are those `block_keys` gives for all of them.
    """

    __slots__ = ("_digest", "_pending", "block_size", "keys")

    def __init__(
        self,
        block_size: int,
        *,
        salt: str = "",
        extra: ExtraKeys = (),
        model_fingerprint: str = "",
    ) -> None:
        if block_size <= 0:
            raise InvalidArgument(f"block_size must be positive: {block_size}")
        self.block_size = block_size
        self.keys: list[int] = []
        self._pending = b""
        self._digest = _root(block_size, salt, extra, model_fingerprint)

    def append(self, tokens: Tokens) -> list[int]:
        """Add tokens; returns the keys of the blocks that became full.

        Raises:
            InvalidArgument: a token is not an int64; nothing was added.
        """
        data = self._pending + _token_bytes(tokens)
        step = self.block_size * _TOKEN_BYTES
        full = len(data) // step * step
        digest = self._digest
        heads: list[bytes] = []
        for start in range(0, full, step):
            digest = sha256(digest + data[start : start + step]).digest()
            heads.append(digest[:8])
        self._digest = digest
        self._pending = data[full:]
        keys = list(struct.unpack(f">{len(heads)}q", b"".join(heads)))
        self.keys += keys
        return keys


def hash_fingerprint() -> str:
    """A short text that is equal exactly where `block_keys` gives equal keys.

    Register it with the instance (in ``model_deployment.extra``): a client that hashes in another
    way is then refused as different instead of never hitting.
    """
    keys = block_keys(range(64), 16, salt="salt", extra={"kind": "value"}, model_fingerprint="m")
    return f"{_VERSION.decode()}:{keys[-1] & 0xFFFFFFFFFFFFFFFF:016x}"


def _token_bytes(tokens: Tokens) -> bytes:
    """Little-endian int64 bytes, in C-level passes."""
    try:
        if isinstance(tokens, np.ndarray):
            return tokens.astype("<i8", casting="safe").tobytes()
        values = array("q", tokens)
    except (OverflowError, TypeError) as error:
        raise InvalidArgument(f"tokens: not an int64: {error}") from error
    if sys.byteorder != "little":
        values.byteswap()
    return values.tobytes()


def _root(block_size: int, salt: str, extra: ExtraKeys, model_fingerprint: str) -> bytes:
    """The digest that the first block continues.

    Every part is tagged by what it is and carries its length: no choice of strings lets a salt,
    a model and an extra key stand for one another.
    """
    pairs: Iterable[tuple[str, str]] = extra.items() if isinstance(extra, Mapping) else extra
    parts = [_part(b"version", _VERSION), _part(b"block_size", str(block_size).encode())]
    parts += [_part(b"salt", _text(salt)), _part(b"model", _text(model_fingerprint))]
    for kind, value in sorted(pairs):
        if value:
            parts += [_part(b"extra_kind", _text(kind)), _part(b"extra_value", _text(value))]
    return sha256(b"".join(parts)).digest()


def _part(tag: bytes, value: bytes) -> bytes:
    return b"%b%b%b%b" % (struct.pack(">I", len(tag)), tag, struct.pack(">Q", len(value)), value)


def _text(text: str) -> bytes:
    # Lone surrogates come from undecodable names; they must differ, not fail.
    return text.encode("utf-8", "surrogatepass")
