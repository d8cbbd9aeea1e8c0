"""Films a quickstart's page for the README: a frame every few seconds, put together as a GIF.

    python docs/film.py [--out docs/assets/quickstart.gif] [--every 4] [--seed 0]

Wants playwright with Debian's chromium, and pillow, which is needed for nothing else here.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from mettle.runs.ports import free_port

SIZE = {"width": 1160, "height": 800}
NUM_COLOURS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/assets/quickstart.gif"))
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two frames")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        folder = Path(scratch) / "quickstart"
        command = [sys.executable, "-m", "mettle.cli", "quickstart", "--no-browser", "--seed", str(options.seed)]
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")  # type: ignore[arg-type]
        with subprocess.Popen([*command, "--port", str(port), "--dir", str(folder)]) as run:
            frames = list(film(page, f"http://127.0.0.1:{port}/runs/quickstart", run, options.every))
        browser.close()
    write(frames, options.out)
    print(f"{len(frames)} frames, {options.out.stat().st_size / 1e6:.2f} MB")


def film(page: Page, address: str, run: subprocess.Popen[bytes], every_s: float) -> list[Image.Image]:
    """A picture of the page every so often until the run has ended."""
    frames: list[Image.Image] = []
    is_open = False
    while run.poll() is None:
        with contextlib.suppress(Exception):  # the page starts after the run, and ends before it
            if not is_open:
                page.goto(address)
                is_open = True
            frames.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
        time.sleep(every_s)
    return frames


def write(frames: list[Image.Image], path: Path) -> None:
    """All frames over one palette, the last of them held."""
    palette = frames[-1].quantize(NUM_COLOURS)
    small = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times_ms = [250] * (len(small) - 1) + [4000]
    path.parent.mkdir(parents=True, exist_ok=True)
    small[0].save(path, save_all=True, append_images=small[1:], duration=times_ms, loop=0, optimize=True)


if __name__ == "__main__":
    main()
