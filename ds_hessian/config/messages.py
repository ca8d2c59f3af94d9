"""What is wrong with a setting, and what would be right: one line for each."""

from __future__ import annotations

import difflib
import json
from contextlib import suppress
from typing import Literal, TypeGuard, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

SECTION = "hessian"


def leaves_of(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Return {dotted path below the section: field}, in order of definition."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        if is_section(field.annotation):
            found |= leaves_of(field.annotation, f"{prefix}{name}.")
        else:
            found[prefix + name] = field
    return found


def is_section(annotation: object) -> TypeGuard[type[BaseModel]]:
    """Return whether a field is a section of its own."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def problems(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Return one line for each field that is wrong (a union reports each of its members)."""
    lines: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        if problem["type"] == "contradiction":
            lines[""] = problem["msg"]
            continue
        path, message = _explain(problem["loc"], problem["input"], root)
        lines.setdefault(path, f"{path}: {message}")
    return list(lines.values())


def _explain(
    location: tuple[int | str, ...], value: object, root: type[BaseModel]
) -> tuple[str, str]:
    """Return the full path of the field, and what is wrong with its value."""
    model, path = root, SECTION
    for name in map(str, location):
        if name not in model.model_fields:
            return f"{path}.{brief(name)}", f"unknown key{_suggest_key(path, name, model, root)}"
        path, field = f"{path}.{name}", model.model_fields[name]
        if not is_section(field.annotation):
            return path, f"must be {required(field)}, got {shown(value)}: {_advice(field, value)}"
        model = field.annotation
    keys = ", ".join(model.model_fields)
    return path, f"must be an object with keys of {keys}, got {shown(value)}"


def _suggest_key(path: str, name: str, model: type[BaseModel], root: type[BaseModel]) -> str:
    """Suggest the nearest valid name, or the section that a valid name belongs to."""
    for leaf in leaves_of(root):
        if leaf.split(".")[-1] == name:
            return f'; did you mean "{SECTION}.{leaf}"?'
    here = list(model.model_fields)
    if difflib.get_close_matches(name, here):
        return suggestion(name, here)
    elsewhere = {leaf.split(".")[-1]: leaf for leaf in leaves_of(root)}
    for match in difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.75):
        return f'; did you mean "{SECTION}.{elsewhere[match]}"?'
    return suggestion(name, here)


def suggestion(name: str, known: list[str], listed: list[str] | None = None) -> str:
    """Return the known name that is meant; if none is near, the list of them, or of `listed`."""
    for match in difflib.get_close_matches(name, known, n=1):
        return f'; did you mean "{match}"?'
    return f"; known are {', '.join(listed or known)}"


def _choices(field: FieldInfo) -> tuple[str, ...]:
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def required(field: FieldInfo) -> str:
    """Return what a setting accepts."""
    if choices := _choices(field):
        return " or ".join(map(shown, choices))
    assert isinstance(field.json_schema_extra, dict)  # `_field` gives each one
    return str(field.json_schema_extra["requires"])


def _advice(field: FieldInfo, value: object) -> str:
    choices = _choices(field)
    if choices and isinstance(value, str):
        for match in difflib.get_close_matches(value.lower(), choices, n=1):
            return f"did you mean {shown(match)}?"
    if isinstance(value, str) and value == "auto":  # others may compare to anything
        return f'Hugging Face\'s "auto" is not resolved in the "{SECTION}" section; write a value'
    if choices:
        return f"this version supports {', '.join(map(shown, choices))} only"
    if isinstance(value, str) and _is_literal(value):
        return "remove the quotes"
    return f"the default is {json.dumps(field.default)}"


def _is_literal(text: str) -> bool:
    """Return whether the text of a string would be a JSON number or truth value."""
    try:
        return isinstance(json.loads(text.strip().lower()), int | float)
    except (ValueError, RecursionError):
        return False


def shown(value: object) -> str:
    """Return a value as JSON would write it, shortened."""
    text = f"a value of type {type(value).__name__}"
    for write in (json.dumps, repr):  # neither shows a number of thousands of digits, or any depth
        with suppress(Exception):  # of a `repr` of the user's
            text = write(value)
            break
    return brief(text)


def brief(text: str) -> str:
    """Return a text, of a long one its beginning."""
    return text if len(text) <= 60 else text[:57] + "..."
