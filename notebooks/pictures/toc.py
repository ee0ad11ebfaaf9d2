"""The small pictures of the table of contents: each notebook's slide, as it is stored.

    python notebooks/pictures/toc.py

A notebook has one cell with the tag "slide". The first PNG among the stored outputs of this cell is
made smaller and written to toc/NN.png. Nothing is run. `tests/test_notebooks.py` fails while a
picture is missing.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
WIDTH = 640  # pixels: twice the width in the table, for screens with fine pixels
COLOURS = 64


def slide_of(notebook: Path) -> bytes:
    """The PNG of the cell with the tag "slide". Raises ValueError if there is none."""
    for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
        if "slide" in cell["metadata"].get("tags", ()):
            for output in cell["outputs"]:
                if "image/png" in output.get("data", {}):
                    return base64.b64decode("".join(output["data"]["image/png"]))
    raise ValueError(f"{notebook.name} has no cell with the tag 'slide' and a stored picture.")


def make(notebook: Path) -> Image.Image:
    """The small picture."""
    picture = Image.open(io.BytesIO(slide_of(notebook))).convert("RGB")
    height = round(picture.height * WIDTH / picture.width)
    return picture.resize((WIDTH, height), Image.Resampling.LANCZOS).quantize(COLOURS)


if __name__ == "__main__":
    (HERE / "toc").mkdir(exist_ok=True)
    for notebook in sorted(HERE.parent.glob("*.ipynb")):
        target = HERE / "toc" / f"{notebook.name[:2]}.png"
        make(notebook).save(target, "png", optimize=True)
        print("wrote", target.relative_to(HERE.parent.parent))
