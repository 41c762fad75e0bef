"""JSON ↔ protobuf in the exact conventions of the HTTP transport (wire.md §1 and §9).

Protobuf's own JSON mapping differs from them in both directions (it rounds floats, takes
digits with blanks, omits defaults), so the mapping is written out here. What a message type
needs is worked out once from its descriptor and kept as a plan of small closures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, DecimalException
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from kvcm.core.errors import MalformedRequest

M = TypeVar("M", bound=Message)

_INTEGERS: dict[int, tuple[str, int, int]] = {
    FieldDescriptor.TYPE_INT32: ("int32", -(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_UINT32: ("uint32", 0, (1 << 32) - 1),
    FieldDescriptor.TYPE_INT64: ("int64", -(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_UINT64: ("uint64", 0, (1 << 64) - 1),
    FieldDescriptor.TYPE_ENUM: ("enum number", -(1 << 31), (1 << 31) - 1),
}
_PRINTED_AS_STRING = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)
_INT64_DIGITS = 20
_SHOWN_CHARACTERS = 40
_IGNORED: Any = object()
"""What a converter returns for a value that counts as unset."""


class _Literal(str):
    """A number with a fraction or exponent, kept as written: a float would round it."""

    __slots__ = ()


class _Wrong(Exception):
    """A value does not fit its field; the path grows on the way out."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = ""

    def under(self, parent: str) -> _Wrong:
        separator = "" if not self.path or self.path.startswith("[") else "."
        self.path = f"{parent}{separator}{self.path}"
        return self


class _Field(NamedTuple):
    name: str
    oneof: str
    fill: Callable[[Message, Any], bool]
    """Stores a JSON value that is not null; False when it counts as unset."""
    present: Callable[[Message], bool] | None
    """None: always printed."""
    show: Callable[[Any], Any]


class _Plan(NamedTuple):
    by_json_name: dict[str, _Field]
    in_order: list[_Field]


def parse(data: bytes, message_type: type[M]) -> M:
    """The message that a JSON body says.

    Raises:
        MalformedRequest: not UTF-8, not JSON, not an object, a name given twice, or a value
            that its field cannot hold exactly; the message names the field.
    """
    try:
        document = _DECODER.decode(data.decode())
    except UnicodeDecodeError as error:
        raise MalformedRequest(f"body is not UTF-8: byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise MalformedRequest(f"body is not JSON: {error}") from None
    except RecursionError:
        raise MalformedRequest("body is not acceptable JSON: nested too deeply") from None
    except ValueError as error:
        raise MalformedRequest(f"body is not acceptable JSON: {error}") from None
    message = message_type()
    try:
        _fill(message, document)
    except _Wrong as error:
        raise MalformedRequest(f"{error.path or 'body'}: {error.problem}") from None
    return message


def render(message: Message, encoded: Mapping[str, bytes] | None = None) -> bytes:
    """The compact JSON of a message, fields in field-number order.

    Args:
        message: any message of the wire.
        encoded: top-level field name → its JSON, printed in place of the field's value;
            for lists that the caller keeps in wire form.
    """
    tree = _show(message)
    if encoded:
        for name, value in encoded.items():
            if name not in tree:
                raise KeyError(f"{message.DESCRIPTOR.full_name} prints no field {name!r}")
            tree[name] = msgspec.Raw(value)
    return msgspec.json.encode(tree)


# -- reading ---------------------------------------------------------------------------


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"field {_shown(name)} is given twice")
            seen.add(name)
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_Literal, parse_constant=_no_constant
)


def _fill(message: Message, value: Any) -> None:
    if type(value) is not dict:
        raise _Wrong(f"expected an object, got {_kind(value)}")
    fields = _plan(type(message)).by_json_name
    given: set[str] = set()
    for name, item in value.items():
        field = fields.get(name)
        if field is None:
            continue
        if field.name in given:
            raise _Wrong("is given twice, in both spellings").under(field.name)
        given.add(field.name)
        if item is None:
            continue
        try:
            was_set = field.fill(message, item)
        except _Wrong as error:
            raise error.under(field.name) from None
        if was_set and field.oneof:
            # A oneof has one member; the name of the oneof itself marks it as taken.
            if field.oneof in given:
                raise _Wrong(f"another member of {field.oneof} is set too").under(field.name)
            given.add(field.oneof)


def _scalar(name: str, convert: Callable[[Any], Any]) -> Callable[[Message, Any], bool]:
    def fill(message: Message, value: Any) -> bool:
        converted = convert(value)
        if converted is _IGNORED:
            return False
        setattr(message, name, converted)
        return True

    return fill


def _submessage(name: str) -> Callable[[Message, Any], bool]:
    def fill(message: Message, value: Any) -> bool:
        child = getattr(message, name)
        child.SetInParent()
        _fill(child, value)
        return True

    return fill


def _list_of_scalars(
    name: str,
    convert: Callable[[Any], Any],
    bulk: Callable[[list[Any]], list[Any] | None],
) -> Callable[[Message, Any], bool]:
    def fill(message: Message, value: Any) -> bool:
        items = _array(value)
        converted = bulk(items)
        if converted is None:
            converted = []
            for index, item in enumerate(items):
                try:
                    element = convert(item)
                except _Wrong as error:
                    raise error.under(f"[{index}]") from None
                if element is not _IGNORED:
                    converted.append(element)
        getattr(message, name).extend(converted)
        return True

    return fill


def _list_of_messages(name: str) -> Callable[[Message, Any], bool]:
    def fill(message: Message, value: Any) -> bool:
        add = getattr(message, name).add
        for index, item in enumerate(_array(value)):
            try:
                _fill(add(), item)
            except _Wrong as error:
                raise error.under(f"[{index}]") from None
        return True

    return fill


def _array(value: Any) -> list[Any]:
    if type(value) is not list:
        raise _Wrong(f"expected an array, got {_kind(value)}")
    return value


def _to_integer(kind: str, low: int, high: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        given = type(value)
        if given is int:
            number = value
        elif given is str:
            number = _from_digits(value, kind)
        elif given is _Literal:
            number = _exact(value, kind)
        else:
            raise _Wrong(f"expected {_article(kind)}, got {_kind(value)}")
        if not low <= number <= high:
            raise _Wrong(f"{_shown(str(number))} is outside {kind}, {low} to {high}")
        return int(number)

    return convert


def _from_digits(text: str, kind: str) -> int:
    digits = text.removeprefix("-")
    # int() alone would take blanks, "+", "_" and the digits of other scripts.
    if not (digits.isascii() and digits.isdigit()):
        raise _Wrong(f"{_shown(text)} is not {_article(kind)} in decimal digits")
    significant = digits.lstrip("0") or "0"
    if len(significant) > _INT64_DIGITS:
        raise _Wrong(f"{_shown(text)} is outside {kind}")
    number = int(significant)
    return -number if digits is not text and text[0] == "-" else number


def _exact(literal: str, kind: str) -> int:
    try:
        value = Decimal(literal)
    except DecimalException:
        raise _Wrong(f"{_shown(literal)} is outside {kind}") from None
    if not value:
        return 0
    # Before int(): an exponent of a billion must not become a billion digits.
    if value.adjusted() > _INT64_DIGITS:
        raise _Wrong(f"{_shown(literal)} is outside {kind}")
    number = int(value)
    if number != value:
        raise _Wrong(f"{_shown(literal)} is not a whole number, {kind} expected")
    return number


def _integers_at_once(low: int, high: int) -> Callable[[list[Any]], list[Any] | None]:
    """For lists of thousands: passes in C, no call per element. None: look one by one."""

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
        raise _Wrong(f"expected a boolean, got {_kind(value)}")
    return value


def _to_text(value: Any) -> str:
    if type(value) is not str:
        raise _Wrong(f"expected a string, got {_kind(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _Wrong("the string holds half of a surrogate pair") from None
    return value


def _to_double(value: Any) -> float:
    if type(value) is not int and type(value) is not _Literal:
        raise _Wrong(f"expected a number, got {_kind(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise _Wrong(f"{_shown(str(value))} is outside double")
    return number


def _to_enum(enum: EnumDescriptor | None) -> Callable[[Any], Any]:
    assert enum is not None, "an enum field has an enum type"
    numbers = {name: value.number for name, value in enum.values_by_name.items()}
    from_number = _to_integer(*_INTEGERS[FieldDescriptor.TYPE_ENUM])

    def convert(value: Any) -> Any:
        if type(value) is str:
            return numbers.get(value, _IGNORED)
        return from_number(value)

    return convert


# -- printing --------------------------------------------------------------------------


def _show(message: Message) -> dict[str, Any]:
    return {
        name: show(getattr(message, name))
        for name, _, _, present, show in _plan(type(message)).in_order
        if present is None or present(message)
    }


def _same(value: Any) -> Any:
    return value


def _show_double(value: float) -> float | str:
    # JSON has no numbers for these; the names are those of protobuf's JSON mapping.
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _show_enum(enum: EnumDescriptor | None) -> Callable[[int], str | int]:
    assert enum is not None, "an enum field has an enum type"
    names = {number: value.name for number, value in enum.values_by_number.items()}

    def show(number: int) -> str | int:
        return names.get(number, number)

    return show


def _each(show: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    def show_list(values: Any) -> list[Any]:
        return list(map(show, values))

    return show_list


def _has(name: str) -> Callable[[Message], bool]:
    def present(message: Message) -> bool:
        return message.HasField(name)

    return present


# -- plans -----------------------------------------------------------------------------


_PLANS: dict[type[Message], _Plan] = {}


def _plan(message_type: type[Message]) -> _Plan:
    plan = _PLANS.get(message_type)
    if plan is None:
        plan = _PLANS[message_type] = _new_plan(message_type)
    return plan


def _new_plan(message_type: type[Message]) -> _Plan:
    by_json_name: dict[str, _Field] = {}
    in_order: list[_Field] = []
    descriptors: Sequence[FieldDescriptor] = message_type.DESCRIPTOR.fields
    for descriptor in sorted(descriptors, key=lambda field: field.number):
        field = _field(descriptor)
        in_order.append(field)
        by_json_name[descriptor.name] = field
        by_json_name[descriptor.json_name] = field
    return _Plan(by_json_name, in_order)


def _field(descriptor: FieldDescriptor) -> _Field:
    name = descriptor.name
    show = _shower(descriptor)
    oneof = descriptor.containing_oneof
    return _Field(
        name=name,
        oneof=oneof.name if oneof is not None else "",
        fill=_filler(descriptor),
        present=_has(name) if descriptor.has_presence else None,
        show=_each(show) if descriptor.is_repeated else show,
    )


def _filler(descriptor: FieldDescriptor) -> Callable[[Message, Any], bool]:
    name = descriptor.name
    if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
        return _list_of_messages(name) if descriptor.is_repeated else _submessage(name)
    convert, bulk = _converters(descriptor)
    if descriptor.is_repeated:
        return _list_of_scalars(name, convert, bulk)
    return _scalar(name, convert)


def _converters(
    descriptor: FieldDescriptor,
) -> tuple[Callable[[Any], Any], Callable[[list[Any]], list[Any] | None]]:
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


def _shower(descriptor: FieldDescriptor) -> Callable[[Any], Any]:
    kind = descriptor.type
    if kind == FieldDescriptor.TYPE_MESSAGE:
        return _show
    if kind == FieldDescriptor.TYPE_ENUM:
        return _show_enum(descriptor.enum_type)
    if kind == FieldDescriptor.TYPE_DOUBLE:
        return _show_double
    return str if kind in _PRINTED_AS_STRING else _same


# -- words -----------------------------------------------------------------------------


def _kind(value: Any) -> str:
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


def _shown(text: str) -> str:
    """Foreign text in an error message: quoted, escaped, of bounded length."""
    short = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
    return ascii(short).replace("\\u2026", "…")
