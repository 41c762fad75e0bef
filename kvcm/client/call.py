"""One call as a value: request, how to read the reply, whether it may be repeated."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from kvcm.core.errors import InvalidArgument

T = TypeVar("T")
M = TypeVar("M", bound=Message)
F = TypeVar("F", bound=Callable[..., Any])

META_SERVICE = "kv_cache_manager.proto.meta.MetaService"
ADMIN_SERVICE = "kv_cache_manager.proto.admin.AdminService"


@dataclass(frozen=True, slots=True)
class Method:
    """An RPC. ``safe``: repeating it after a lost reply does no harm."""

    service: str
    name: str
    reply: type[Message]
    safe: bool

    @property
    def grpc_path(self) -> str:
        """Full gRPC method name."""
        return f"/{self.service}/{self.name}"

    @property
    def http_path(self) -> str:
        """Path of the POST (wire.md §1)."""
        return f"/api/{self.name[0].lower()}{self.name[1:]}"


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call.

    Attributes:
        parse: typed result of an OK reply.
        timeout: seconds for all attempts together; None = the client's.
        attempts_of_timeout: how many time-outs the call may take in all, each attempt getting
            one; 1 = all attempts share one.
    """

    method: Method
    # Requests hold thousands of keys, or a password.
    request: Message = field(repr=False)
    parse: Callable[[Any], T]
    timeout: float | None = None
    attempts_of_timeout: int = 1


def build(message: type[M], **fields: Any) -> M:
    """Make a request; None leaves a field unset.

    Raises:
        InvalidArgument: a value of the wrong type or out of range, naming the field.
    """
    try:
        return message(**fields)
    except (TypeError, ValueError, OverflowError) as error:
        for name, value in fields.items():
            try:
                message(**{name: value})
            except (TypeError, ValueError, OverflowError) as cause:
                raise InvalidArgument(f"{name}: {cause}") from cause
        raise InvalidArgument(str(error)) from error


def nothing(reply: Any) -> None:
    """Result of calls that answer CommonResponse."""


def describe_function(function: F, builder: Callable[..., Any]) -> F:
    """Give a wrapper the name, docstring and signature of the function it wraps."""
    function.__name__ = builder.__name__
    function.__qualname__ = builder.__qualname__
    function.__doc__ = builder.__doc__
    _show_signature(function, inspect.signature(builder))
    return function


def describe_method(method: F, builder: Callable[..., Any]) -> F:
    """The same for a client's method, which gives the call's result."""
    describe_function(method, builder)
    result = str(inspect.signature(builder).return_annotation)
    return take_arguments(method, builder, result.removeprefix("Call[").removesuffix("]"))


def take_arguments(method: F, builder: Callable[..., Any], result: str) -> F:
    """Give a method the arguments of the builder, behind ``self``."""
    signature = inspect.signature(builder)
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [self_parameter, *signature.parameters.values()]
    _show_signature(method, signature.replace(parameters=parameters, return_annotation=result))
    return method


def _show_signature(function: Callable[..., Any], signature: inspect.Signature) -> None:
    # What `inspect` and `help` look at; type checkers know functions as having no such attribute.
    function.__signature__ = signature  # type: ignore[attr-defined]
