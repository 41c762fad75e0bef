"""The protocol's methods as OpenAPI, generated from the descriptors."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from kvcm.server.http_edge import API_PREFIX

_SCALARS: dict[int, dict[str, Any]] = {
    FieldDescriptor.TYPE_STRING: {"type": "string"},
    FieldDescriptor.TYPE_BOOL: {"type": "boolean"},
    FieldDescriptor.TYPE_DOUBLE: {"type": "number", "format": "double"},
    FieldDescriptor.TYPE_INT32: {"type": "integer", "format": "int32"},
    FieldDescriptor.TYPE_UINT32: {"type": "integer", "format": "int64", "minimum": 0},
    # Printed as a string, so that no JSON reader rounds it; read in either form.
    FieldDescriptor.TYPE_INT64: {
        "oneOf": [{"type": "string", "pattern": "^-?[0-9]+$"}, {"type": "integer"}],
        "format": "int64",
    },
}
_ERROR = "RequestError"


def with_methods(document: dict[str, Any], service: Any) -> dict[str, Any]:
    """``document`` with the service's methods and their message schemas added."""
    schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
    paths: dict[str, Any] = document.setdefault("paths", {})
    for method in service.methods:
        path = f"{API_PREFIX}{method.name[0].lower()}{method.name[1:]}"
        paths[path] = {"post": _operation(method, service.name)}
        _add(schemas, method.input_type)
        _add(schemas, method.output_type)
    schemas[_ERROR] = _object({"header": _ref("CommonResponseHeader")})
    return document


def _operation(method: Any, tag: str) -> dict[str, Any]:
    refused = {"description": "", "content": _content(_ERROR)}
    return {
        "operationId": method.name,
        "tags": [tag],
        "requestBody": {"required": True, "content": _content(method.input_type.name)},
        "responses": {
            "200": {
                "description": "Answered; header.status tells how it went.",
                "content": _content(method.output_type.name),
            },
            "400": {**refused, "description": "The body does not parse or has a wrong type."},
            "413": {**refused, "description": "Request or reply is too large."},
        },
    }


def _content(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(schema)}}


def _ref(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _add(schemas: dict[str, Any], message: Descriptor) -> None:
    if message.name in schemas:
        return
    properties: dict[str, Any] = {}
    schemas[message.name] = _object(properties)
    for field in message.fields:
        schema = _field(schemas, field)
        properties[field.name] = {"type": "array", "items": schema} if field.is_repeated else schema


def _field(schemas: dict[str, Any], field: FieldDescriptor) -> dict[str, Any]:
    if field.message_type is not None:
        _add(schemas, field.message_type)
        return _ref(field.message_type.name)
    if field.enum_type is not None:
        return _enum(schemas, field.enum_type)
    return dict(_SCALARS[field.type])


def _enum(schemas: dict[str, Any], enum: EnumDescriptor) -> dict[str, Any]:
    schemas.setdefault(enum.name, {"type": "string", "enum": [v.name for v in enum.values]})
    return _ref(enum.name)
