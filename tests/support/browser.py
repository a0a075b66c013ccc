"""Headless Chromium, as tests look at pages: what they complain of, and what they draw in windows of several widths."""

import html
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no browser (Debian: apt-get install chromium)")

WIDTHS = (1280, 390)
# Each width is a frame; the copy in it says when it is loaded how wide it is and which marks its plots draw there.
_SAY = """<script>addEventListener('load', () => {
  const marks = [...document.querySelectorAll('.row svg svg g')];
  const inside = marks.filter(mark => { const box = mark.getBoundingClientRect();
    const plot = mark.closest('.row > svg').getBoundingClientRect();
    return box.width > 0 && box.left >= plot.left && box.right <= plot.right && plot.right <= innerWidth; });
  const said = parent.document.createElement('p');
  said.textContent = `window=${innerWidth} width=${document.documentElement.scrollWidth} marks=${marks.length} ` +
    `inside=${inside.length} end`;
  parent.document.body.append(said); });</script>"""


class Look(NamedTuple):
    complaints: list[str]  # errors and warnings on the console
    frames: dict[int, dict[str, int]]  # of each width


def look(page: Path, folder: Path) -> Look:
    """Opens a page; what is needed meanwhile is written to `folder`."""
    assert BROWSER is not None
    text = html.escape(page.read_text().replace("</body>", _SAY + "</body>"))
    frames = "".join(f'<iframe srcdoc="{text}" style="width: {width}px; border: 0"></iframe>' for width in WIDTHS)
    whole = folder / "frames.html"
    whole.write_text(f"<!doctype html><html><head><link rel='icon' href='data:,'></head><body>{frames}</body></html>")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1200", whole.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [re.findall(r"(\w+)=(\d+)", line) for line in re.findall(r"<p>(window=.*?) end</p>", done.stdout)]
    found = [{name: int(value) for name, value in each} for each in said]
    return Look(
        [line for line in done.stderr.splitlines() if "CONSOLE" in line], {each["window"]: each for each in found}
    )
