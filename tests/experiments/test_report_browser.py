"""The report in a real browser, where one is installed: no errors, all figures visible, tables that sort."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from credo.experiments import report
from credo.experiments.results import load_results
from tests.experiments.synthetic import write_run

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=2000"),
)
# What a reader would look at, written into the title after a click on the heading of the NLL, and a second one
LOOK = """<script>
window.onload = () => {
  const names = () => [...document.querySelectorAll("tr.ours th")].map((cell) => cell.textContent).join(",");
  const head = [...document.querySelectorAll("thead th")].find((cell) => cell.textContent === "NLL");
  head.click(); const up = names(); head.click();
  const hidden = [...document.images].filter((image) => !image.naturalWidth || !image.offsetWidth).length;
  const wide = document.documentElement.scrollWidth > window.innerWidth;
  document.title = [up, names(), document.images.length, hidden, wide].join("|");
};
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [390, 1300])
def test_the_page_opens_and_sorts(tmp_path: Path, width: int) -> None:
    for row, nll in (("vogn", 1.1), ("adam", 1.3), ("mc-dropout", 1.2)):
        write_run(tmp_path, row, metrics={"accuracy": 0.6, "nll": nll})
    report.write(tmp_path / "out", load_results(tmp_path))
    page = tmp_path / "out" / "report.html"
    page.write_text(page.read_text() + LOOK)
    assert BROWSER is not None
    command = [BROWSER, *QUIET, f"--window-size={width},900", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, "--enable-logging=stderr", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CONSOLE" not in done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    up, down, images, hidden, wide = title[1].split("|")
    without = "BBB,VOGN (defaults)"  # lines without a run of ours stay last
    assert up == f"VOGN,MC-dropout,Adam,{without}"
    assert down == f"Adam,MC-dropout,VOGN,{without}"
    assert int(images) > 0
    assert (hidden, wide) == ("0", "false")
