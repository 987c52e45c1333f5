"""Secrets of URLs and settings are in no message, log, report, printed line or written file,
whatever fails or succeeds.
"""

from __future__ import annotations

import json
import logging
import pickle
import random
import socket
import string
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import fsspec
import numpy as np
import pytest

from streammega import DataConfig, IndexedDataset, StorageConfig, StreamLoader, build_datasets
from streammega.cli.main import main
from streammega.convert import convert
from streammega.dataset.verify import verify
from streammega.errors import ConfigError, StorageError, StreammegaError
from streammega.errors.redaction import redact, redact_urls, remember_secrets
from streammega.samples.open import prepare
from streammega.samples.segments import source_names
from streammega.storage import open_store
from streammega.train.config import load_run
from streammega.train.splits import validation_sets
from tests.support.builders import write_random_pair
from tests.support.servers import S3, HttpObjects, http_server

USER_INFO = string.ascii_letters + string.digits + "-._~!$&'()*+,;="
ANYTHING = USER_INFO + '/@:#?%[]{}|\\^` <>"'


def some_secret(rng: random.Random, alphabet: str) -> str:
    """Begins and ends with letters, so that it is found whatever stands around it."""
    middle = "".join(rng.choice(alphabet) for _ in range(rng.randrange(8, 40)))
    return f"Sx{rng.randrange(10**6)}{middle}xS"


@dataclass
class Site:
    """A server with a sound dataset and broken ones, reached by URLs that hold a password."""

    server: HttpObjects
    password: str
    memory: str

    @property
    def url(self) -> str:
        return f"http://user:{self.password}@127.0.0.1:{self.server.port}"

    def put(self, name: str, data: bytes) -> None:
        self.server.objects[f"/{name}"] = data


PASSWORDS = 3
"""How many there are; `make test` meets each, and each operation by one of them."""


@pytest.fixture(params=range(PASSWORDS))
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    password = some_secret(random.Random(request.param), USER_INFO)
    write_random_pair(str(tmp_path / "source" / "one"), count=60, longest=80)
    convert([str(tmp_path / "source" / "one")], str(tmp_path / "source" / "set"), shard_bytes=2000)
    objects = {f"/{path.name}": path.read_bytes() for path in (tmp_path / "source").iterdir()}
    objects |= {
        "/bad.bin": b"12345678", "/bad.idx": b"no index at all, though it is longer than a header is",
        "/short.bin": objects["/one.bin"][:99], "/short.idx": objects["/one.idx"],
        "/broken.jsonl": b'{"text": "fine"}\n{"text": \n', "/texts.jsonl": b'{"text": "fine"}\n' * 9,
        "/damaged.manifest.json": objects["/set.manifest.json"].replace(b'"shards"', b'"chards"'),
    }  # fmt: skip
    memory = f"memory://user:{password}@host/{request.param}-{random.getrandbits(64)}"
    with http_server(objects) as server:
        yield Site(server, password, memory)


def seen(operation: Callable[[], Any]) -> str:
    """What a person sees of an operation that raises, or returns something that can be shown."""
    try:
        result = operation()
    except (StreammegaError, LookupError) as error:
        copied = pickle.loads(pickle.dumps(error))  # noqa: S301
        shown = [*traceback.format_exception(error, chain=True), repr(error), str(copied)]
        # no source lines
        return "\n".join(
            line for part in shown for line in part.splitlines() if not line.startswith("    ")
        )
    return f"{result!r}\n{result}"


FAST = StorageConfig(request_timeout=2).tuned(max_retries=0, read_timeout=2)


def config(*blend: str, **settings: Any) -> DataConfig:
    defaults: dict[str, Any] = {
        "order": "stream",
        "sequence_length": 16,
        "num_samples": (40, 0, 0),
        "storage": FAST,
    }
    return DataConfig(blend=list(blend), **(defaults | settings))


def one_batch(settings: DataConfig) -> str:
    loader = StreamLoader(
        settings, split="train", micro_batch_size=2, global_batch_size=2, dp_rank=0, dp_size=1
    )
    next(iter(loader))
    return f"{loader} {json.dumps(loader.state_dict())} {loader.stats()}"


def by_command(*words: str) -> Callable[[Site], Any]:
    return lambda site: main(
        [word.replace("HTTP", site.url).replace("MEMORY", site.memory) for word in words]
    )


OPERATIONS: dict[str, Callable[[Site], Any]] = {
    "open a bad index": lambda site: IndexedDataset(f"{site.url}/bad", FAST),
    "open nothing": lambda site: IndexedDataset(f"{site.url}/nothing", FAST),
    "open what is cut short": lambda site: IndexedDataset(f"{site.url}/short", FAST),
    "open a damaged manifest": lambda site: IndexedDataset(f"{site.url}/damaged.manifest.json", FAST),
    "show a dataset": lambda site: IndexedDataset(f"{site.url}/set", FAST),
    "ask for a sequence that is not there": lambda site: IndexedDataset(f"{site.url}/one", FAST)[10**6],
    "open an empty folder": lambda site: IndexedDataset(f"{site.memory}/none/", FAST),
    "read by fsspec": lambda site: IndexedDataset(f"{site.url}/bad", StorageConfig(transport="fsspec").tuned(max_retries=0)),
    "stream a bad index": lambda site: one_batch(config(f"{site.url}/bad")),
    "stream what is cut short": lambda site: one_batch(config(f"{site.url}/short")),
    "stream nothing": lambda site: one_batch(config(f"{site.url}/nothing")),
    "stream a split without sequences": lambda site: one_batch(config(f"{site.url}/one", split="0.0001,1,0")),
    "stream a sequence that is too long": lambda site: one_batch(config(f"{site.url}/one", sequence_length=10**7)),
    "stream": lambda site: one_batch(config(f"{site.url}/set")),
    "train in Megatron's order": lambda site: one_batch(config(f"{site.url}/set", order="megatron")),
    "read a sample that is not there": lambda site: build_datasets(config(f"{site.url}/one", order="megatron"))[0][10**9],  # type: ignore
    "a sequence too long for Megatron's order": lambda site: build_datasets(
        config(f"{site.url}/one", order="megatron", sequence_length=10**7)
    ),
    "prepare": lambda site: list(prepare(config(f"{site.url}/set", order="megatron"))),
    "show settings": lambda site: config(f"{site.url}/set", index_publish_url=f"{site.url}/shared"),
    "show settings of splits": lambda site: DataConfig(
        blend_per_split=[f"0.5 {site.url}/a 0.5 b", None, None], sequence_length=9
    ),
    "a blend of half the weights": lambda site: config(f"{site.url}/one", ("b", 1)),  # type: ignore[arg-type]
    "a weight that is none": lambda site: config((f"{site.url}/one", "x")),  # type: ignore[arg-type]
    "a blend of a list": lambda site: config([f"{site.url}/one", 1, 2]),  # type: ignore[arg-type]
    "names of datasets": lambda site: source_names(config(site.url, f"{site.url}/one?sig={quote(site.password)}")),
    "convert broken lines": lambda site: convert(
        [f"{site.url}/broken.jsonl"], f"{site.memory}/o", tokenizer="bytes", storage=FAST
    ),
    "pass over broken lines": lambda site: convert(
        [f"{site.url}/broken.jsonl"], f"{site.memory}/p", tokenizer="bytes", storage=FAST, on_error="skip"
    ).summary(),
    "convert nothing": lambda site: convert([f"{site.url}/no.jsonl"], f"{site.memory}/o", tokenizer="bytes", storage=FAST),
    "convert": lambda site: convert([f"{site.url}/texts.jsonl"], f"{site.memory}/q", tokenizer="bytes", storage=FAST).as_dict(),
    "convert over its input": lambda site: convert([f"{site.url}/one"], f"{site.url}/one", storage=FAST),
    "convert to where nothing can be written": lambda site: convert([f"{site.url}/one"], f"{site.url}/other", storage=FAST),
    "convert with a tokenizer of that name": lambda site: convert([f"{site.url}/x"], "o", tokenizer=f"{site.url}/tok.json"),
    "verify": lambda site: verify(f"{site.url}/set", FAST),
    "verify what is cut short": lambda site: verify(f"{site.url}/short", FAST),
    "verify a bad index": lambda site: verify(f"{site.url}/bad", FAST),
    "verify a damaged manifest": lambda site: verify(f"{site.url}/damaged.manifest.json", FAST),
    "no such transport": lambda site: open_store(f"oss://user:{site.password}@host/k", StorageConfig(transport="obstore")),
    "no bucket": lambda site: open_store(f"http:///user:{site.password}@host/k?sig={site.password}", FAST),
    "command describe": by_command("describe", "HTTP/set"),
    "command describe an input": by_command("describe", "HTTP/texts.jsonl"),
    "command describe what is bad": by_command("describe", "HTTP/bad"),
    "command verify": by_command("verify", "HTTP/set"),
    "command verify what is bad": by_command("verify", "HTTP/short"),
    "command convert": by_command("convert", "HTTP/texts.jsonl", "MEMORY/c", "--tokenizer", "bytes"),
    "command convert what is bad": by_command("convert", "HTTP/broken.jsonl", "MEMORY/d", "--tokenizer", "bytes"),
    "command order-report": by_command("order-report", "HTTP/set", "--sequence-length", "16", "--steps", "2"),
    "a setting that is none": by_command("convert", "a", "b", "--storage", "HTTP"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "site"),
    [
        pytest.param(name, seed, marks=[pytest.mark.soak] if number % PASSWORDS != seed else [])
        for number, name in enumerate(OPERATIONS)
        for seed in range(PASSWORDS)
    ],
    indirect=["site"],
)
def test_passwords_of_urls_show_nowhere(
    name: str,
    site: Site,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "streammega")
    text = seen(lambda: OPERATIONS[name](site))
    printed = capsys.readouterr()
    for kind, shown in {
        "message": text,
        "out": printed.out,
        "err": printed.err,
        "log": caplog.text,
    }.items():
        assert site.password not in shown, f"{kind}: {shown}"
    assert not files_with(site.password, tmp_path)
    assert not memory_with(site)


def files_with(secret: str, folder: Path) -> list[str]:
    """Files whose name or content holds a secret."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [
        str(path) for path in files if secret in str(path) or secret.encode() in path.read_bytes()
    ]


def memory_with(site: Site) -> list[str]:
    """Objects written by fsspec's memory system whose content holds the password."""
    fs = fsspec.filesystem("memory")
    return [path for path in fs.find("") if site.password.encode() in fs.cat_file(path)]


def test_files_of_a_run_hold_no_passwords(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = StorageConfig(cache_dir=tmp_path / "cache", cache_max_bytes=1 << 30).tuned(
        max_retries=0
    )
    for order in ("stream", "megatron"):
        one_batch(config(f"{site.url}/set", order=order, storage=storage))
    assert list((tmp_path / "cache").rglob("object.json"))
    made = convert(
        [f"{site.url}/texts.jsonl"], str(tmp_path / "out" / "set"), tokenizer="bytes", storage=FAST
    )
    (tmp_path / "report.json").write_text(json.dumps(made.as_dict()))
    assert main(["convert", f"{site.url}/broken.jsonl", f"{site.memory}/r", "--tokenizer", "bytes", "--on-error", "skip",
                 "--json"]) == 0  # fmt: skip
    (tmp_path / "other.json").write_text(capsys.readouterr().out)
    assert not files_with(site.password, tmp_path)
    assert not memory_with(site)


def test_a_conversion_that_stopped_keeps_no_passwords(site: Site, tmp_path: Path) -> None:
    site.put("gone.jsonl", b'{"text": "fine"}\n')
    inputs = [f"{site.url}/texts.jsonl", f"{site.url}/broken.jsonl"]
    with pytest.raises(StreammegaError):
        convert(inputs, str(tmp_path / "o"), tokenizer="bytes", storage=FAST, workers=1)
    with pytest.raises(StreammegaError):
        convert(
            inputs,
            f"{site.memory}/o",
            tokenizer="bytes",
            storage=FAST,
            work_dir=str(tmp_path / "work"),
            workers=1,
        )
    assert not files_with(site.password, tmp_path)


def test_a_line_behind_a_password_is_counted(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streammega.convert.job.MAX_UNIT_BYTES", 100)
    site.put("long.jsonl", b'{"text": "fine"}\n' * 40 + b"{\n" + b'{"text": "fine"}\n' * 40)
    with pytest.raises(StreammegaError, match=r"long\.jsonl:41: broken JSON") as caught:
        convert(
            [f"{site.url}/long.jsonl"],
            str(tmp_path / "o"),
            tokenizer="bytes",
            storage=FAST,
            workers=1,
        )
    assert site.password not in str(caught.value)


def test_runs_show_no_passwords(site: Site, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    path = tmp_path / "config" / "run.toml"
    sizes = 'train_iters = 1\nmicro_batch_size = 1\nglobal_batch_size = 1\nout_dir = "o"'
    path.write_text(
        f'[data]\nblend = ["{site.url}/one"]\nsequence_length = 16\n[model]\nvocab_size = 1000\n[train]\n{sizes}\n'
        f'[validation]\nother = ["{site.url}/set"]\n'
    )
    run = load_run(str(path), [])
    shown = f"{run} {run!r} {source_names(run.data)} {list(validation_sets(run))}"
    assert "blend" in shown
    assert site.password not in shown
    with pytest.raises(ConfigError) as caught:
        load_run(str(path), [f"data.blend {site.url}/one"])
    assert site.password not in str(caught.value)


NESTED: dict[str, Callable[[str], dict[str, Any]]] = {
    "secret": lambda secret: {"key": "AKIAEXAMPLE", "secret": secret},
    "token": lambda secret: {"key": "AKIAEXAMPLE", "secret": "other-secret", "token": secret},
    "key": lambda secret: {"key": secret, "secret": "other-secret"},
    "a GCS mapping": lambda secret: {"token": {"type": "service_account", "private_key": f"-----BEGIN\n{secret}\n"}},
    "a refresh token": lambda secret: {"token": {"refresh_token": secret, "client_id": "c"}},
    "an account key": lambda secret: {"account_name": "acc", "account_key": secret},
    "a SAS": lambda secret: {"sas_token": f"sv=2022&se=2030&sp=r&sig={quote(secret, safe='')}"},
    "a connection string": lambda secret: {"connection_string": f"AccountName=a;AccountKey={secret};EndpointSuffix=core"},
    "OSS": lambda secret: {"key": "LTAIexample", "secret": secret, "endpoint": "http://127.0.0.1:1"},
    "headers": lambda secret: {"client_kwargs": {"headers": {"Authorization": f"Bearer {secret}"}}},
    "a pair": lambda secret: {"client_kwargs": {"auth": ("user", secret)}},
    "an endpoint": lambda secret: {"endpoint_url": f"http://user:{quote(secret, safe='')}@127.0.0.1:1"},
    "bytes": lambda secret: {"password": secret.encode()},
}  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("seed", range(8))
def test_secret_options_are_taken_out_however_they_are_written(name: str, seed: int) -> None:
    secret = some_secret(random.Random(f"{name}{seed}"), ANYTHING)
    options = NESTED[name](secret)
    remember_secrets(options)
    said_by_name: dict[str, Any] = {
        "a SAS": f"https://account/container/blob?{options.get('sas_token')}&x=1 or {options.get('sas_token')}",
        "a connection string": options.get("connection_string"),
        "headers": f"Bearer {secret}",
        "an endpoint": options.get("endpoint_url"),
    }
    plain: str = said_by_name.get(name, secret)
    in_url = name in ("a SAS", "an endpoint")  # spelt as URLs spell it already
    for said in (
        [plain] if in_url else [plain, quote(plain), quote_plus(plain), json.dumps({"said": plain})]
    ):
        shown = redact(f"Error: the server said {said} and hung up")
        for form in (
            secret,
            quote(secret),
            quote(secret, safe=""),
            quote_plus(secret),
            json.dumps(secret)[1:-1],
        ):
            assert form not in shown
        assert shown.startswith("Error: the server said ")
        assert shown.endswith(" and hung up")


@pytest.mark.parametrize(
    "name",
    ["X-Amz-Signature", "X-Amz-Security-Token", "X-Amz-Credential", "X-Goog-Signature", "X-Goog-Credential", "x-oss-signature",
     "Signature", "Policy", "Key-Pair-Id", "OSSAccessKeyId", "AWSAccessKeyId", "GoogleAccessId", "security-token", "sig", "token",
     "access_token", "x-oss-security-token", "x-oss-credential", "api_key"],
)  # fmt: skip
def test_signatures_of_urls_are_taken_out(name: str) -> None:
    for seed in range(5):
        value = quote(some_secret(random.Random(f"{name}{seed}"), ANYTHING), safe="")
        shown = redact_urls(
            f"GET https://host/key.bin?Expires=1735689600&{name}={value}&se=2030-01-01&sp=r: refused (403), try later"
        )
        assert value not in shown
        assert (
            shown
            == f"GET https://host/key.bin?Expires=1735689600&{name}=***&se=2030-01-01&sp=r: refused (403), try later"
        )
        assert (
            redact_urls(f"https://host/key?{name}={value}: no")
            == f"https://host/key?{name}=***: no"
        )


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/folder/name@v2.bin: wanted bytes [0, 4), got 3",
        "http://127.0.0.1:9000/name@v2: the endpoint did not answer",
        "http://[::1]:9000/name@v2",
        "abfss://container@account.dfs.core.windows.net/web.bin: no such object",
        "design=5, tokens=7, seed=1",
        "the split '99,1,0' of s3://bucket/web?versionId=abc",
        "mail me@example.org about gs://bucket/x",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact_urls(text) == text
    endpoint = "http://127.0.0.1:9000"
    remember_secrets({"anon": True, "token": "anon", "endpoint_url": endpoint, "project": "bucket"})
    assert redact(text) == text


CONTEXTS: dict[str, str] = {
    "of its own": "{}",
    "in a path": "s3://bucket/{}/web",
    "in a word": "x{}x",
    "in a name": "my_{}_1",
    "beside a point": "({}).",
}


@pytest.mark.parametrize(("secret", "stays"), [("Sx7-wq", True), ("Sx7-wqxS", False)])
def test_a_short_secret_is_hidden_as_a_word_of_its_own(secret: str, stays: bool) -> None:
    remember_secrets({"secret": secret})
    hidden = {name for name in CONTEXTS if secret not in redact(CONTEXTS[name].format(secret))}
    assert hidden == {"of its own", "in a path", "beside a point"} | (
        set() if stays else {"in a word", "in a name"}
    )


PROCESS = """
import logging, os, pickle, sys
from streammega import StorageConfig
from streammega.errors import ConfigError
from streammega.errors.logs import get_logger
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
handler = logging.StreamHandler(sys.stdout)
logging.getLogger("streammega.any").addHandler(handler)
log = get_logger("streammega.any")
os.environ["AWS_SESSION_TOKEN"] = "Sx-of-the-environment"
config = pickle.loads(bytes.fromhex(sys.argv[1]))
for secret in (sys.argv[2], "Sx-of-the-environment"):
    print(repr(ConfigError(f"no {secret}")))
    log.warning("no %s, none", secret)
    try:
        raise KeyError(secret)
    except KeyError:
        log.exception("an error of another library")
print(*config.storage_options.values())
"""


@pytest.mark.guarantee("no-secret-shown")
def test_a_process_that_gets_options_or_variables_shows_them_in_no_error_and_no_record() -> None:
    secret = "Sx-of-options"
    config = StorageConfig(storage_options={"secret": secret})
    command = [sys.executable, "-c", PROCESS, pickle.dumps(config).hex(), secret]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    *shown, used = run.stdout.splitlines()
    assert used == secret
    assert shown.count("KeyError: '***'") == 4  # of each error, by both handlers
    assert shown.count("ConfigError('no ***')") == 2
    assert "Sx" not in "\n".join(shown)


def test_a_failed_request_remembers_its_secrets_though_thousands_came_after_them() -> None:
    secret = "Sx-of-options"
    store, key = open_store(
        "s3://no/key",
        StorageConfig(
            storage_options={"endpoint_url": "http://127.0.0.1:1", "key": "k", "secret": secret}
        ).tuned(max_retries=0),
    )
    for number in range(9000):
        remember_secrets({"secret": f"Sx-renewed-{number}"})
    assert redact(f"{secret}, Sx-renewed-1, Sx-renewed-8999") == f"{secret}, Sx-renewed-1, ***"
    with pytest.raises(StorageError):
        store.info(key)
    assert redact(secret) == "***"


def test_names_that_are_used_are_as_they_are_given(tmp_path: Path) -> None:
    """A secret may be a part of a name: it is hidden where that is shown, and nowhere else."""
    storage = StorageConfig(storage_options={"secret": "web-texts"})
    (tmp_path / "web-texts.jsonl").write_text('{"text": "web-texts"}\n' * 9)
    made = convert(
        [str(tmp_path / "web-texts.jsonl")],
        str(tmp_path / "web-texts"),
        tokenizer="bytes",
        provenance=True,
        storage=storage,
    )
    indexed = IndexedDataset(made.prefix, storage)
    assert bytes(np.asarray(indexed.get(0, 0, 9), "u1")) == b"web-texts"
    origin = indexed.origin(0)
    assert origin is not None
    assert origin.path == str(tmp_path / "web-texts.jsonl")
    with pytest.raises(StreammegaError, match=r"no/\*\*\*\.bin"):
        IndexedDataset(str(tmp_path / "no" / "web-texts"), storage)


@pytest.mark.parametrize(
    ("operation", "transport"),
    [("open", "obstore"), ("open", "fsspec"), ("convert in", "auto"), ("convert out", "obstore"), ("convert out", "fsspec"),
     ("verify", "auto")],
)  # fmt: skip
def test_secret_options_show_nowhere_whatever_fails(
    transport: Any,
    operation: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "streammega")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rng = random.Random(f"{transport}{operation}")
    secrets = [some_secret(rng, string.ascii_letters + string.digits + "+/=") for _ in range(3)]
    options = {
        "key": secrets[0],
        "secret": secrets[1],
        "token": secrets[2],
        "endpoint_url": f"http://127.0.0.1:{port}",
    }
    options |= {"config_kwargs": {"retries": {"total_max_attempts": 1}}}  # type: ignore[dict-item]
    storage = StorageConfig(transport=transport, storage_options=options, request_timeout=1).tuned(
        max_retries=0
    )
    (tmp_path / "in.txt").write_text("text")
    operations: dict[str, Callable[[], Any]] = {
        "open": lambda: IndexedDataset("s3://bucket/web", storage),
        "convert in": lambda: convert(
            ["s3://bucket/web.jsonl"], str(tmp_path / "o"), tokenizer="bytes", storage=storage
        ),
        "convert out": lambda: convert(
            [str(tmp_path / "in.txt")], "s3://bucket/o", tokenizer="bytes", storage=storage
        ),
        "verify": lambda: verify("s3://bucket/web", storage),
    }
    shown = [
        seen(operations[operation]),
        f"{storage!r} {storage}",
        caplog.text,
        *capsys.readouterr(),
    ]
    assert not [
        text
        for text in shown
        for secret in secrets
        if secret in text or quote(secret, safe="") in text
    ]
    assert not [secret for secret in secrets if files_with(secret, tmp_path)]


def test_what_a_server_says_back_is_cleaned(s3: S3, s3_storage: StorageConfig) -> None:
    wrong = "wrong-secret/with+signs="
    storage = StorageConfig(
        transport=s3_storage.transport,
        storage_options={**s3.options, "secret": wrong, "token": wrong},
    ).tuned(max_retries=0)
    text = seen(lambda: IndexedDataset("s3://no-such-bucket/web", storage))
    assert wrong not in text
    assert s3.options["key"] not in text


@pytest.mark.parametrize(
    "text",
    [
        "x-" * 200_000 + ":=",
        "://a:b" * 20_000,
        ":?" + "token" * 40_000 + "=",
        ":<" + "token" * 40_000,
    ],
    ids=["header", "password", "query", "element"],
)
def test_a_text_that_looks_like_secrets_throughout_takes_no_quadratic_time(text: str) -> None:
    """Names of columns and members are in messages: these took minutes."""
    assert redact_urls(text) == text
