"""A picture of the server's page while the engine works: page.png.

    python notebooks/pictures/page.py

Needs Chromium, and `pip install -e ".[test]"`. The times in it are of the machine that drew it.
"""

import sys
import time
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "tests"))

from browser import Browser  # noqa: E402
from servers import running  # noqa: E402

from nanoserve import AsyncLLM, EngineArgs  # noqa: E402
from nanoserve.extras.server import build_app  # noqa: E402


def main() -> None:
    """Press the button for eight requests, and draw the page when some of them have ended."""
    with (
        AsyncLLM(EngineArgs(num_gpu_blocks_override=128)) as async_llm,
        running(build_app(async_llm)) as server,
        Browser() as browser,
    ):
        page = browser.open(f"http://127.0.0.1:{server.port}/", 1280, 900)
        page.click("#samples")
        page.wait_for("steps.length > 40")
        time.sleep(0.2)  # drawn
        page.screenshot(HERE / "page.png", whole=True)
    picture = Image.open(HERE / "page.png").convert("RGB")
    picture.quantize(128).save(HERE / "page.png", optimize=True)


if __name__ == "__main__":
    main()
