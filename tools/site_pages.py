"""A hook of mkdocs. The pages are also read as plain Markdown files; some notations have to change for the site."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

OUTSIDE = r"\[([^\]]+)\]\((?:\.\./){%d}([^)]+)\)"  # from a page in so many folders, docs included
CODE_WITH_BAR = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
NOTEBOOK = re.compile(r"\((\w+)\.ipynb\)")
PICTURE = re.compile(r'<p><img alt="([^"]*)" src="[^"]*assets/(\w+\.svg)" ?/?></p>')
DARK = "@media (prefers-color-scheme: dark){.drawing"
DOCS = Path(__file__).parents[1] / "docs"


def bars(found: re.Match[str]) -> str:
    """Return code from a table's cell as HTML, with ``\\|`` as a bar: Python-Markdown would show the backslash too."""
    return f"<code>{html.escape(found[1]).replace(chr(92) + '|', '&#124;')}</code>"


def picture(found: re.Match[str]) -> str:
    """Return a drawing as a part of its page, whose colour scheme it follows: a file would follow the system's."""
    text = (DOCS / "assets" / found[2]).read_text()
    assert text.count(DARK) == 1, f"{found[2]} has no dark form"
    text = re.sub(r"<title>.*?</title>\n", "", text, flags=re.DOTALL)
    begin, _, rest = text.partition(DARK)
    dark, _, rest = rest.partition("}}")
    return f'{begin}[data-md-color-scheme="slate"] .drawing{dark}}}{rest}'.replace(
        "<svg", f'<svg aria-label="{found[1]}"', 1
    )


def page_of(notebook: dict[str, Any], name: str) -> str:
    """Return a notebook as Markdown: its texts, and its code with the outputs that it has stored."""
    parts: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join(line for output in cell["outputs"] for line in output.get("text", ()))
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
        plots = [output["data"]["image/png"] for output in cell["outputs"] if "data" in output]
        parts += [f"![The plot that this program draws](data:image/png;base64,{plot.strip()})" for plot in plots]
    parts.insert(1, f"This page is a notebook with its outputs: [{name}]({name}). Download it to run it on your trace.")
    return "\n\n".join(parts) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each notebook. mkdocs calls this once."""
    from mkdocs.structure.files import File

    for path in sorted(DOCS.glob("*.ipynb")):
        content = page_of(json.loads(path.read_text()), path.name)
        files.append(File.generated(config, f"{path.stem}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page for the site. mkdocs calls this for each page. A link to a file outside ``docs/``
    becomes the name of the file, a link to a notebook one to its page; code in tables goes through ``bars``."""
    markdown = re.sub(OUTSIDE % (page.file.src_uri.count("/") + 1), r"`\2`", markdown)
    if not (DOCS / page.file.src_uri).with_suffix(".ipynb").exists():
        markdown = NOTEBOOK.sub(r"(\1.md)", markdown)
    return "\n".join(CODE_WITH_BAR.sub(bars, line) if line.startswith("|") else line for line in markdown.split("\n"))


def on_page_content(content: str, **_: Any) -> str:
    """Return the HTML of a page with its drawings in it. mkdocs calls this for each page."""
    return PICTURE.sub(picture, content)
