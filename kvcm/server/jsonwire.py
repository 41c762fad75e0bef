"""JSON ↔ protobuf in the exact conventions of the HTTP transport (wire.md §1 and §9).

Protobuf's own JSON mapping differs from them in both directions (it rounds floats, takes
digits with blanks, omits defaults), so the mapping is written out here. What a message type
needs is worked out once from its descriptor and kept as a plan of small closures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from kvcm.core.errors import MalformedRequest
from kvcm.server.jsonvalues import IGNORED, Literal, Wrong, converters, kind_of, shown

M = TypeVar("M", bound=Message)

_FIRST_ADDITION = 100
"""Field numbers from here on are additions of this project (wire.md)."""
_PRINTED_AS_STRING = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)


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
    message = _parse_plain(data, message_type)
    if message is not None:
        return message
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
    except Wrong as error:
        raise MalformedRequest(f"{error.path or 'body'}: {error.problem}") from None
    return message


def render(message: Message) -> bytes:
    """The compact JSON of a message, fields in field-number order."""
    return msgspec.json.encode(_show(message))


# -- reading ---------------------------------------------------------------------------


def _parse_plain(data: bytes, message_type: type[M]) -> M | None:
    """What `parse` returns, three times as fast, for bodies without anything unusual.

    None leaves the body to the exact decoder, and so do all errors, which are its to word. The fast
    decoder keeps the last of equal names and makes floats of numbers with a fraction. A member has
    one colon outside strings, so as many colons as names means that no name came twice; and no
    field takes a float.
    """
    try:
        document = msgspec.json.decode(data)
        if data.count(b":") != _count_names(document):
            return None
        message = message_type()
        _fill(message, document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, Wrong):
        return None
    return message


def _count_names(value: Any) -> int:
    """Names in nested objects; those in lists that begin with something else are left out."""
    if type(value) is dict:
        return len(value) + sum(map(_count_names, value.values()))
    if type(value) is list and value and type(value[0]) in (dict, list):
        return sum(map(_count_names, value))
    return 0


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"field {shown(name)} is given twice")
            seen.add(name)
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=Literal, parse_constant=_no_constant
)


def _fill(message: Message, value: Any) -> None:
    if type(value) is not dict:
        raise Wrong(f"expected an object, got {kind_of(value)}")
    fields = _plan(type(message)).by_json_name
    given: set[str] = set()
    for name, item in value.items():
        field = fields.get(name)
        if field is None:
            continue
        if field.name in given:
            raise Wrong("is given twice, in both spellings").under(field.name)
        given.add(field.name)
        if item is None:
            continue
        try:
            was_set = field.fill(message, item)
        except Wrong as error:
            raise error.under(field.name) from None
        if was_set and field.oneof:
            # The full name of a oneof has dots, so it cannot be a field of the message.
            if field.oneof in given:
                raise Wrong("another member of the same oneof is set too").under(field.name)
            given.add(field.oneof)


def _scalar(name: str, convert: Callable[[Any], Any]) -> Callable[[Message, Any], bool]:
    def fill(message: Message, value: Any) -> bool:
        converted = convert(value)
        if converted is IGNORED:
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
                except Wrong as error:
                    raise error.under(f"[{index}]") from None
                if element is not IGNORED:
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
            except Wrong as error:
                raise error.under(f"[{index}]") from None
        return True

    return fill


def _array(value: Any) -> list[Any]:
    if type(value) is not list:
        raise Wrong(f"expected an array, got {kind_of(value)}")
    return value


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


def _presence(descriptor: FieldDescriptor) -> Callable[[Message], bool] | None:
    if descriptor.has_presence:
        return _has(descriptor.name)
    if descriptor.number >= _FIRST_ADDITION:
        # A body that says nothing new stays what it was before the addition.
        return lambda message: bool(getattr(message, descriptor.name))
    return None


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
    descriptors: Sequence[Any] = message_type.DESCRIPTOR.fields
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
        oneof=oneof.full_name if oneof is not None else "",
        fill=_filler(descriptor),
        present=_presence(descriptor),
        show=_each(show) if descriptor.is_repeated else show,
    )


def _filler(descriptor: FieldDescriptor) -> Callable[[Message, Any], bool]:
    name = descriptor.name
    if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
        return _list_of_messages(name) if descriptor.is_repeated else _submessage(name)
    convert, bulk = converters(descriptor)
    if descriptor.is_repeated:
        return _list_of_scalars(name, convert, bulk)
    return _scalar(name, convert)


def _shower(descriptor: FieldDescriptor) -> Callable[[Any], Any]:
    kind = descriptor.type
    if kind == FieldDescriptor.TYPE_MESSAGE:
        return _show
    if kind == FieldDescriptor.TYPE_ENUM:
        return _show_enum(descriptor.enum_type)
    if kind == FieldDescriptor.TYPE_DOUBLE:
        return _show_double
    return str if kind in _PRINTED_AS_STRING else _same
