"""Secrets are given in every way there is, to every command, and to servers that repeat what they are
sent, while all libraries log what they do. Then all that was printed, logged, written to disks and put
into buckets is searched for them.
"""

from __future__ import annotations

import base64
import importlib
import json
import logging
import os
import pickle
import pkgutil
import re
import sys
import threading
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote, quote_plus
from xml.sax.saxutils import escape

import pytest

from streammega import DataConfig, IndexedDataset, StreamLoader
from streammega.cli.main import COMMANDS, main
from streammega.config import load_storage
from streammega.errors import StreammegaError
from streammega.storage import open_store
from streammega.train.config import load_run
from tests.support.builders import write_jsonl, write_manifest, write_random_pair, write_run_file
from tests.support.crash_kills import Child
from tests.support.servers import S3

NAMES = ("secret", "token", "password", "proxy", "process", "service", "signature", "header")
SECRETS = {name: f"Sx{name}/q+7w=xS" for name in NAMES}
KEY = "AKIASEEDEDKEY000"
QUERY = (
    f"X-Amz-Credential={KEY}&X-Amz-Signature={quote(SECRETS['signature'], safe='')}"
    f"&X-Amz-Security-Token={quote(SECRETS['token'], safe='')}&Expires=1735689600&OSSAccessKeyId={KEY}"
)


def spellings(secret: str) -> set[str]:
    """As it is, in URLs, in JSON, and within base64 at any offset."""
    in_base64 = set()
    for offset in range(3):
        encoded = base64.b64encode(b"x" * offset + secret.encode()).decode()
        in_base64.add(encoded[4 if offset else 0 : -4])
    in_json = json.dumps(secret)[1:-1]
    return {secret, quote(secret), quote(secret, safe=""), quote_plus(secret), in_json, *in_base64}


FORMS = [(name, form.encode()) for name, value in SECRETS.items() for form in spellings(value)]


class Repeating(BaseHTTPRequestHandler):
    """Answers with the status that the bucket is named after (`b403`; `g403` to GET alone), and with
    all that it was sent. `service` gives credentials.
    """

    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = re.sub(r"^http://[^/]*", "", self.path)
        name = path.strip("/").partition("/")[0] + " " + self.headers["Host"]
        sent = (
            f"{self.command} {self.path} {' '.join(f'{k}: {v}' for k, v in self.headers.items())}"
        )
        found = re.search(r"\b([bg])(\d{3})\b", name)
        status = int(found[2]) if found else 404
        body = (
            f"<Error><Code>InvalidToken</Code><Message>you sent {escape(sent)}</Message>"
            f"<Token-0>{SECRETS['token']}</Token-0></Error>"
        ).encode()
        if path.startswith("/service"):
            credentials = {"SecretAccessKey": SECRETS["secret"], "Token": SECRETS["token"]}
            credentials |= {"AccessKeyId": KEY, "Expiration": "2999-01-01T00:00:00Z"}
            status, body = 200, json.dumps(credentials).encode()
        elif found and found[1] == "g" and self.command == "HEAD":
            status, body = 200, b"x" * 4000
        self.send_response(status)
        if status == 301:
            url = f"http://user:{quote(SECRETS['password'], safe='')}@127.0.0.1:1/x?{QUERY}"
            self.send_header("Location", url)
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Sat, 21 Nov 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Says nothing of clients that hang up."""

    def handle_error(self, *_: Any) -> None:
        pass


class World(NamedTuple):
    """given: files with secrets, which are inputs. written: all else. host: of the server that
    repeats; stored: that of one that stores.
    """

    given: Path
    written: Path
    host: str
    stored: S3

    def environment(self, host: str) -> dict[str, str]:
        """What every process has, without secrets."""
        for name in ("home", "cache", "tmp"):
            (self.written / name).mkdir(exist_ok=True)
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.written / "home"),
            "XDG_CACHE_HOME": str(self.written / "cache"),
            "TMPDIR": str(self.written / "tmp"),
            "STREAMMEGA_LOG": "DEBUG",
            "PYTHONASYNCIODEBUG": "1",
            "RUST_LOG": "trace",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_CONFIG_FILE": str(self.given / "config"),
            "AWS_SHARED_CREDENTIALS_FILE": str(self.given / "credentials"),
        }

    def give(self, name: str, text: str) -> str:
        """The path of an input."""
        (self.given / name).write_text(text)
        return str(self.given / name)


@pytest.fixture
def world(tmp_path: Path, moto: S3) -> Iterator[World]:
    for name in ("given", "written"):
        (tmp_path / name).mkdir()
    server = Server(("127.0.0.1", 0), Repeating)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield World(
        tmp_path / "given", tmp_path / "written", f"127.0.0.1:{server.server_address[1]}", moto
    )
    server.shutdown()
    server.server_close()
    thread.join()


class Source(NamedTuple):
    """Where the credentials are: variables of the environment, and storage options."""

    environment: Mapping[str, str] = MappingProxyType({})
    options: Mapping[str, Any] = MappingProxyType({})


def from_environment(world: World, host: str) -> Source:
    return Source(
        {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRETS["secret"],
            "AWS_SESSION_TOKEN": SECRETS["token"],
            "AWS_ENDPOINT_URL": f"http://user:{quote(SECRETS['password'], safe='')}@{host}",
        }
    )


def from_options(world: World, host: str) -> Source:
    endpoint = f"http://user:{quote(SECRETS['password'], safe='')}@{host}"
    options = {"key": KEY, "secret": SECRETS["secret"], "token": SECRETS["token"]}
    return Source(options=options | {"endpoint_url": endpoint})


def from_a_profile(world: World, host: str) -> Source:
    keys = f"aws_access_key_id={KEY}\naws_secret_access_key={SECRETS['secret']}\n"
    world.give("credentials", f"[own]\n{keys}aws_session_token={SECRETS['token']}\n")
    return Source({"AWS_PROFILE": "own"})


def from_a_process(world: World, host: str) -> Source:
    answer = {"AccessKeyId": KEY, "SecretAccessKey": SECRETS["secret"]}
    answer |= {"SessionToken": SECRETS["token"], "Expiration": "2999-01-01T00:00:00Z"}
    path = world.give("answer", json.dumps({"Version": 1, **answer}))
    world.give("config", f"[profile own]\ncredential_process = /bin/cat {path}\n")
    return Source({"AWS_PROFILE": "own"})


def from_a_process_that_fails(world: World, host: str) -> Source:
    script = world.give("fails", f"echo no {SECRETS['process']} >&2; exit 3\n")
    world.give("config", f"[profile own]\ncredential_process = /bin/sh {script}\n")
    return Source({"AWS_PROFILE": "own"})


def from_a_service(world: World, host: str) -> Source:
    token = world.give("token", quote(SECRETS["service"], safe=""))
    uri = f"http://{world.host}/service/own?token={quote(SECRETS['service'], safe='')}"
    variable = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"
    return Source({"AWS_CONTAINER_CREDENTIALS_FULL_URI": uri, variable: token})


def from_a_service_that_fails(world: World, host: str) -> Source:
    token = quote(SECRETS["service"], safe="")
    uri = f"http://{world.host}/b500/own?token={token}"
    variable = "AWS_CONTAINER_AUTHORIZATION_TOKEN"
    return Source({"AWS_CONTAINER_CREDENTIALS_FULL_URI": uri, variable: token})


def by_a_proxy(world: World, host: str) -> Source:
    proxy = f"http://user:{quote(SECRETS['proxy'], safe='')}@127.0.0.1:1"
    return Source({**from_environment(world, host)[0], "HTTP_PROXY": proxy, "http_proxy": proxy})


def with_a_wrong_endpoint(world: World, host: str) -> Source:
    return Source(
        {
            **from_environment(world, host)[0],
            "AWS_ENDPOINT_URL": f"http://user:{SECRETS['password']}@{host}",
        }
    )


def with_an_endpoint_without_a_scheme(world: World, host: str) -> Source:
    return Source(
        {
            **from_environment(world, host)[0],
            "AWS_ENDPOINT_URL": f"user:{SECRETS['password']}@{host}",
        }
    )


def of_oss(world: World, host: str) -> Source:
    return Source(
        {
            "OSS_ENDPOINT": f"http://{host}",
            "OSS_ACCESS_KEY_ID": KEY,
            "OSS_ACCESS_KEY_SECRET": SECRETS["secret"],
            "OSS_SESSION_TOKEN": SECRETS["token"],
        }
    )


GOOD = (from_environment, from_options)
"""Sources with which every command is run, and succeeds."""
SOURCES = (
    *GOOD,
    from_a_profile,
    from_a_process,
    from_a_process_that_fails,
    from_a_service,
    from_a_service_that_fails,
    by_a_proxy,
    with_a_wrong_endpoint,
    with_an_endpoint_without_a_scheme,
    of_oss,
)


FAIL = 5
"""The last ones of `commands` fail."""


def commands(
    world: World, root: str, options: Mapping[str, Any], transport: str
) -> list[list[str]]:
    """A call of each command on the data below a URL."""
    folder = world.written / "tmp"
    settings = {"transport": transport, "retry_timeout": 1, "request_timeout": 5}
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    section = [f"{name} = {json.dumps(value)}" for name, value in options.items()]
    world.give("storage.toml", "\n".join([*lines, "[storage_options]", *section]) + "\n")
    storage = ["--storage-file", str(world.given / "storage.toml")]
    run = write_run_file(
        world.given,
        data={
            "blend": [f"{root}/web"],
            "num_samples": [16, 0, 0],
            "split": "1,0,0",
            "index_publish_url": f"{root}/shared",
        },
        train={"train_iters": 2, "save_interval": 1, "out_dir": f"{root}/run"},
        **{
            "data.storage": settings | {"cache_dir": f"{folder}/cache", "cache_max_bytes": 1 << 30},
            "data.storage.storage_options": dict(options),
        },
    )
    texts = write_jsonl(folder / "in.jsonl", ["some text"] * 9)
    return [
        ["convert", texts, f"{root}/made", "--tokenizer", "bytes", "--provenance", *storage,
         "--json"],
        ["convert", f"{root}/web", f"{folder}/copy", *storage],
        ["ls", f"{root}/", *storage],
        ["verify", f"{root}/web", *storage],
        ["describe", f"{root}/web", "--json", *storage],
        ["describe", f"{root}/web", *storage],
        ["gc", f"{root}/web", *storage],
        ["cat", f"{root}/web#0", "--ids", *storage],
        ["order-report", f"{root}/web", "--sequence-length", "16", "--steps", "2", *storage],
        ["doctor", f"{root}/web", "--seconds", "1", *storage],
        ["bench", f"{root}/web", "--seconds", "1", *storage],
        ["simulate", "web=1G", *storage],
        ["prepare", run],
        ["manifest", run, f"{folder}/blend.json"],
        ["train", run],
        ["export", f"{root}/run/checkpoints/step-2", f"{folder}/model.safetensors", *storage],
        ["plot", f"{root}/run", "--out", f"{folder}/plot.png", *storage],
        ["trace", run, "--step", "1"],
        ["cache", "ls", f"{folder}/cache"],
        ["describe", f"{root}/wbe", *storage],
        ["view", f"{root}/wbe", *storage],
        ["convert", "--storage", SECRETS["secret"], texts, f"{root}/made"],
        ["train", run, f"data.storage {SECRETS['secret']}"],
        ["top", f"http://user:{SECRETS['secret']}@127.0.0.1:1", f"127.0.0.1:1/m?token={SECRETS['token']}"],
    ]  # fmt: skip


def in_a_process_of_its_own(
    environment: dict[str, str], log: str, calls: list[list[str]]
) -> list[int]:
    """The exit codes of commands. Their output, and what they start, is in the log."""
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(environment["TMPDIR"])
    log_all()
    sys.addaudithook(note_what_is_started)
    codes = []
    for words in calls:
        print(f"----- {words[0]}")
        codes.append(main(words))
    return codes


def log_all() -> None:
    """Have the libraries below log all that they do."""
    logging.disable(logging.NOTSET)
    names = ["asyncio", "s3fs", "fsspec", "urllib3", "aiohttp", "boto3", "obstore", "filelock"]
    for library in map(importlib.import_module, ("botocore", "aiobotocore")):
        # each by itself: commands set the level of them all
        names += [
            f"{library.__name__}.{item.name}" for item in pkgutil.iter_modules(library.__path__)
        ]
    for name in names:
        logging.getLogger(name).setLevel(logging.DEBUG)


def note_what_is_started(event: str, arguments: tuple[Any, ...]) -> None:
    """Print the words of processes, which all users of a machine can read."""
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
        print("started", arguments[:2], flush=True)


def found_in(data: bytes) -> set[str]:
    """The names of the secrets in some bytes."""
    return {name for name, form in FORMS if form in data}


def check_nothing_shows(world: World, bucket: str) -> None:
    """Search all that is written, and all objects, by name and by content."""
    leaks = {}
    objects = dict(world.stored.objects(bucket)) if bucket else {}
    for path in world.written.rglob("*"):
        if path.is_file():
            objects[str(path)] = path.read_bytes()
    for name, data in objects.items():
        if found := found_in(name.encode() + data):
            at = min(data.find(form) % (1 << 62) for key, form in FORMS if key in found)
            leaks[name] = (found, data[max(0, at - 200) : at + 60])
    assert not leaks


def run_commands(
    world: World, source: Callable[[World, str], Source], root: str, host: str, transport: str
) -> list[int]:
    environment, options = source(world, host)
    calls = commands(world, root, options, transport)
    if source not in GOOD:
        calls = [words for words in calls if words[0] in ("verify", "convert", "prepare")]
    log = str(world.written / f"log-{root.partition('://')[2].partition('/')[0]}")
    arguments = ({**world.environment(host), **environment}, log, calls)
    return list(Child(in_a_process_of_its_own, *arguments, method="forkserver").join())


def stored_dataset(world: World) -> str:
    """The name of a bucket with the dataset `web`, and metrics of a run."""
    bucket = world.stored.new_bucket()
    write_random_pair(str(world.given / "web"))
    write_manifest(world.given / "web", ["web"])
    for path in world.given.glob("web*"):
        world.stored.objects(bucket)[path.name] = path.read_bytes()
    world.stored.objects(bucket)["run/metrics.jsonl"] = b'{"step": 1, "loss": 2.0}\n'
    return bucket


def test_there_is_a_call_of_every_command(world: World) -> None:
    called = {words[0] for words in commands(world, "s3://bucket", {}, "auto")}
    assert called == {name.split()[0] for name in COMMANDS} - {
        "warmup"
    }  # which reads and writes nothing of a user's


@pytest.mark.guarantee("no-secret-shown")
@pytest.mark.parametrize("source", GOOD)
def test_commands_that_succeed_show_no_secret(
    world: World, source: Callable[[World, str], Source]
) -> None:
    bucket = stored_dataset(world)
    host = world.stored.endpoint.removeprefix("http://")
    codes = run_commands(world, source, f"s3://{bucket}", host, "obstore")
    assert codes[:-FAIL] == [0] * len(codes[:-FAIL]), (world.written / f"log-{bucket}").read_text()
    assert 0 not in codes[-FAIL:]
    check_nothing_shows(world, bucket)


@pytest.mark.guarantee("no-secret-shown")
@pytest.mark.parametrize("transport", ["obstore", pytest.param("fsspec", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "bucket",
    [
        "g403",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("b403", "g500", "b200", "b301")),
    ],
)
@pytest.mark.parametrize(
    "source",
    [
        # botocore asks its service again for half a minute
        pytest.param(
            source, marks=[pytest.mark.soak] if source is from_a_service_that_fails else []
        )
        for source in SOURCES
    ],
)
def test_commands_that_fail_show_no_secret(
    world: World, source: Callable[[World, str], Source], bucket: str, transport: str
) -> None:
    root = f"oss://{bucket}" if source is of_oss else f"s3://{bucket}"
    codes = run_commands(world, source, root, world.host, transport)
    assert any(codes)
    check_nothing_shows(world, "")


@pytest.mark.guarantee("no-secret-shown")
def test_what_clients_log_of_their_requests_shows_no_secret(world: World) -> None:
    environment, _ = from_environment(world, world.host)
    storage = ["--storage-file", world.give("storage.toml", 'transport = "fsspec"\n')]
    calls = [["ls", "s3://g403/web/", *storage], ["verify", "s3://g403/web", *storage]]
    log = world.written / "log"
    arguments = ({**world.environment(world.host), **environment}, str(log), calls)
    Child(in_a_process_of_its_own, *arguments, method="forkserver").join()
    text = log.read_text()
    for words in (
        "Using selector",
        "Sending http request",
        "X-Amz-Security-Token",
        "CanonicalRequest",
    ):
        assert words in text
    check_nothing_shows(world, "")


@pytest.mark.guarantee("no-secret-shown")
def test_inputs_and_datasets_of_signed_urls_show_no_signature(world: World) -> None:
    texts = f"http://{world.host}/{{}}/in.jsonl?{QUERY}"
    calls = [
        ["convert", texts.format(bucket), "made", "--tokenizer", "bytes", "--json"]
        for bucket in ("b404", "b403", "g403", "b200")
    ]
    calls += [["describe", f"http://{world.host}/g403/web?{QUERY}"], ["ls", texts.format("b200")]]
    environment = world.environment(world.host)
    log = str(world.written / "log")
    Child(in_a_process_of_its_own, environment, log, calls, method="forkserver").join()
    check_nothing_shows(world, "")


def use_the_library(world: World, environment: dict[str, str], root: str) -> None:
    """Print all that objects say of themselves, what their errors say in a traceback, and our records
    as a handler of a user gets them.
    """
    os.environ |= environment
    (world.written / "state").mkdir()
    log_all()
    logging.getLogger("streammega").setLevel(logging.DEBUG)
    handler = logging.FileHandler(world.written / "records")
    handler.addFilter(logging.Filter("streammega"))
    logging.getLogger().addHandler(handler)
    storage = load_storage(str(world.given / "storage.toml"))
    config = DataConfig(
        blend=[f"{root}/web"],
        sequence_length=16,
        num_samples=(8, 0, 0),
        storage=storage.changed(cache_dir=world.written / "cache", cache_max_bytes=1 << 30),
    )
    store, _ = open_store(f"{root}/web.bin", storage)
    shown = [storage, config, load_run(str(world.given / "run.toml")), store]
    with StreamLoader(config, micro_batch_size=2, global_batch_size=2, metrics_port=0) as loader:
        next(iter(loader))
        assert loader.metrics_address
        with urllib.request.urlopen(loader.metrics_address) as answer:
            shown += [loader, loader.stats(), loader.state_dict(), answer.read()]
    (world.written / "state" / "loader.json").write_text(json.dumps(loader.state_dict()))
    for name in (f"{root}/wbe", "s3://g403/web", "s3://b301/web"):
        by_server = storage if name.startswith(root) else load_storage(
            world.give("other.toml", (world.given / "storage.toml").read_text().replace(
                world.stored.endpoint.removeprefix("http://"), world.host))
        )  # fmt: skip
        try:
            IndexedDataset(name, by_server)
        except StreammegaError as error:
            shown += [error, pickle.dumps(error), *traceback.format_exception(error)]
    (world.written / "shown").write_text("\n".join(f"{item!r} {item}" for item in shown))


@pytest.mark.guarantee("no-secret-shown")
def test_objects_errors_and_metrics_show_no_secret(world: World) -> None:
    bucket = stored_dataset(world)
    host = world.stored.endpoint.removeprefix("http://")
    environment, options = from_options(world, host)
    (world.written / "tmp").mkdir()
    commands(world, f"s3://{bucket}", options, "obstore")  # writes the files of settings
    sent = world._replace(stored=S3(world.stored.endpoint))  # without a client
    arguments = (sent, {**world.environment(host), **environment}, f"s3://{bucket}")
    Child(use_the_library, *arguments, method="forkserver").join()
    assert b"AccessDeniedError" in (world.written / "shown").read_bytes()
    check_nothing_shows(world, bucket)
