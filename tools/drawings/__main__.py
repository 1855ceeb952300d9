"""Write the pictures: ``python -m tools.drawings``."""

from pathlib import Path

from tools.drawings.every import files

ASSETS = Path(__file__).parents[2] / "docs" / "assets"

if __name__ == "__main__":
    for name, text in files().items():
        (ASSETS / name).write_text(text)
