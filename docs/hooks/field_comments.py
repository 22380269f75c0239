"""For mkdocstrings: the comment beside a field, such as `score: float  # log-probability`, is its description."""

import ast
from typing import Any

from griffe import Attribute, Docstring, Extension


class FieldComments(Extension):
    """Gives attributes without a docstring the comment on their line."""

    def on_attribute_instance(self, *, node: Any, attr: Attribute, **_: Any) -> None:  # noqa: ANN401
        """Called by Griffe for each attribute that it reads from a file."""
        if attr.docstring is None and isinstance(node, ast.AnnAssign) and node.end_lineno is not None:
            line = attr.lines_collection[attr.filepath][node.end_lineno - 1]
            _, hash_sign, comment = line[node.end_col_offset :].partition("# ")
            if hash_sign and not comment.startswith(("noqa", "type:")):
                attr.docstring = Docstring(comment.strip(), parent=attr)
