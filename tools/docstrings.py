"""An extension of griffe, for the API page: what is one paragraph or a few lines in a docstring has a shape there.

Examples, ``>>>`` to the next empty line, are shown as code. A paragraph that goes through the parameters, each in a sentence
that begins with its name, is shown as a list.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"(?:^|(?<=\. )|(?<=; ))(?=``\w+``(?:, ``\w+``)*(?::| ))")
LEAST = 3
"""So many names make a list."""


def listed(paragraph: str) -> str:
    """``paragraph`` as a list, if it goes through names; what it says that a call raises stands behind it."""
    line = re.sub(r"\s*\n\s*", " ", paragraph)
    if len(re.findall(r"(?:^|[.;] )``\w+``(?:, ``\w+``)*:", line)) < LEAST or paragraph.startswith(
        (" ", ">>>", "-", "|")
    ):
        return paragraph
    line, raises, errors = line.partition(" Raises ")
    items = [item.strip() for item in NAMED.split(line)]
    first, rest = items[0], [f"- {item}" for item in items[1:]]
    return "\n".join([*([first, ""] if first else []), *rest, *(["", f"Raises {errors}"] if raises else [])])


class Docstrings(Extension):
    """Give docstrings their shape."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
            obj.docstring.value = "\n\n".join(listed(part) for part in re.split(r"\n\s*\n", text))
