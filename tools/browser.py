#!/usr/bin/env python3
"""`make browser`: every page of the site, and reports of commands, in a real browser (chromium), as
wide as a desktop and as a phone. A picture of each; what is wider than its window, or an error of
the page, is a problem.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import io
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = (1280, 390)
"""Columns of a desktop and of a phone."""
HEIGHT = 1400
FRAMES = "".join(f'<iframe src="{{page}}" width="{w}" height="{HEIGHT}"></iframe>' for w in WIDTHS)
SCRIPT = """<script>
const errors = [];
addEventListener("error", event => errors.push(event.message || "not loaded: " + event.target.outerHTML), true);
addEventListener("unhandledrejection", event => errors.push(String(event.reason)));
const original = console.error;
console.error = (...words) => { errors.push(words.join(" ")); original(...words); };
addEventListener("load", () => setTimeout(() => {
  const width = document.documentElement.clientWidth;
  const wide = document.documentElement.scrollWidth > width
    ? [...document.body.querySelectorAll("*")].filter(e => e.getBoundingClientRect().right > width + 1)
      .slice(-1).map(e => e.outerHTML.slice(0, 200)).concat("the page")[0] : "";
  fetch("/seen", {method: "POST", body: JSON.stringify({page: location.pathname, width, wide, errors})});
}, 500));
</script>"""


class Pages(http.server.SimpleHTTPRequestHandler):
    """Serves a folder. Each page gets SCRIPT, which sends what it has seen to /seen."""

    seen: ClassVar[list[dict[str, Any]]]

    def do_GET(self) -> None:  # the name that http.server calls
        name, _, query = self.path.partition("?")
        path = Path(self.translate_path(name))
        if name == "/frames":
            self._send(FRAMES.format(page=query).encode())
        elif path.suffix == ".html" and path.is_file():
            self._send(path.read_bytes().replace(b"<head>", b"<head>" + SCRIPT.encode(), 1))
        else:
            super().do_GET()

    def do_POST(self) -> None:
        self.seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._send(b"")

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: one line a request otherwise."""


def look(folder: Path, pages: Sequence[str], pictures: Path) -> list[str]:
    """Show pages of a folder at all widths; a picture of each in `pictures`. Returns the problems."""
    Pages.seen = []
    serve = functools.partial(Pages, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pictures.mkdir(parents=True, exist_ok=True)

    def show(page: str) -> None:
        with tempfile.TemporaryDirectory() as profile:
            url = f"http://127.0.0.1:{server.server_port}/frames?{page}"
            size = f"--window-size={sum(WIDTHS) + 40},{HEIGHT + 20}"
            picture = f"--screenshot={pictures / page.replace('/', '-')}.png"
            flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-sync --hide-scrollbars"
            quiet = "--disable-background-networking --disable-component-update --virtual-time-budget=5000"
            command = [BROWSER or "chromium", *flags.split(), *quiet.split(), size, picture]
            command += [f"--user-data-dir={profile}", url]
            subprocess.run(command, capture_output=True, timeout=120, check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(show, pages))
    server.shutdown()
    server.server_close()
    seen = {(item["page"].lstrip("/"), item["width"]): item for item in Pages.seen}
    problems = []
    for page in pages:
        for width in WIDTHS:
            item = seen.get((page, width), {"wide": "", "errors": ["it was not shown"]})
            problems += [f"{page} at {width}: {error}" for error in item["errors"]]
            if item["wide"]:
                problems.append(f"{page} at {width}: wider than the window: {item['wide']}")
    return problems


def write_reports(folder: Path) -> None:
    """A page of each kind that a command writes, of a small run."""
    from streammega.cli.main import main as streammega
    from tests.support.builders import write_layout_run

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work, contextlib.redirect_stdout(io.StringIO()):
        run = write_layout_run(Path(work))
        other = Path(work, "other.toml")
        other.write_text(Path(run).read_text().replace("[data]", "[data]\nseed = 7"))
        for name, *words in (
            ("trace", "trace", run, "--step", "1"),
            ("find", "trace", run, "--find", "web#3"),
            ("diff", "diff-orders", run, str(other)),
        ):
            streammega([*words, "--html", str(folder / f"{name}.html")])


def main() -> int:
    if BROWSER is None:
        print("skipped: chromium is not installed (Debian: apt-get install chromium)")
        return 0
    site = ROOT / "site"
    write_reports(site / "reports")
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    problems = look(site, pages, ROOT / "browser-run")
    print("\n".join(problems))
    print(f"{len(pages)} pages, {len(problems)} problems; pictures in browser-run/")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
