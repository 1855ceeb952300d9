"""A hook of mkdocs: pages are written to be read on their own too, and two things in them mean something else in the site."""

from __future__ import annotations

import html
import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")
CODE_WITH_BAR = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")


def bars(found: re.Match[str]) -> str:
    """Code in a table's cell, where a bar is written as backslash and bar, as HTML: Python-Markdown would show both."""
    return f"<code>{html.escape(found[1]).replace(chr(92) + '|', '&#124;')}</code>"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What mkdocs calls with the text of each page. A link to a file beside ``docs/`` becomes the file's name."""
    markdown = OUTSIDE.sub(r"`\2`", markdown)
    return "\n".join(CODE_WITH_BAR.sub(bars, line) if line.startswith("|") else line for line in markdown.split("\n"))
