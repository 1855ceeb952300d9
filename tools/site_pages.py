"""A hook of mkdocs. The pages are also read as plain Markdown files; two notations have to change for the site."""

from __future__ import annotations

import html
import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")
CODE_WITH_BAR = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")


def bars(found: re.Match[str]) -> str:
    """Return code from a table's cell as HTML, with ``\\|`` as a bar: Python-Markdown would show the backslash too."""
    return f"<code>{html.escape(found[1]).replace(chr(92) + '|', '&#124;')}</code>"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page for the site. mkdocs calls this for each page. A link to a file outside ``docs/``
    becomes the name of the file; code in tables goes through ``bars``."""
    markdown = OUTSIDE.sub(r"`\2`", markdown)
    return "\n".join(CODE_WITH_BAR.sub(bars, line) if line.startswith("|") else line for line in markdown.split("\n"))
