"""Options that several commands share, declared once as the fields of a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints


def spread(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """For a command whose parameter ``flags`` is a ``kind``: typer sees its fields instead.

    Args:
        kind: a dataclass whose fields are annotated as typer's options, with defaults.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            named = {field.name: given.pop(field.name) for field in fields(kind)}
            command(**given, flags=kind(**named))

        hints = get_type_hints(kind, include_extras=True)
        options = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
            for field in fields(kind)
        ]
        own = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for name, parameter in own.parameters.items():
            shown = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            parameters += options if name == "flags" else [shown]
        # typer reads it; type checkers know functions as having no such attribute.
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate
