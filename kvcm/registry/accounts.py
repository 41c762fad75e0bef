"""Password hashes (argon2id). Slow on purpose: call from the registry's worker thread only."""

from __future__ import annotations

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from kvcm.core.clock import Clock

_SALT_BYTES = 16
_HASHER = PasswordHasher()


def hash_password(password: str, clock: Clock) -> str:
    """The hash with its parameters and a fresh salt, as text."""
    return _HASHER.hash(password, salt=clock.random_bytes(_SALT_BYTES))


def matches(password_hash: str, password: str) -> bool:
    """Whether ``password`` is the one behind ``password_hash``."""
    try:
        return _HASHER.verify(password_hash, password)
    except (VerificationError, InvalidHashError):
        return False


def is_hash(text: str) -> bool:
    """Whether ``text`` is a hash of ours and not, say, a password in plain text."""
    return text.startswith("$argon2id$")
