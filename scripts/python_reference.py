"""Write the Python reference: signatures, docstrings and fields of nmt's classes and functions, as Markdown.

A page names what it shows, such as `<!-- python nmt.Translator load translate -->`: a class with these members, or
a function, or a module with all that is public in it. `scripts/write_pages.py` fills in the text.
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

LINE = 100  # a longer signature has one parameter a line
HIDDEN = {"self", "cls"}  # parameters that a caller does not give


def reference(name: str, members: list[str]) -> str:
    """Return the Markdown of the object with this dotted name. Raises AttributeError if there is none."""
    value = find(name)
    if isinstance(value, ModuleType):
        parts = [described(f"{name}.{part.__name__}", part, None) for part in public(value)]
    else:
        parts = [described(name, value, members or None)]
    return "\n\n".join(parts)


def find(name: str) -> Any:  # noqa: ANN401
    """Import the module, class or function with this dotted name. Raises AttributeError if there is none."""
    module, attributes = name, []
    while True:
        try:
            value: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, attribute = module.rpartition(".")
            attributes.insert(0, attribute)
    for attribute in attributes:
        value = getattr(value, attribute)
    return value


def public(module: ModuleType) -> Iterator[Any]:
    """Yield the classes and functions that are defined in a module, without those whose names begin with _."""
    for name, value in vars(module).items():
        defined = inspect.isclass(value) or inspect.isfunction(value)
        if defined and value.__module__ == module.__name__ and not name.startswith("_"):
            yield value


def described(name: str, value: Any, members: list[str] | None) -> str:  # noqa: ANN401
    """Return the heading, the signature, the docstring, the fields and the members of a class or a function. members:
    names of the methods to show, by default all that are public and defined in the class itself."""
    parts = [f"### {value.__name__}", f"```py\n{signature(name, value)}\n```", prose(value)]
    if inspect.isclass(value):
        parts.append(prose(initialiser(value)))
        if lines := [f"- `{field}`: {comment}" for field, comment in fields(value)]:
            parts.append("\n".join(lines))
        for member in methods(value) if members is None else members:
            method = inspect.getattr_static(value, member)
            parts.append(f"#### {value.__name__}.{member}")
            if not isinstance(method, property):
                parts.append(f"```py\n{signature(member, getattr(value, member))}\n```")
            parts.append(prose(getattr(method, "__func__", method)))
    return "\n\n".join(part for part in parts if part)


def methods(value: type) -> list[str]:
    """Return the names of the methods that are public, documented and defined in the class itself, not in a library."""
    package = value.__module__.partition(".")[0]
    return [
        name
        for name, member in vars(value).items()
        if not name.startswith("_")
        and isinstance(member, Callable | property | classmethod)  # type: ignore[arg-type]
        and member.__doc__
        and getattr(member, "__module__", package).partition(".")[0] == package
    ]


def signature(name: str, value: Any) -> str:  # noqa: ANN401
    """Return the name with its parameters and result, one parameter a line if they do not fit into one line."""
    kind, function = ("class ", initialiser(value)) if inspect.isclass(value) else ("", value)
    if function is None:
        return f"{kind}{name}"
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    parameters = [re.sub(r"^([^=]+: [^=]+)=", r"\1 = ", part) for part in split(plain(node.args)) if part not in HIDDEN]
    result = f" -> {plain(node.returns)}" if node.returns and not kind else ""
    text = f"{kind}{name}({', '.join(parameters)}){result}"
    if len(text) <= LINE:
        return text
    lines = "".join(f"    {part},\n" for part in parameters)
    return f"{kind}{name}(\n{lines}){result}"


def initialiser(value: type) -> Any:  # noqa: ANN401
    """Return the class's own __init__; None if it has none, or one generated from its fields."""
    function = vars(value).get("__init__")
    return function if inspect.isfunction(function) and not function.__code__.co_filename.startswith("<") else None


def split(parameters: str) -> list[str]:
    """Split a list of parameters at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(parameters):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append(parameters[start:position].strip())
            start = position + 1
    return [*parts, parameters[start:].strip()]


def plain(node: ast.AST) -> str:
    """Return parameters or a type as in the source, with annotations in quotes as plain types."""
    for part in ast.walk(node):
        annotation = getattr(part, "annotation", None)
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            part.annotation = ast.parse(annotation.value, mode="eval").body  # type: ignore[attr-defined]
    text = ast.unparse(node)
    return text[1:-1] if isinstance(node, ast.Constant) and text[0] in "'\"" else text


def prose(value: Any) -> str:  # noqa: ANN401
    """Return a docstring as Markdown."""
    return escaped(inspect.cleandoc(value.__doc__ or "")) if value else ""


def escaped(text: str) -> str:
    """Escape what looks like HTML, such as `<s>`."""
    return re.sub(r"<(?=[\w/])", r"\\<", text)


def fields(value: type) -> Iterator[tuple[str, str]]:
    """Yield each public field of a class with its type and, from the source, the comment beside it or above it, or the
    string below it."""
    lines = textwrap.dedent(inspect.getsource(value)).splitlines()
    (tree,) = ast.parse("\n".join(lines)).body
    assert isinstance(tree, ast.ClassDef)
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            assert node.end_lineno is not None
            comments = [lines[node.end_lineno - 1][node.end_col_offset :].partition("# ")[2]]
            for line in reversed(lines[: node.lineno - 1]):
                if not line.lstrip().startswith("# "):
                    break
                comments.insert(0, line.lstrip()[2:])
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                comments.append(inspect.cleandoc(str(following.value.value)).replace("\n", " "))
            comment = " ".join(filter(None, comments))
            yield node.target.id, f"`{ast.unparse(node.annotation)}`" + (f", {escaped(comment)}" if comment else "")
