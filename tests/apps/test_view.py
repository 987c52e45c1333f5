"""`streammega view`: what its pages show, what they read, and who may see them."""

from __future__ import annotations

import contextlib
import html
import http.client
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from flask.testing import FlaskClient

from streammega import IndexedDataset, StorageConfig, StreamingDataset
from streammega.apps import view_data
from streammega.apps.view import make_app
from streammega.apps.view_data import Dataset, Run
from streammega.apps.view_pages import Pages
from streammega.cli import options
from streammega.cli.main import main
from streammega.train.config import load_run
from tests.support.builders import (
    convert_bytes,
    write_dataset,
    write_jsonl,
    write_manifest,
    write_run_file,
)
from tests.support.processes import launch
from tests.support.servers import KEY, S3, SECRET, rclone_server
from tools.bench.object_server import running

TOKEN = "the-token"
SCRIPT = "<script>alert('seen')</script>"
NEEDLE = "find-this-é-text"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps in three phases over `web`, `code` and `chat`, decoded by bytes."""
    folder = tmp_path_factory.mktemp("view")
    rng = np.random.default_rng(0)
    texts = [f"web {n} {SCRIPT} " + "word " * int(rng.integers(1, 60)) for n in range(60)]
    texts[7] = "long " * 2000 + NEEDLE + " end"
    rows = [{"text": text, "id": f"https://example.org/{n}"} for n, text in enumerate(texts)]
    inputs = {
        "web": write_jsonl(folder / "web.jsonl", rows),
        "code": write_jsonl(
            folder / "code.jsonl", [f"def f{n}(): return {n}" * 9 for n in range(40)]
        ),
    }
    chats = [
        {"messages": [{"role": "user", "content": f"ask {n}"}, {"role": "assistant", "content": "say " * 9}]}
        for n in range(40)
    ]  # fmt: skip
    convert_bytes(folder / "web", inputs["web"], provenance=True, id_field="id")
    convert_bytes(folder / "code", inputs["code"])
    chat_inputs = write_jsonl(folder / "chat.jsonl", chats)
    convert_bytes(folder / "chat", chat_inputs, chat=True, chat_template="chatml")
    write_run_file(
        folder,
        data={
            "blend": [[f"{folder}/web", 0.75], [f"{folder}/code", 0.25]],
            "order": "stream",
            "eod_id": 256,
            "sequence_length": 256,
            "split": "1,0,0",
        },
        model={"vocab_size": 300},
        train={"train_iters": 12},
    )
    with (folder / "run.toml").open("a") as file:
        file.write(
            f'\n[[data.phases]]\nfirst_step = 5\nblend = [["{folder}/web", 0.5], ["{folder}/chat", 0.5]]\n'
            "[[data.phases]]\nfirst_step = 9\nsequence_length = 512\nglobal_batch_size = 16\n"
            'exclude_documents = ["web#3"]\n'
        )
    return folder


def client_of(shown: Run | Dataset) -> FlaskClient:
    """A browser that has opened the address with the token."""
    client = make_app(Pages(shown), TOKEN).test_client()
    assert client.get(f"/?token={TOKEN}").status_code == 302
    return client


@pytest.fixture
def run(folder: Path) -> Run:
    return Run("run.toml", load_run(str(folder / "run.toml")), None)


@pytest.fixture
def site(run: Run) -> FlaskClient:
    return client_of(run)


def text_of(page: str) -> str:
    """What a reader sees of a page, without its style."""
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL).replace("</td><td", "</td> <td")
    return html.unescape(re.sub(r"<[^>]*>", "", body))


def shown(site: FlaskClient, path: str) -> str:
    answer = site.get(path)
    assert answer.status_code == 200, text_of(answer.text)
    return text_of(answer.text)


def test_a_dataset_that_a_blend_names_twice_is_counted_once_in_each_row_and_band(
    folder: Path, tmp_path: Path
) -> None:
    web, code = f"{folder}/web", f"{folder}/code"
    blend = [[web, 0.3], [code, 0.3], [web, 0.4]]
    run_file = write_run_file(
        tmp_path, data={"blend": blend, "order": "stream"}, train={"train_iters": 20}
    )
    run = Run(run_file, load_run(run_file), None)
    seen = client_of(run).get("/").text
    bands = re.findall(r"(\w+): ([\d.]+) % of steps", seen)
    assert [name for name, _ in bands] == ["web", "code"]
    assert sum(float(share) for _, share in bands) == pytest.approx(100, abs=0.2)
    rows = Pages(run).overview({})["rows"]
    assert sum(row["samples"] for row in rows) == 20 * 8
    assert [row["share"] for row in rows] == pytest.approx([0.3, 0.3, 0.4])


@pytest.mark.guarantee("view-shows-run")
def test_a_run_shows_its_datasets_blend_and_phases(site: FlaskClient, folder: Path) -> None:
    page = site.get("/").text
    seen = text_of(page)
    for name in ("web", "code", "chat"):
        assert f"{folder}/{name}" in seen
    for change in (
        "web: 75 % → 50 %",
        "code ends: 25 % → 0 %",
        "chat comes in: 50 %",
        "tokens of a sample: 256 → 512",
        "samples of a global batch: 8 → 16",
        "more documents are excluded",
    ):
        assert change in seen
    assert "bytes" in seen
    figure = page[page.index("<svg") : page.index("</svg>")]
    assert re.findall(r">(0|50|100) %<", figure) == ["0", "50", "100"], "an axis with units"
    assert ">step<" in figure
    assert [int(step) for step in re.findall(r">(\d+)</text>", figure)] == [1, 5, 9, 12]
    assert re.search(r"<title>web: 100 %", figure) is None, "shares are of each phase"
    for letter in "ABC":
        assert f">{letter}<" in page, "bands have letters, and the legend names them"


@pytest.mark.guarantee("view-shows-run")
def test_documents_have_lengths_modes_origins_and_their_text(site: FlaskClient) -> None:
    listed = shown(site, "/dataset/0?first=5")
    assert "https://example.org/5" in listed
    assert "web.jsonl:6" in listed
    assert "https://example.org/4" not in listed
    document = shown(site, "/dataset/0/document/5")
    assert f"web 5 {SCRIPT}" in document
    assert "web.jsonl:6" in document
    chat = shown(site, "/dataset/2/document/4")
    assert re.search(r"mode 0, not learned.*ask 4.*mode 1, learned.*say say", chat, re.DOTALL)
    second = shown(site, f"/dataset/0/document/7?token={view_data.WINDOW}")
    assert f"tokens {view_data.WINDOW:,} to" in second


@pytest.mark.guarantee("view-shows-run")
def test_the_steps_that_read_a_document_are_those_that_show_it(site: FlaskClient) -> None:
    page = site.get("/dataset/2/document/4?uses=0").text
    steps = [int(step) for step in re.findall(r"/step\?step=(\d+)\"", page)]
    assert steps
    for step in steps:
        pages = [shown(site, f"/step?step={step}&sample={first}") for first in (0, 4, 8, 12)
                 if step > 8 or first < 8]  # fmt: skip
        assert any("chat#4" in text for text in pages)


@pytest.mark.guarantee("view-shows-batches")
@pytest.mark.parametrize(("step", "ranks"), [(2, 1), (7, 2), (10, 4)])
def test_samples_are_the_batches_of_each_rank(
    step: int, ranks: int, run: Run, folder: Path
) -> None:
    train = load_run(str(folder / "run.toml")).train
    whole = run.schedule.samples_of_step(step)
    for rank in range(ranks):
        dataset = StreamingDataset(
            run.config.data, micro_batch_size=train.micro_batch_size, dp_rank=rank,
            global_batch_size=train.global_batch_size, dp_size=ranks,
        )  # fmt: skip
        positions = range(whole.start, whole.stop, dataset.step_samples)
        count = run.count_samples(step, rank, ranks)
        samples = run.samples(step, rank, ranks, range(count), (0, 1 << 20))
        assert count == len(samples) == len(positions) * train.micro_batch_size
        numbers = np.concatenate([dataset.sample_ids(position) for position in positions])
        assert [sample.number for sample in samples] == numbers.tolist()
        for position, rows in zip(positions, _pairs(samples), strict=True):
            batch = {name: value.numpy() for name, value in dataset.batch(position).items()}
            for row, sample in enumerate(rows):
                ids = np.append(batch["tokens"][row], batch["labels"][row][-1])
                decode = run.decoder(0).text
                bounds = np.cumsum([0, *(span.tokens for span in sample.spans)])
                assert bounds[-1] == len(ids)
                for span, start in zip(sample.spans, bounds[:-1], strict=True):
                    stop = start + span.tokens
                    assert span.text == decode(ids[start:stop])
                    mask = np.append(0, batch["loss_mask"][row])[start:stop]
                    assert (mask == span.is_learned).all()


def _pairs(samples: list[Any]) -> Iterator[list[Any]]:
    for first in range(0, len(samples), 2):
        yield samples[first : first + 2]


@pytest.mark.guarantee("view-shows-batches")
def test_masks_and_ends_of_documents_are_seen_without_colours(site: FlaskClient, run: Run) -> None:
    for step in range(5, 13):
        page = site.get(f"/step?step={step}").text
        for sample in run.samples(step, 0, 1, range(4), (0, view_data.WINDOW)):
            begins = page[page.index(f"<h2>Sample {sample.number}</h2>") :].split("</section>")[0]
            tokens = begins[begins.index('<div class="tokens">') :]
            assert tokens.count("■&nbsp;end") == sum(span.ends for span in sample.spans)
            assert tokens.count("<a class") == sum(span.begins for span in sample.spans)
            assert tokens.count("unlearned") == sum(not span.is_learned for span in sample.spans)
    assert "How to read it" in page


@pytest.mark.guarantee("view-shows-run")
def test_a_dataset_alone_has_documents_and_no_steps(folder: Path) -> None:
    site = client_of(Dataset(f"{folder}/web", StorageConfig(), None))
    assert "60 documents" in shown(site, "/")
    assert "web 0" in shown(site, "/dataset/0/document/0")
    assert "Which steps" not in shown(site, "/dataset/0/document/0")
    assert site.get("/step").status_code == 404


def test_a_dataset_alone_is_shown_without_torch(folder: Path) -> None:
    code = (
        "import sys\n"
        "from streammega import StorageConfig\n"
        "from streammega.apps.view_data import Dataset\n"
        "from streammega.apps.view_pages import Pages\n"
        f"Pages(Dataset({str(folder / 'web')!r}, StorageConfig(), None)).documents({{}})\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_tokenizer_ids_are_shown_and_searched(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "ids", [[5, 6, 7], [65, 66, 67, 68], [6], []])
    site = client_of(Dataset(prefix, StorageConfig(), None))
    assert "No manifest names its tokenizer" in shown(site, "/")
    assert "65 66 67 68" in shown(site, "/dataset/0/document/1")
    assert "It has no tokens" in shown(site, "/dataset/0/document/3")
    found = site.get("/dataset/0/search?text=66 67").text
    assert re.findall(r"/document/(\d)\?token", found) == ["1"]
    assert "1 place" in text_of(found)
    assert "0 places" in shown(site, "/dataset/0/search?text=6 67"), "whole ids only"
    by_bytes = client_of(Dataset(prefix, StorageConfig(), "bytes"))
    assert "ABCD" in shown(by_bytes, "/dataset/0/document/1")


def test_a_tokenizer_that_does_not_fit_is_named(folder: Path, tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "ids", [[5, 60_000]])
    dataset = Dataset(prefix, StorageConfig(), "bytes")
    assert dataset.head(0).split() == ["5", "60000"]
    manifest = Path(f"{folder}/code.manifest.json").read_text()
    for ending in (".bin", ".idx"):
        Path(f"{tmp_path}/code{ending}").write_bytes(Path(f"{folder}/code{ending}").read_bytes())
    gone = manifest.replace('"name": "bytes"', '"name": "gone/tokenizer.json"')
    assert gone != manifest
    Path(f"{tmp_path}/code.manifest.json").write_text(gone)
    note = Dataset(f"{tmp_path}/code", StorageConfig(), None).decoder.note
    assert "cannot be loaded" in note
    assert "--tokenizer" in note


@pytest.mark.guarantee("view-reads-portions")
@pytest.mark.parametrize("window", [64, 2048])
def test_a_search_goes_on_in_portions_and_misses_nothing(
    window: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_data, "WINDOW", window)
    monkeypatch.setattr(view_data, "PIECE", 4 * window)
    monkeypatch.setattr(view_data, "PORTION", 3000)
    site = client_of(Dataset(f"{folder}/web", StorageConfig(), None))
    for text, documents in ((NEEDLE, [7]), ("web 4", [4, *range(40, 50)]), ("nowhere", [])):
        link = f"/dataset/0/search?text={quote(text)}"
        found: list[int] = []
        portions = 0
        while link:
            page = site.get(link).text
            found += [int(number) for number in re.findall(r"/document/(\d+)\?token", page)]
            portions += 1
            rest = re.search(r'href="(/dataset/0/search[^"]*)"', page)
            link = html.unescape(rest[1]) if rest else ""
        assert found == documents
        assert portions > 3
    page = site.get(f"/dataset/0/search?text={quote(NEEDLE)}").text
    assert re.search(r"[\d,]+ of [\d,]+ tokens, from document 0 to document", text_of(page))


@pytest.mark.guarantee("view-reads-portions")
def test_pages_read_what_they_show_and_not_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [np.full(50_000, 97) for _ in range(100)]
    write_dataset(tmp_path / "root" / "data" / "web", documents)
    monkeypatch.setattr(view_data, "PORTION", 200_000)
    with running(tmp_path / "root") as server:
        storage = StorageConfig(storage_options=server.storage_options)
        site = client_of(
            Dataset("s3://data/web", storage.changed(cache_dir=tmp_path / "cache"), "bytes")
        )
        for path, most in (
            ("/", 20_000),
            ("/dataset/0/document/70?token=40000", 10_000),
            ("/dataset/0/search?text=b", 1_200_000),
        ):
            before = server.counts()["bytes"]
            assert site.get(path).status_code == 200
            assert server.counts()["bytes"] - before <= most
    assert 100 * 50_000 * 2 > 8 * 1_200_000


@pytest.mark.guarantee("view-reads-portions")
def test_a_run_shows_sizes_by_manifests_and_copies_no_index(tmp_path: Path) -> None:
    folder = tmp_path / "root" / "data"
    write_dataset(folder / "web", [np.arange(4)] * 50_000)
    write_manifest(folder / "web", ["web"])
    index_bytes = (folder / "web.idx").stat().st_size
    with running(tmp_path / "root") as server:
        run_file = write_run_file(
            tmp_path,
            data={"blend": ["s3://data/web"], "order": "stream", "split": "1,0,0"},
            train={"train_iters": 4},
            **{"data.storage.storage_options": server.storage_options},
        )
        site = client_of(Run(run_file, load_run(run_file), None))
        assert "50,000 200,000 uint16" in " ".join(shown(site, "/").replace("\n", " ").split())
        assert server.counts()["bytes"] < index_bytes / 10


@pytest.mark.guarantee("view-needs-token")
def test_only_a_browser_with_the_token_sees_pages(run: Run) -> None:
    client = make_app(Pages(run), TOKEN).test_client()
    for path in ("/", "/?token=", "/?token=other", "/?token=%C3%A9", "/dataset/0", "/no-such-page"):
        answer = client.get(path)
        assert answer.status_code == 403
        assert "run.toml" not in answer.text
        assert "/step" not in answer.text
    answer = client.get(f"/dataset/0?token={TOKEN}")
    assert answer.status_code == 302
    assert TOKEN not in answer.headers["Location"]
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite" in cookie
    answer = client.get("/dataset/0")
    assert answer.status_code == 200
    assert TOKEN not in answer.text
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert client.post("/dataset/0").status_code == 405


@pytest.mark.guarantee("view-needs-token")
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example"])
def test_another_host_is_refused_even_with_the_token(host: str, site: FlaskClient) -> None:
    answer = site.get("/", headers={"Host": host})
    assert answer.status_code == 400
    assert "run.toml" not in answer.text
    assert site.get(f"/?token={TOKEN}", headers={"Host": host}).status_code == 400


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/dataset/3", "dataset '3': give a number from 0 to 2"),
        ("/dataset/x", "dataset 'x'"),
        ("/dataset/0?first=60", "document '60': give a number from 0 to 59"),
        ("/dataset/0/document/60", "document '60': give a number from 0 to 59"),
        ("/dataset/0/document/-1", "document '-1'"),
        ("/dataset/0/document/" + "9" * 5000, "give a number from 0 to 59"),
        ("/dataset/0/document/0?token=999999", "token '999999': give a number from 0 to"),
        ("/dataset/0/search?text=a&document=60", "document '60'"),
        ("/step?step=0", "step '0': give a number from 1 to 12"),
        ("/step?step=13", "step '13': give a number from 1 to 12"),
        ("/step?rank=2&ranks=2", "rank '2': give a number from 0 to 1"),
        ("/step?ranks=3", "is not a multiple of micro_batch_size 2 x dp_size 3"),
        ("/step?sample=8", "sample '8': give a number from 0 to 7"),
        ("/step?token=9999", "token 9999: these samples have 257 tokens"),
        ("/no-such-page", "not found"),
        ("/../../etc/passwd", "not found"),
        ("/style.css", "not found"),
    ],
)
def test_what_is_not_there_is_a_page_that_says_so(
    path: str, message: str, site: FlaskClient
) -> None:
    answer = site.get(path)
    assert answer.status_code == 404
    assert message in text_of(answer.text)


@pytest.mark.guarantee("view-escapes-text")
def test_texts_of_documents_and_addresses_are_escaped(site: FlaskClient) -> None:
    quoted = quote(SCRIPT)
    paths = ["/", "/dataset/0", "/dataset/0/document/5", f"/dataset/0/search?text={quoted}",
             f"/dataset/{quoted.replace('/', '%2F')}", f"/step?step={quoted}", "/step?step=2"]  # fmt: skip
    for path in paths:
        page = site.get(path).text
        assert "<script" not in page
        assert " on" not in " ".join(re.findall(r"<[a-z][^>]*>", page)), "no handlers"
    assert SCRIPT in shown(site, f"/dataset/0/search?text={quoted}")


def test_secrets_are_in_no_page(moto: S3, tmp_path: Path, folder: Path) -> None:
    bucket = moto.new_bucket()
    for name in ("code.bin", "code.idx", "code.manifest.json"):
        moto.objects(bucket)[name] = (folder / name).read_bytes()
    storage = StorageConfig(storage_options=moto.options, retry_timeout=5).tuned(max_retries=0)
    site = client_of(
        Dataset(f"s3://{bucket}/code", storage.changed(cache_dir=tmp_path / "cache"), None)
    )
    pages = [
        site.get(path).text for path in ("/", "/dataset/0/document/0", "/dataset/0/search?text=f1")
    ]
    del moto.objects(bucket)["code.bin"]
    answer = site.get("/dataset/0/document/1")
    assert answer.status_code == 502
    assert "code.bin" in text_of(answer.text)
    for page in [*pages, answer.text]:
        assert SECRET not in page
        assert KEY not in page


@pytest.mark.guarantee("view-errors")
def test_a_defect_is_a_page_without_a_traceback(
    site: FlaskClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("unforeseen")

    monkeypatch.setattr(Dataset, "length", fail)
    answer = site.get("/dataset/0/document/1")
    assert answer.status_code == 500
    assert "ValueError" in text_of(answer.text)
    assert "Traceback" not in answer.text + capsys.readouterr().err


@pytest.mark.guarantee("view-errors")
def test_without_flask_the_message_names_the_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flask", None)
    assert main(["view", f"{folder}/web"]) == 1
    assert "pip install 'streammega[view]'" in capsys.readouterr().err


@pytest.mark.guarantee("view-errors")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{folder}/none", "none"),
        ("{folder}/none.toml", "none.toml"),
        ("{folder}/run.toml data.blend={folder}/none", "none"),
        ("{folder}/run.toml train.nothing=1", "nothing"),
        ("{folder}/run.toml --storage a=b", "run.toml has this setting"),
        ("{folder}/web train.train_iters=3", "settings are for a run's file"),
        ("{folder}/web --tokenizer gone.json", "gone.json"),
    ],
)
def test_what_cannot_be_opened_is_one_error(
    words: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", *words.format(folder=folder).split()]) == 1
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].startswith("error: ")
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert not printed.out


def test_a_port_that_is_taken_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["view", f"{folder}/web", "--port", str(port)]) == 1
    assert f"--port {port}: Address already in use" in capsys.readouterr().err


@pytest.mark.guarantee("view-needs-token")
def test_the_command_serves_this_machine_alone_logs_no_token_and_ends_at_once(
    folder: Path,
) -> None:
    command = [sys.executable, "-m", "streammega", "view", f"{folder}/web", "--no-open"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", address)
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        root, _, token = address.partition("?token=")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            opener.open(root, timeout=60)
        with opener.open(address, timeout=60) as answer:
            assert token not in answer.url
            assert b"60 documents" in answer.read()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert token not in out + err
    assert "Traceback" not in err


@pytest.mark.guarantee("view-needs-token")
def test_ctrl_c_ends_it_while_a_page_waits_for_storage(tmp_path: Path) -> None:
    write_dataset(tmp_path / "root" / "data" / "web", [np.full(1000, 97)] * 100)
    with running(tmp_path / "root") as server:
        storage = [
            f"--storage={name}={str(value).lower()}"
            for name, value in server.storage_options.items()
        ]
        process = launch(tmp_path, 1, ["-m", "streammega", "view", "s3://data/web", *storage])
        process.wait_for("token=", 0)
        (address,) = re.findall(r"^http://.*$", process.log(0), re.M)
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        opener.open(address, timeout=60)
        before = server.counts()["requests"]
        server.behave(latency=600.0)
        waiting = threading.Thread(target=_open_quietly, args=(opener, address))
        waiting.start()
        while server.counts()["requests"] == before:
            time.sleep(0.01)
        process.signal(signal.SIGINT, 0)
        assert process.ended(0, within=60) == [130]  # the answer takes ten minutes
        assert "Traceback" not in process.log(0)
        waiting.join()


def _open_quietly(opener: urllib.request.OpenerDirector, address: str) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        opener.open(address, timeout=60)


def test_datasets_whose_names_end_alike_are_shown_by_their_whole_names(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        convert_bytes(tmp_path / name / "web", f"{folder}/web.jsonl")
    blend = f"data.blend={tmp_path}/a/web {tmp_path}/b/web {folder}/code"
    path = write_run_file(
        tmp_path,
        data={"blend": ["x"], "order": "stream", "split": "1,0,0"},
        train={"train_iters": 4},
    )
    site = client_of(Run(path, load_run(path, [blend]), None))
    pages = text_of(site.get("/").text + site.get("/step").text)
    for name in ("a", "b"):
        assert f"{tmp_path}/{name}/web#" in pages
    assert " web#0" not in pages


@pytest.mark.guarantee("view-errors")
@pytest.mark.parametrize("kind", ["PREFIX", "RUN"])
@pytest.mark.parametrize("server", ["wrong credentials", "no server"])
def test_storage_that_refuses_or_is_not_there_is_one_line_without_secrets(
    kind: str, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(options, "LOOK_TIMEOUT", 0.1)
    (tmp_path / "root" / "data").mkdir(parents=True)
    write_dataset(tmp_path / "root" / "data" / "web", [np.arange(100)] * 4)
    with contextlib.ExitStack() as stack:
        if server == "no server":
            with socket.create_server(("127.0.0.1", 0)) as free:
                endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
        else:
            endpoint = stack.enter_context(rclone_server(tmp_path / "root")).endpoint
        access = {"endpoint_url": endpoint, "key": KEY, "secret": "not-the-secret-Xq7"}
        settings = "".join(f'{name} = "{value}"\n' for name, value in access.items())
        if kind == "PREFIX":
            (tmp_path / "storage.toml").write_text(f"[storage_options]\n{settings}")
            words = ["s3://data/web", "--storage-file", str(tmp_path / "storage.toml")]
        else:
            words = [write_run_file(
                tmp_path,
                data={"blend": ["s3://data/web"], "order": "stream", "split": "1,0,0"},
                train={"train_iters": 4},
                **{"data.storage.storage_options": access},
            )]  # fmt: skip
        assert main(["view", *words]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    assert "s3://data/web" in line
    assert ("InvalidAccessKeyId" in line or "SignatureDoesNotMatch" in line or "denied" in line
            or "refused" in line)  # fmt: skip
    for secret in (KEY, "not-the-secret-Xq7", SECRET):
        assert secret not in printed.err


@pytest.mark.guarantee("view-shows-run")
def test_origins_are_by_number_over_all_shards(folder: Path, tmp_path: Path) -> None:
    convert_bytes(tmp_path / "cut", f"{folder}/web.jsonl", provenance=True, id_field="id",
                  shard_bytes=4000)  # fmt: skip
    indexed = IndexedDataset(str(tmp_path / "cut"))
    assert len(indexed.shards) > 3
    for number in range(60):
        origin = indexed.origin(number)
        assert origin is not None
        assert origin.id == f"https://example.org/{number}"
    with pytest.raises(IndexError, match="document 60 of 60"):
        indexed.origin(60)
    assert IndexedDataset(f"{folder}/code").origin(0) is None
