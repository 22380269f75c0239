"""From composed YAML values to one typed object, with errors a user can act on."""

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from nmt.config import schema
from nmt.config.errors import UserError, nearest
from nmt.files import read_bytes, write_atomically

T = TypeVar("T", bound=BaseModel)
_NUMBER_OR_WORD = re.compile(r"[\w.+-]*")


def config_dir() -> Path:
    """Where the YAML files are: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def typed(schema: type[T], values: Mapping[str, Any]) -> T:
    """Check plain values against the schema. Raises UserError naming key, value, what is allowed."""
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        lines = [_explain(schema, values, problem) for problem in error.errors()]
        raise UserError("\n".join(dict.fromkeys(lines))) from None


def typed_union(union: Any, values: Mapping[str, Any], section: str) -> Any:  # noqa: ANN401
    """The same for one section whose type is a union on `kind`, e.g. (Search, {...}, "search")."""
    try:
        return TypeAdapter(union).validate_python(dict(values))
    except ValidationError as error:
        lines = [_explain(union, values, problem, section) for problem in error.errors()]
        raise UserError("\n".join(dict.fromkeys(lines))) from None


def load_values(path: Path) -> dict[str, Any]:
    """A saved config, as data: nothing that the file names is imported or called."""
    try:
        values = yaml.load(read_bytes(path).decode(), _PlainLoader)
    except OSError as error:
        raise UserError(f"{path}: cannot be read as a configuration ({error.strerror})") from None
    except Exception as error:  # a broken file can raise nearly anything
        raise UserError(f"{path}: cannot be read as a configuration ({_first_line(error)})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: is not a configuration (a mapping of keys to values is expected)")
    return values


class _PlainLoader(yaml.SafeLoader):
    """YAML without references: a few lines of them could stand for any number of values."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """One value. Raises ComposerError for a reference."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "a reference to another value", None)
        return super().compose_node(parent, index)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def save_values(path: Path, values: Mapping[str, Any]) -> None:
    """Write values as YAML, keeping their order."""
    write_atomically(path, yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True).encode("utf-8"))


def with_values(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Saved values with "key.path=value" overrides applied; the keys are checked where the values are typed."""
    changed: dict[str, Any] = yaml.safe_load(yaml.safe_dump(dict(values)))
    for override in overrides:
        key, _, value = override.partition("=")
        *sections, name = key.split(".")
        section = changed
        for part in sections:
            section = section.setdefault(part, {})
        try:
            section[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(f"{override}: cannot be read as KEY=VALUE") from None
    return changed


def merge_search(trained: schema.Search, given: Mapping[str, Any]) -> schema.Search:
    """A run's search with the values that are given (not None) in place of its own. Raises UserError."""
    given = {key: value for key, value in given.items() if value is not None}
    own = trained.model_dump()
    if given.get("kind", trained.kind) != trained.kind:  # what all kinds have stays
        own = {key: value for key, value in own.items() if key in schema.SearchLimits.model_fields}
    values = {**own, **given}
    search: schema.Search = typed_union(schema.Search, values, "search")
    return search


def given_values(overrides: Iterable[str]) -> dict[str, Any]:
    """What overrides such as "optimizer.lr=0.1" set, as plain values by key; lists and the like as they are written."""
    values = {}
    for override in overrides:
        key, _, text = override.lstrip("+").partition("=")
        value = yaml.safe_load(text) if _NUMBER_OR_WORD.fullmatch(text) else text
        if isinstance(value, str):
            with suppress(ValueError):
                value = float(value)  # 1e-05, which YAML takes for a word
        values[key] = value if isinstance(value, str | int | float | bool | None) else text
    return values


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """{"a": {"b": 1}} -> ("a.b", 1)."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")
        else:
            yield name, value


def _explain(schema: Any, values: Mapping[str, Any], problem: ErrorDetails, section: str = "") -> str:  # noqa: ANN401
    """One line for one problem: the key as the user writes it, what was given, what is allowed."""
    path: list[str] = [section] if section else []
    given: Any = values
    annotation, allowed = schema, _fields(schema, values)
    parts = problem["loc"]
    for part in parts:
        if isinstance(given, Mapping) and part not in given and part not in allowed:
            continue  # pydantic names the union's member here; the user never wrote it
        if isinstance(given, Mapping):
            path.append(str(part))
            field = allowed.get(str(part))
            given = given.get(part)
            if isinstance(given, Mapping) and field is not None:
                annotation, allowed = field, _fields(field, given)
        else:
            path[-1] += f"[{part}]"
    key = ".".join(path)
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{key}: unknown key{nearest(path[-1], allowed)} (here: {', '.join(allowed)})"
    if kind == "missing":
        return f"{key}: missing; it needs a value"
    if kind in {"union_tag_invalid", "union_tag_not_found"}:
        tags = context.get("expected_tags", "")
        tag = str(given.get("kind", "")) if isinstance(given, Mapping) else ""
        choices = [str(choice).strip(" '") for choice in str(tags).split(",")] if tags else list(_members(annotation))
        return f"{key}.kind={tag}: not one of {', '.join(choices)}{nearest(tag, choices)}"
    if kind == "value_error":
        message = problem["msg"].removeprefix("Value error, ")
        return f"{key}: {message}" if key else message
    if kind == "literal_error":
        expected = str(context.get("expected", ""))
        choices = expected.replace(" or ", ", ").replace("'", "").split(", ")
        return f"{key}={_shown(given)}: not one of {', '.join(choices)}{nearest(str(given), choices)}"
    return f"{key}={_shown(given)}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _shown(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _members(annotation: Any) -> dict[str, type[BaseModel]]:  # noqa: ANN401
    """The models of a union on `kind`, by their tags."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        kind = annotation.model_fields.get("kind")
        tags = get_args(kind.annotation) if kind else ("",)
        return {str(tag): annotation for tag in tags}
    origin = get_origin(annotation)
    members: dict[str, type[BaseModel]] = {}
    for member in get_args(annotation) if origin in {Union, types.UnionType} else ():
        members |= _members(member)
    return members


def _fields(annotation: Any, given: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    """Field name -> annotation of the model that `given` chooses."""
    members = _members(annotation)
    model = members.get(str(given.get("kind", ""))) or next(iter(members.values()), None)
    return {} if model is None else {name: field.annotation for name, field in model.model_fields.items()}
