"""The page of a report in a real browser: what is drawn, on a wide light screen and on a narrow dark one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from ringattn.launch.report.charts import COLORS
from ringattn.launch.report.points import read_sweep
from ringattn.launch.report.report import page_of
from tests.launch.sweep_records import folder, strong

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")

MEASURE = """<script>addEventListener("load", () => {
  const box = (one) => { const r = one.getBoundingClientRect();
    return [r.left, r.top, r.right, r.bottom].map(Math.round) };
  const inside = (one) => !one.closest(".scroll") || one.classList.contains("scroll");
  const beyond = (one) => one.getBoundingClientRect().right > innerWidth + 1;
  const wide = [...document.querySelectorAll("body *")]
    .filter((one) => inside(one) && !one.closest("svg") && beyond(one)).map((one) => one.outerHTML.slice(0, 80));
  const texts = (svg) => [...svg.querySelectorAll("text")];
  const clipped = [...document.querySelectorAll("svg")].flatMap((svg) => texts(svg).filter((text) => {
    const t = text.getBoundingClientRect(), s = svg.getBoundingClientRect();
    return t.left < s.left - 1 || t.right > s.right + 1 || t.top < s.top - 1 || t.bottom > s.bottom + 1 })
    .map((text) => text.textContent));
  const page = document.documentElement;
  const found = {viewport: innerWidth, page: [page.scrollWidth, page.scrollHeight],
    charts: [...document.querySelectorAll("figure svg")].map(box), wide, clipped,
    broken: [...document.images].filter((one) => !one.naturalWidth).length,
    dark: matchMedia("(prefers-color-scheme: dark)").matches };
  parent.postMessage(JSON.stringify(found), "*") })</script>"""
# A window is at least 500 pixels wide, a frame as wide as asked for.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><body style="margin: 0">
<pre id="measured" hidden></pre>
<script>addEventListener("message", (told) => { document.getElementById("measured").textContent = told.data })</script>
<iframe src="measured.html" style="border: 0; display: block; width: WIDTHpx; height: HEIGHTpx"></iframe>"""


def browse(page: Path, size: tuple[int, int], *flags: str) -> str:
    """What headless Chromium prints about a file in a window of this many pixels."""
    assert CHROMIUM is not None
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage",
               "--force-device-scale-factor=1", profile, f"--window-size={size[0]},{size[1]}", *flags]  # fmt: skip
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def drawn(path: Path, html: str, width: int, *flags: str) -> tuple[dict[str, Any], np.ndarray]:
    """What the page measured of itself, and a picture of all of it: (height, width, 3), 0 to 255."""
    (path / "measured.html").write_text(html.replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    frame, shot = path / "frame.html", path / f"page-{width}.png"
    frame.write_text(FRAME.replace("WIDTH", str(width)).replace("HEIGHT", "800"), encoding="utf-8")
    left = re.search(r'<pre id="measured"[^>]*>(.+?)</pre>', browse(frame, (1280, 800), *flags, "--dump-dom"))
    assert left, "the page's script did not run"
    measured = json.loads(unescape(left[1]))
    height = measured["page"][1]
    frame.write_text(FRAME.replace("WIDTH", str(width)).replace("HEIGHT", str(height)), encoding="utf-8")
    browse(frame, (1280, height), *flags, f"--screenshot={shot}")
    return measured, np.round(matplotlib.image.imread(shot)[:, :width, :3] * 255).astype(int)


def colored(picture: np.ndarray, box: list[int], color: tuple[float, ...]) -> int:
    """How many pixels inside the box are of this color, give or take rounding."""
    left, top, right, bottom = box
    return int((np.abs(picture[top:bottom, left:right] - np.array(color)).max(-1) <= 2).sum())


DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")


@in_browser
@pytest.mark.slow
@pytest.mark.parametrize(("width", "flags", "brightness"), [(1280, (), 1.0), (400, DARK, 1.3)])
def test_what_a_browser_draws(tmp_path: Path, width: int, flags: tuple[str, ...], brightness: float) -> None:
    html = page_of(read_sweep(folder(tmp_path, strong())), lambda line: None)
    measured, picture = drawn(tmp_path, html, width, *flags)
    assert measured["viewport"] == width == measured["page"][0]
    assert measured["wide"] == [] and measured["clipped"] == []
    assert measured["broken"] == 0
    assert measured["dark"] == bool(flags)
    page, ink = ([20, 24, 29], [228, 233, 238]) if flags else ([255, 255, 255], [29, 39, 51])
    assert picture[2, 2].tolist() == page
    assert len(measured["charts"]) == 9
    series = [tuple(min(255, 255 * part * brightness) for part in to_rgb(color)) for color in COLORS[:3]]
    letters = tuple(min(255, part * brightness) for part in ink)
    for box in measured["charts"]:
        assert (box[2] - box[0]) * (box[3] - box[1]) > 50_000
        seen = [colored(picture, box, color) for color in series]
        # Three markers of 4 x 4 pixels at least for the line on top; one below it shows at its marker's corners.
        assert max(seen) > 48 and sum(count > 0 for count in seen) >= 2, seen
        assert colored(picture, box, letters) > 0  # the inside of some stroke of a letter, or of an axis


@in_browser
@pytest.mark.slow
def test_the_browser_test_sees_what_is_wrong(tmp_path: Path) -> None:
    html = page_of(read_sweep(folder(tmp_path, strong())), lambda line: None)
    html = html.replace("</header>", '<img src="gone.png"><div style="width: 900px">too wide</div></header>')
    html = html.replace(">ranks</text>", f">{'ranks ' * 30}</text>", 1)
    measured, picture = drawn(tmp_path, html, 400)
    assert measured["page"][0] > 400 and any("too wide" in one for one in measured["wide"])
    assert measured["broken"] == 1 and len(measured["clipped"]) == 1
    box = [2, 2, 398, 60]  # the heading: no line of any series
    assert colored(picture, box, tuple(255 * part for part in to_rgb(COLORS[0]))) == 0
