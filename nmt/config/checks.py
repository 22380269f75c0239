"""Checks of plain values against the schema, with errors that a user can act on; helpers for nested values."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from nmt.config.errors import UserError, for_shell, format_value, nearest, override_values
from nmt.config.schema.base import element, fields, members

T = TypeVar("T", bound=BaseModel)
log = logging.getLogger(__name__)
# YAML files write ${attends:${attention.kind}} for a value that is true only if the model has an attention.
OmegaConf.register_new_resolver("attends", lambda kind: kind != "none", replace=True)


def config_dir() -> Path:
    """Return the folder of the YAML files: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def validated(schema: type[T], values: Mapping[str, Any], section: str = "", source: Path | None = None) -> T:
    """Check plain values against the schema and return the typed object.

    Raises UserError that names the key below `section`, the value and what is allowed, and the file `source` if given.
    """
    result: T = validated_union(schema, values, section, prefix=f"{source}: " if source else "")
    return result


def validated_union(union: Any, values: Mapping[str, Any], section: str, prefix: str = "") -> Any:  # noqa: ANN401
    """Check the values of a section whose type is a union on `kind`, for example (Search, {...}, "search").

    Raises UserError as `validated` does, with `prefix` before each line.
    """
    try:
        return _validator(union).validate_python(values)
    except ValidationError as error:
        lines = [prefix + _explain(union, values, problem, section) for problem in error.errors()]
        raise UserError("\n".join(dict.fromkeys(lines))) from None


_validator = cache(TypeAdapter)  # it takes a millisecond to build, and the service needs it for each request


def drop_unused_values(schema: type[T], values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Drop the values of a section that its `kind` does not know, if the command line chose this kind.

    For example, an experiment sets search.beam_size, and the user adds search=greedy. Logs each value that it drops. A
    value that the user typed stays, so that it is reported as an unknown key.
    """
    chosen = override_values(overrides)
    typed = {".".join(key.split(".")[:2]) for key in chosen}
    result = dict(values)
    for name, field in fields(schema, values).items():
        section = values.get(name)
        if name not in chosen or not isinstance(section, Mapping):
            continue
        of_other_kinds = {key for member in members(field).values() for key in member.model_fields}
        of_other_kinds -= fields(field, section).keys()
        dropped = [key for key in section if key in of_other_kinds and f"{name}.{key}" not in typed]
        result[name] = {key: value for key, value in section.items() if key not in dropped}
        for key in dropped:
            value = format_value(section[key])
            log.info("%s.%s=%s: ignored, not a value of %s=%s", name, key, value, name, chosen[name])
    return result


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested mappings with its dotted key: ("a.b", 1) for {"a": {"b": 1}}."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")
        else:
            yield name, value


def _explain(annotation: Any, value: Any, problem: ErrorDetails, section: str = "") -> str:  # noqa: ANN401
    """Describe one problem in one line: the key as the user writes it, its value, what is allowed."""
    path: list[str] = [section] if section else []
    siblings: Mapping[str, Any] = {}
    for part in problem["loc"]:
        if isinstance(value, Mapping):
            siblings = fields(annotation, value)
            if part not in value and part not in siblings:
                continue  # in a union, pydantic inserts the name of the chosen type, which is no key
            path.append(format_value(part))
            annotation, value = siblings.get(str(part)), value.get(part)
        elif path:
            path[-1] += f"[{format_value(part)}]"
            if isinstance(value, list) and isinstance(part, int) and part < len(value):
                annotation, value = element(annotation), value[part]
    return _message(".".join(path), value, problem, annotation, siblings)


def _message(key: str, value: Any, problem: ErrorDetails, annotation: Any, siblings: Mapping[str, Any]) -> str:  # noqa: ANN401
    """Describe what is wrong with the value of a key, and which values are right. `siblings`: the keys beside it."""
    kind, context = problem["type"], problem.get("ctx", {})
    message = f"{problem['msg'][0].lower()}{problem['msg'][1:]}"
    match kind:
        case "extra_forbidden":
            hint = nearest(key.rpartition(".")[2], siblings)
            return f"{key}: unknown key{hint} (here: {', '.join(siblings)})"
        case "missing":
            return f"{key}: missing; it needs a value"
        case "union_tag_invalid" | "union_tag_not_found":
            tag = format_value(value.get("kind", "")) if isinstance(value, Mapping) else ""
            return f"{key}.kind={tag}: not one of {', '.join(members(annotation))}{nearest(tag, members(annotation))}"
        case "value_error":
            message = problem["msg"].removeprefix("Value error, ")
            return f"{key}: {message}" if key else message
        case "literal_error":
            choices = str(context.get("expected", "")).replace(" or ", ", ").replace("'", "").split(", ")
            message = f"not one of {', '.join(choices)}{nearest(format_value(value), choices)}"
        case "string_type" if value is None or isinstance(value, bool | int | float):
            meaning = "no value" if value is None else "true or false" if isinstance(value, bool) else "a number"
            text = format_value(value)
            message = f"is read as {meaning}; quote the text: '{text}' in YAML, {for_shell(key, text)} in a shell"
        case "bool_parsing" | "bool_type":
            message = "input should be true or false"
        case "model_type" | "model_attributes_type" | "dict_type":
            group = key.replace(".", "/")
            choose = f", or choose {group}=CHOICE" * (config_dir() / group).is_dir()
            message = f"is a section; set its values one by one: {key}.KEY=VALUE{choose}"
    return f"{key}={format_value(value)}: {message}"
