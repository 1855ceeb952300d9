"""An extension of griffe that formats docstrings for the API page of the site.

Examples, from ``>>>`` to the next empty line, become code blocks. A paragraph that describes parameters, each in a
sentence that begins with the parameter's name, becomes a list.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"(?:^|(?<=\. )|(?<=; ))(?=``\w+``(?:, ``\w+``)*(?::| ))")
LEAST = 3
"""The fewest names in a paragraph for which it becomes a list."""


def listed(paragraph: str) -> str:
    """Return ``paragraph`` as a Markdown list if it describes at least ``LEAST`` names, else unchanged. The sentences
    from "Raises" on become a paragraph after the list."""
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
    """Replaces the docstring of every object by its formatted form."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Format the docstring of ``obj``. griffe calls this for each object that it loads."""
        if obj.docstring is not None:
            text = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
            obj.docstring.value = "\n\n".join(listed(part) for part in re.split(r"\n\s*\n", text))
