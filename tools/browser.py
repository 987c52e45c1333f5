#!/usr/bin/env python3
"""`make browser`: every page of the site, and the pages of `streammega view`, in a real browser
(chromium), as wide as a desktop and as a phone. A picture of each; what is wider than
its window, an error of the page, or what a keyboard does not reach is a problem.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = (1280, 390)
"""Columns of a desktop and of a phone."""
HEIGHT = 1400
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-sync",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
)
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
            command = [BROWSER or "chromium", *FLAGS, "--virtual-time-budget=5000", size, picture]
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


class Tab:
    """A tab of a browser, driven by its debugging protocol over two pipes. errors: what its console
    said.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._received = b""
        self._number = 0
        self._session = ""
        self._loaded = False
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser ended"
            self._received += part
        first, _, self._received = self._received.partition(b"\0")
        answer: dict[str, Any] = json.loads(first)
        if answer.get("method") == "Page.loadEventFired":
            self._loaded = True
        if answer.get("method") == "Log.entryAdded":
            self.errors.append(answer["params"]["entry"]["text"])
        return answer

    def show(self, url: str, width: int) -> None:
        """Open an address, as wide as this, and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=HEIGHT,
            deviceScaleFactor=1,
            mobile=False,
        )
        self._loaded = False
        self.call("Page.navigate", url=url)
        self.wait()

    def wait(self) -> None:
        """Wait until a page is loaded, after a key that opens one."""
        while not self._loaded:
            self._next()
        self._loaded = False

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        """Press a key and let it go."""
        code = {"Tab": 9, "Enter": 13}.get(key, 0)
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def picture(self, path: Path) -> None:
        """Write a picture of the page, as long as it is."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def open_tab() -> Iterator[Tab]:
    """A tab of a browser of its own."""
    to_browser = os.pipe()
    from_browser = os.pipe()
    # the browser reads descriptor 3 and writes 4, so none of ours may have these numbers
    inputs = fcntl.fcntl(to_browser[0], fcntl.F_DUPFD, 10)
    outputs = fcntl.fcntl(from_browser[1], fcntl.F_DUPFD, 10)

    def connect() -> None:
        os.dup2(inputs, 3)
        os.dup2(outputs, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [BROWSER or "chromium", *FLAGS, "--remote-debugging-pipe"]
        process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}"],
            preexec_fn=connect,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for descriptor in (to_browser[0], from_browser[1], inputs, outputs):
            os.close(descriptor)
        try:
            yield Tab(to_browser[1], from_browser[0])
        finally:
            process.kill()
            process.wait()
            os.close(to_browser[1])
            os.close(from_browser[0])


REACHABLE = "a[href], button, input, summary, [tabindex]"
FOCUSED = """(() => {
  const focused = document.activeElement, style = getComputedStyle(focused);
  const all = [...document.querySelectorAll(REACHABLE)];
  return [all.indexOf(focused), style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0];
})()""".replace("REACHABLE", json.dumps(REACHABLE))


def keyboard_problems(tab: Tab) -> list[str]:
    """What Tab does not reach on a page, or what does not show that it has the focus."""
    # what is within closed details is reached after they are opened
    tab.value("document.querySelectorAll('details').forEach(item => item.open = true)")
    count = tab.value(f"document.querySelectorAll({json.dumps(REACHABLE)}).length")
    problems = []
    reached = set()
    for _ in range(count):
        tab.press("Tab")
        number, has_outline = tab.value(FOCUSED)
        reached.add(number)
        if number >= 0 and not has_outline:
            problems.append(f"the focus on link or field {number} is not seen")
    missing = set(range(count)) - reached
    return problems + ([f"Tab does not reach {sorted(missing)}"] if missing else [])


def look_at_view(address: str, paths: Sequence[str], pictures: Path) -> list[str]:
    """Show pages of a running `streammega view` at all widths, and use it by keyboard alone."""
    pictures.mkdir(parents=True, exist_ok=True)
    root = address.partition("?")[0].rstrip("/")
    problems = []
    with open_tab() as tab:
        tab.show(address, WIDTHS[0])
        for number, path in enumerate(paths):
            for width in WIDTHS:
                tab.show(root + path, width)
                tab.picture(pictures / f"view-{number}-{width}.png")
                found = keyboard_problems(tab)
                if not tab.value("getComputedStyle(document.body).maxWidth").endswith("px"):
                    found.append("it has no style")
                if tab.value("document.documentElement.scrollWidth") > width:
                    found.append("wider than the window")
                problems += [f"view {path} at {width}: {problem}" for problem in found]
        # a link by Enter, and a field with a number
        tab.show(root + "/", WIDTHS[0])
        for key, words in (("Tab", ""), ("Tab", ""), ("Enter", "\r")):
            tab.press(key, words)
        tab.wait()
        if tab.value("location.pathname") != "/step":
            problems.append("view: Enter does not follow the link to the samples of a step")
        tab.value("document.querySelector('input[name=step]').select()")
        tab.press("2", "2")
        tab.press("Enter", "\r")
        tab.wait()
        if "step=2&" not in tab.value("location.search"):
            problems.append("view: Enter does not send a field")
    # the page that says what is not there has this status
    errors = [error for error in tab.errors if "status of 404" not in error]
    return problems + [f"view: {error}" for error in errors]


@contextlib.contextmanager
def running_view(what: str) -> Iterator[str]:
    """The address of a running `streammega view`."""
    command = [sys.executable, "-m", "streammega", "view", what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


VIEW_PAGES = (
    "/",
    "/dataset/0",
    "/dataset/1/document/3?uses=0",
    "/dataset/0/search?text=4",
    "/step?step=3&rank=1&ranks=2",
    "/step?step=99",
)


def main() -> int:
    from tests.support.builders import write_layout_run

    if BROWSER is None:
        print("skipped: chromium is not installed (Debian: apt-get install chromium)")
        return 0
    site = ROOT / "site"
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    problems = look(site, pages, ROOT / "browser-run")
    with (
        tempfile.TemporaryDirectory() as work,
        running_view(write_layout_run(Path(work))) as address,
    ):
        problems += look_at_view(address, VIEW_PAGES, ROOT / "browser-run")
    print("\n".join(problems))
    count = len(pages) + len(VIEW_PAGES)
    print(f"{count} pages, {len(problems)} problems; pictures in browser-run/")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
