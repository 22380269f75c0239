"""What a key of the configuration holds, read from its type in the schema."""

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from nmt.config.errors import format_value


class FilePath:
    """In the annotation of a field, marks text that names a file or a folder."""


def text_keys(schema: Any) -> set[str]:  # noqa: ANN401
    """Keys such as "data.source_lang" whose values are text alone: names, paths and lists of them."""
    return {key for key, annotation in _leaves(schema) if _plain_types(annotation) - {type(None)} == {str}}


def path_keys(schema: Any) -> set[str]:  # noqa: ANN401
    """Keys such as "data.train" whose values name files or folders."""
    return {key for key, annotation in _leaves(schema) if _contains(annotation, FilePath)}


def members(annotation: Any) -> dict[str, type[BaseModel]]:  # noqa: ANN401
    """The models of a union on `kind`, by their tags."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        kind = annotation.model_fields.get("kind")
        tags = get_args(kind.annotation) if kind else ("",)
        return {str(tag): annotation for tag in tags}
    origin = get_origin(annotation)
    models: dict[str, type[BaseModel]] = {}
    for member in get_args(annotation) if origin in {Union, types.UnionType} else ():
        models |= members(member)
    return models


def element(annotation: Any) -> Any:  # noqa: ANN401
    """The annotation of the elements of a list."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return next(iter(get_args(annotation)), None)


def fields(annotation: Any, values: Any) -> dict[str, Any]:  # noqa: ANN401
    """Field name -> annotation of the member of a union that `values` chooses by their kind."""
    models = members(annotation)
    kind = values.get("kind", "") if isinstance(values, Mapping) else ""
    model = models.get(format_value(kind)) or next(iter(models.values()), None)
    return {} if model is None else {name: field.annotation for name, field in model.model_fields.items()}


def _leaves(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """The keys of all members of a section, and of the sections within it, with their annotations."""
    for model in members(schema).values():
        for name, field in model.model_fields.items():
            annotation = field.rebuild_annotation()
            if members(annotation):
                yield from _leaves(annotation, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", annotation


def _plain_types(annotation: Any) -> set[Any]:  # noqa: ANN401
    """The types that values have once annotations, unions and lists are taken apart."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _plain_types(inner[0])
    if origin in {Union, types.UnionType, list}:
        return set().union(*map(_plain_types, inner))
    return {annotation}


def _contains(annotation: Any, marker: type[object]) -> bool:  # noqa: ANN401
    """Is any part of the annotation marked?"""
    return any(isinstance(part, marker) or _contains(part, marker) for part in get_args(annotation))
