"""A hook of mkdocs: links of a page to files beside ``docs/``, which the site does not have, become the files' names."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What mkdocs calls with the text of each page."""
    return OUTSIDE.sub(r"`\2`", markdown)
