"""JSON values as the values of protobuf fields, one converter per kind (wire.md §1, §9).

A converter takes what the JSON decoder gave, `null` excepted, and returns what the field
stores, or raises `Wrong`. Nothing is rounded, trimmed or guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, DecimalException
from typing import Any

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor

_INTEGERS: dict[int, tuple[str, int, int]] = {
    FieldDescriptor.TYPE_INT32: ("int32", -(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_UINT32: ("uint32", 0, (1 << 32) - 1),
    FieldDescriptor.TYPE_INT64: ("int64", -(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_UINT64: ("uint64", 0, (1 << 64) - 1),
    FieldDescriptor.TYPE_ENUM: ("enum number", -(1 << 31), (1 << 31) - 1),
}
_INT64_DIGITS = 20
_SHOWN_CHARACTERS = 40

IGNORED: Any = object()
"""What a converter returns for a value that counts as unset."""


class Literal(str):
    """A number with a fraction or exponent, kept as written: a float would round it."""

    __slots__ = ()


class Wrong(Exception):
    """A value does not fit its field; the path grows on the way out."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = ""

    def under(self, parent: str) -> Wrong:
        separator = "" if not self.path or self.path.startswith("[") else "."
        self.path = f"{parent}{separator}{self.path}"
        return self


def converters(
    descriptor: FieldDescriptor,
) -> tuple[Callable[[Any], Any], Callable[[list[Any]], list[Any] | None]]:
    """The converter of one value, and the one of a whole list.

    The second is the quick way: it returns None when the values have to go through the
    first one by one, for another spelling or to name the one at fault.
    """
    kind = descriptor.type
    if kind == FieldDescriptor.TYPE_STRING:
        return _to_text, _texts_at_once
    if kind == FieldDescriptor.TYPE_BOOL:
        return _to_bool, _bools_at_once
    if kind == FieldDescriptor.TYPE_DOUBLE:
        return _to_double, _one_by_one
    if kind == FieldDescriptor.TYPE_ENUM:
        return _to_enum(descriptor.enum_type), _one_by_one
    name, low, high = _INTEGERS[kind]
    return _to_integer(name, low, high), _integers_at_once(low, high)


def _to_integer(kind: str, low: int, high: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        given = type(value)
        if given is int:
            number = value
        elif given is str:
            number = _from_digits(value, kind)
        elif given is Literal:
            number = _exact(value, kind)
        else:
            raise Wrong(f"expected {_article(kind)}, got {kind_of(value)}")
        if not low <= number <= high:
            raise Wrong(f"{shown(str(number))} is outside {kind}, {low} to {high}")
        return int(number)

    return convert


def _from_digits(text: str, kind: str) -> int:
    negative = text.startswith("-")
    digits = text[1:] if negative else text
    # int() alone would take blanks, "+", "_" and the digits of other scripts.
    if not (digits.isascii() and digits.isdigit()):
        raise Wrong(f"{shown(text)} is not {_article(kind)} in decimal digits")
    significant = digits.lstrip("0") or "0"
    if len(significant) > _INT64_DIGITS:
        raise Wrong(f"{shown(text)} is outside {kind}")
    number = int(significant)
    return -number if negative else number


def _exact(literal: str, kind: str) -> int:
    try:
        value = Decimal(literal)
    except DecimalException:
        raise Wrong(f"{shown(literal)} is outside {kind}") from None
    if not value:
        return 0
    # Before int(): an exponent of a billion must not become a billion digits.
    if value.adjusted() > _INT64_DIGITS:
        raise Wrong(f"{shown(literal)} is outside {kind}")
    number = int(value)
    if number != value:
        raise Wrong(f"{shown(literal)} is not a whole number, {kind} expected")
    return number


def _integers_at_once(low: int, high: int) -> Callable[[list[Any]], list[Any] | None]:
    # For lists of thousands: passes in C, no call per element.

    def bulk(items: list[Any]) -> list[int] | None:
        kinds = set(map(type, items))
        if kinds == {str}:
            # With digits and "-" only, int() refuses every misplaced "-".
            joined = "".join(items)
            if not (joined.isascii() and joined.replace("-", "").isdigit()):
                return None
            try:
                items = list(map(int, items))
            except ValueError:
                return None
        elif kinds != {int}:
            return None
        return items if low <= min(items) and max(items) <= high else None

    return bulk


def _bools_at_once(items: list[Any]) -> list[Any] | None:
    return items if set(map(type, items)) <= {bool} else None


def _texts_at_once(items: list[Any]) -> list[Any] | None:
    return items if set(map(type, items)) <= {str} and "".join(items).isascii() else None


def _one_by_one(_: list[Any]) -> None:
    return None


def _to_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise Wrong(f"expected a boolean, got {kind_of(value)}")
    return value


def _to_text(value: Any) -> str:
    if type(value) is not str:
        raise Wrong(f"expected a string, got {kind_of(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Wrong("the string holds half of a surrogate pair") from None
    return value


def _to_double(value: Any) -> float:
    if type(value) is not int and type(value) is not Literal:
        raise Wrong(f"expected a number, got {kind_of(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise Wrong(f"{shown(str(value))} is outside double")
    return number


def _to_enum(enum: EnumDescriptor | None) -> Callable[[Any], Any]:
    assert enum is not None, "an enum field has an enum type"
    numbers = {name: value.number for name, value in enum.values_by_name.items()}
    from_number = _to_integer(*_INTEGERS[FieldDescriptor.TYPE_ENUM])

    def convert(value: Any) -> Any:
        if type(value) is str:
            return numbers.get(value, IGNORED)
        return from_number(value)

    return convert


def kind_of(value: Any) -> str:
    """What a JSON value is, for error messages."""
    kinds: dict[type, str] = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return kinds.get(type(value), "a number")


def _article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aei' else 'a'} {kind}"


def shown(text: str) -> str:
    """Foreign text in an error message: quoted, escaped, of bounded length."""
    if len(text) <= _SHOWN_CHARACTERS:
        return ascii(text)
    return f"{text[:_SHOWN_CHARACTERS]!a}…"
