"""The command `view`: a website on this machine, to look at data as a model will see it."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import tempfile
import threading
import webbrowser
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streammega.cli.options import (
    DataWords,
    GlobalBatchSize,
    OrderName,
    Seed,
    SequenceLength,
    StorageFile,
    StorageOption,
    load_data,
    one_epoch,
    show_progress,
)
from streammega.cli.render import print_data
from streammega.errors import ConfigError, StreammegaError
from streammega.errors.extras import import_extra
from streammega.errors.process import describe_defect
from streammega.errors.redaction import redact

if TYPE_CHECKING:
    from flask import Flask, Response
    from werkzeug.exceptions import HTTPException

    from streammega.apps.view_pages import Pages

ADDRESS = "127.0.0.1"
HOSTS = [ADDRESS, "localhost"]
"""Names of this machine in requests. Another one is of a page that had its name changed to reach us."""
INTERRUPTED = 130
STYLE = Path(__file__).parent / "view_templates" / "style.css"


def view(
    words: DataWords,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="The port of the site.", show_default="a free one"),
    ] = 0,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the site in a browser.")
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="The tokenizer; by default the one that each manifest names."),
    ] = None,
    sequence_length: SequenceLength = None,
    global_batch_size: GlobalBatchSize = None,
    order: OrderName = None,
    seed: Seed = None,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """What does a model see? Shows documents, samples and the blend of a run in a browser.

    Prints the address of a site that only this machine can reach, and that ends with Ctrl-C. Reads
    only the ranges that a page shows. Of one dataset, without settings, its documents alone.
    """
    import_extra("flask", "view", "view needs Flask")
    from streammega.apps.view_data import Dataset, Run
    from streammega.apps.view_pages import Pages

    options = {
        "sequence_length": sequence_length,
        "global_batch_size": global_batch_size,
        "order": order,
        "seed": seed,
    }
    data, run = load_data(words, storage, storage_file, options=options, looks_only=True)
    has_settings = any(value is not None for value in options.values())
    with show_progress("opening"):
        if run is None and len(words) == 1 and not has_settings:
            pages = Pages(Dataset(words[0], data.storage, tokenizer))
        else:
            name = words[0] if run else " ".join(words)
            run = run or one_epoch(data, global_batch_size)
            pages = Pages(Run(name, run, tokenizer))
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(port))
        token = secrets.token_urlsafe(32)
        address = f"http://{ADDRESS}:{listener.getsockname()[1]}/?token={token}"
        print_data(f"{address}\nCtrl-C ends it.")  # with its token
        if open_browser:
            stack.enter_context(_opened(address))
        _serve(make_app(pages, token), listener)
    raise typer.Exit(INTERRUPTED)


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((ADDRESS, port))
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}; choose another one") from None


def _serve(app: Flask, listener: socket.socket) -> None:
    """Answer requests until Ctrl-C."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Nothing: the first line of a request may hold the token."""

    # a thread for each request, which ends with the process
    server = make_server(
        ADDRESS, 0, app, threaded=True, request_handler=Silent, fd=listener.fileno()
    )
    server.serve_forever()


@contextmanager
def _opened(address: str) -> Iterator[None]:
    """Open an address in a browser, by a file that leads there.

    Everybody on this machine can read a command line, and the token is in the address.
    """
    file, name = tempfile.mkstemp(prefix="streammega-view-", suffix=".html")
    try:
        with os.fdopen(file, "w") as page:
            page.write(f'<meta http-equiv="refresh" content="0;url={escape(address)}">')
        webbrowser.open(Path(name).as_uri())
        yield
    finally:
        os.unlink(name)


def make_app(pages: Pages, token: str) -> Flask:
    """The site. Only a browser that has the token sees its pages."""
    from flask import Flask, abort, g, redirect, render_template, request
    from werkzeug.exceptions import HTTPException

    app = Flask(__name__, static_folder=None, template_folder="view_templates")
    app.config["TRUSTED_HOSTS"] = HOSTS
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    app.jinja_env.filters["count"] = lambda number: f"{number:,}"
    style = STYLE.read_text()
    # a single style, which is in the page, and nothing else: no scripts, images or frames
    digest = b64encode(sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    lock = threading.Lock()

    def is_token(text: str) -> bool:
        return hmac.compare_digest(text.encode(), token.encode())

    @app.before_request
    def check() -> Any:
        port = request.host.rpartition(":")[2]  # raises for a host that is not trusted
        cookie = f"streammega-view-{port}"  # browsers send cookies to all ports of a machine
        if is_token(request.args.get("token", "")):
            answer = redirect(request.path)
            answer.set_cookie(cookie, token, httponly=True, samesite="Lax")
            return answer
        if not is_token(request.cookies.get(cookie, "")):
            abort(403, "Open the address that streammega view printed, with its token.")
        g.has_token = True
        return None

    @app.after_request
    def protect(answer: Response) -> Response:
        answer.headers["Content-Security-Policy"] = policy
        answer.headers["Referrer-Policy"] = "no-referrer"
        answer.headers["X-Content-Type-Options"] = "nosniff"
        answer.headers["Cache-Control"] = "no-store"
        return answer

    def show(template: str, values: dict[str, Any]) -> str:
        # who has no token learns no name of data
        has_token = "has_token" in g
        site = pages.title if has_token else "streammega view"
        has_steps = has_token and pages.run is not None
        return render_template(template, style=style, site=site, has_steps=has_steps, **values)

    def add(path: str, template: str, page: Any) -> None:
        def answer(**numbers: int) -> str:
            with lock:  # one page at a time: what is opened is shared
                return show(template, page(request.args, **numbers))

        app.add_url_rule(path, path, answer)

    for path, template, page in pages.routes():
        add(path, template, page)

    @app.errorhandler(StreammegaError)
    def explain(error: StreammegaError) -> tuple[str, int]:
        # a number that is not there is of the address; all else is of the data
        status = 404 if isinstance(error, ConfigError) else 502
        return show("error.html", {"message": str(error)}), status

    @app.errorhandler(OSError)
    def name(error: OSError) -> tuple[str, int]:
        message = redact(f"{error.filename or 'i/o'}: {error.strerror or error}")
        return show("error.html", {"message": message}), 502

    @app.errorhandler(HTTPException)
    def refuse(error: HTTPException) -> tuple[str, int]:
        return show("error.html", {"message": error.description}), error.code or 500

    @app.errorhandler(Exception)
    def describe(error: Exception) -> tuple[str, int]:
        return show("error.html", {"message": describe_defect(error)}), 500

    return app
