"""report.html holds what report.md does, needs no network, and fits a desktop's and a phone's window."""

import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eval.html import html
from eval.plots import figures, svg
from eval.report import markdown
from eval.sections import sections
from tests.eval.reports import METHODS, summary, traces

WINDOWS = {"desktop": (1280, 900), "phone": (390, 844)}
# What a reader would have to scroll sideways for, or could not read: an element that reaches beyond the window, one
# whose content is larger than itself and hidden, and a plot that draws outside its frame.
MEASURE = """
<script>
addEventListener("load", () => {
  for (const folded of document.querySelectorAll("details")) folded.open = true;
  const name = (e) => `${e.tagName}.${e.getAttribute("class") || ""}: ${e.textContent.trim().slice(0, 40)}`;
  const outside = [], clipped = [];
  for (const e of document.body.querySelectorAll("*:not(svg *)")) {
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    if (box.width && (box.right > innerWidth + 1 || box.left < -1)) outside.push(name(e));
    const hides = style.overflowX !== "visible" || style.overflowY !== "visible";
    const larger = e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1;
    if (e.tagName !== "svg" && hides && larger) clipped.push(name(e));
  }
  for (const plot of document.querySelectorAll("svg")) {
    const drawn = plot.getBBox(), frame = plot.viewBox.baseVal;
    if (drawn.x < -1 || drawn.y < -1 || drawn.x + drawn.width > frame.width + 1 ||
        drawn.y + drawn.height > frame.height + 1) clipped.push(name(plot));
  }
  parent.postMessage(JSON.stringify({
    inner: innerWidth, scroll: document.documentElement.scrollWidth, height: document.documentElement.scrollHeight,
    outside, clipped, paper: getComputedStyle(document.body).backgroundColor,
  }), "*");
});
</script>
"""
# Chromium's window has a least width that is wider than a phone: the page goes into a frame of the width wanted.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><body style="margin: 0">
<script>addEventListener("message", (found) => { document.body.dataset.found = found.data; });</script>
<iframe src="page.html" style="display: block; border: 0; width: WIDTHpx; height: HEIGHTpx"></iframe>
"""


class Text(HTMLParser):
    """The visible words of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.words, self.skipped = [], 0
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.skipped += tag in ("style", "script", "svg")

    def handle_endtag(self, tag):
        self.skipped -= tag in ("style", "script", "svg")

    def handle_data(self, data):
        if not self.skipped:
            self.words.append(data)


def test_says_what_the_markdown_says():
    words = " ".join(Text(html(summary(), traces())).words)
    for section in sections(summary()):
        assert section.title in words and section.text in words
        assert all(cell in words for line in section.cells for cell in line)
        assert all(meaning in words for _, meaning in section.terms)
        assert all(item in words for item in section.items)
    assert "precision only, in 3 of 16" in words and "precision only, in 3 of 16" in markdown(summary())
    assert "Failed: my_module:MyDrafter:key=value" in words and "Traceback" in words


def test_needs_nothing_from_elsewhere():
    page = html(summary(), traces())
    assert (
        not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)
        and "@import" not in page
        and "url(" not in re.sub(r"url\(#[^)]*\)", "", page)
    )
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page and "<script" not in page


def test_text_cannot_become_markup():
    found, traced = summary(), traces()
    found["rows"][0]["method"] = "<script>alert(1)</script>"
    traced[0]["steps"][1]["drafted"][0]["text"] = '"><img src=x>'
    page = html(found, traced)
    assert "<script" not in page and "<img" not in page and "<script>alert(1)</script>" in unescape(page)


def test_a_trace_shows_p_and_q_on_each_token():
    page = html(summary(), traces())
    assert 'data-tip="accepted: p 0.5, q 0.25, accepted with probability 1.000"> the</span>' in page
    assert page.count('<ol class="steps">') == 2 and page.count("<li>") > 40
    assert "Traces" not in "".join(Text(html(summary(), [])).words)


def test_plots_take_the_pages_colours_and_are_the_same_every_time():
    titles = [title for title, _ in figures(summary())]
    assert titles[0].startswith("Acceptance by position") and titles[-1].startswith("Divergences by cause")
    assert sum("Speed-up of decoding by batch size" in title for title in titles) == 2  # one for each temperature
    first, again = ([svg(figure) for _, figure in figures(summary())] for _ in range(2))
    assert first == again and all("currentColor" in one and "#010203" not in one for one in first)


def test_speedup_plot_draws_measured_and_ideal_of_every_drafter():
    [figure] = [figure for title, figure in figures(summary()) if "T 0.8" in title]
    [axes] = figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    row = next(r for r in summary()["rows"] if r["method"] == METHODS[3] and r["batch_size"] == 4 and r["temperature"])
    assert list(lines[METHODS[3]].get_xdata()) == [1, 4, 8]
    assert lines[METHODS[3]].get_ydata()[1] == row["decode_speedup_vs_plain"]
    assert lines[f"{METHODS[3]}, ideal"].get_ydata()[1] == row["ideal_speedup"]
    assert lines[f"{METHODS[3]}, ideal"].get_linestyle() == "--"


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("needs Chromium (Debian's package chromium)")
    return found


def opened(chromium: str, page: str, window: tuple[int, int], folder: Path, *options: str) -> dict:
    """What MEASURE finds of `page` in a window of that size; a screenshot of the whole page is left in `folder`."""
    (folder / "page.html").write_text(page.replace("</body>", f"{MEASURE}</body>"))
    always = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000"]

    def run(width: int, height: int, action: str) -> str:
        frame = folder / "frame.html"
        frame.write_text(FRAME.replace("WIDTH", str(width)).replace("HEIGHT", str(height)))
        command = [chromium, *always, f"--user-data-dir={folder}/u", f"--window-size={width},{height}", *options]
        return subprocess.run(
            [*command, action, frame.as_uri()], capture_output=True, text=True, timeout=300, check=True
        ).stdout

    found = json.loads(unescape(re.search(r'data-found="([^"]*)"', run(*window, "--dump-dom")).group(1)))
    run(window[0], min(found["height"], 12_000), f"--screenshot={folder / 'page.png'}")
    return found


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_fits_the_window(chromium, window, tmp_path):
    found = opened(chromium, html(summary(), traces()), window, tmp_path)
    assert found["inner"] == window[0] and found["scroll"] <= found["inner"]
    assert found["outside"] == [] and found["clipped"] == []
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_dark_where_the_reader_asks_for_it(chromium, tmp_path):
    page = html(summary(), traces())
    light = opened(chromium, page, WINDOWS["phone"], tmp_path)["paper"]
    dark = opened(chromium, page, WINDOWS["phone"], tmp_path, "--blink-settings=preferredColorScheme=0")["paper"]
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(21, 24, 28)")


@pytest.mark.parametrize(
    ("broken", "where"),
    [
        ("<p style='width: 2000px'>wide</p>", "outside"),
        ("<p style='width: 5em; overflow: hidden; white-space: nowrap'>a text that is cut off</p>", "clipped"),
        ("<svg viewBox='0 0 10 10'><rect width='30' height='5'/></svg>", "clipped"),
    ],
)
def test_the_measure_catches_what_does_not_fit(chromium, tmp_path, broken, where):
    """Broken controls of the tests above."""
    page = html(summary(), []).replace("</h1>", f"</h1>{broken}")
    assert len(opened(chromium, page, WINDOWS["phone"], tmp_path)[where]) >= 1
