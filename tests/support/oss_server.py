#!/usr/bin/env python3
"""A server of Alibaba OSS's dialect of S3 for tests, faithful where a client could trip.

Buckets are found by the Host header alone (`bucket.s3.oss-…`); path style is refused. Ranges have
inclusive ends, and one that is not wholly within the object is ignored (200 and the whole object),
unless `x-oss-range-behavior: standard` is sent. `x-oss-forbid-overwrite: true` is kept, but not in
buckets with versioning; If-Match and If-None-Match of a PUT are not implemented. Signatures are
checked, temporary credentials expire, aws-chunked bodies, bulk deletes without Content-MD5, small
parts and headers of OSS that are not signed are refused. Faults on demand are those of
`tools.bench.object_server`.

It is reached as an HTTP proxy, which stands in for DNS. Standard library only; everything is held
in memory.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import email.utils
import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from tests.support.oss_signatures import Request, is_signed_by, read_claim
from tools.bench.object_server import Behaviour, Faults

KEY = "LTAItestkeyid0000"
SECRET = "oss-test-secret-never-shown"
REGION = "cn-nowhere"
DOMAIN = f"oss-{REGION}.aliyuncs.com"
DOMAINS = (DOMAIN, f"oss-{REGION}-internal.aliyuncs.com", "oss-accelerate.aliyuncs.com")
LEAST_PART_BYTES = 100 * 1024
MOST_COPY_BYTES = 64 << 20  # of OSS: 5 GB; here small enough for a test
ANY_REGION = "us-east-1"  # Alibaba's examples sign with it, whatever the bucket's region is
NAMESPACE = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


class Refusal(Exception):
    """An answer that is an error: its status, code and message."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(code)
        self.status = status
        self.code = code
        self.message = message or code


@dataclass
class Stored:
    """An object."""

    data: bytes
    etag: str
    modified: float = field(default_factory=time.time)


@dataclass
class Credential:
    """A key that the server knows; `token` makes it a temporary one, `expires` is in seconds since
    the epoch.
    """

    secret: str
    token: str = ""
    expires: float = 0.0


@dataclass
class State:
    """Everything that the server holds."""

    buckets: dict[str, dict[str, Stored]] = field(default_factory=dict)
    public: set[str] = field(default_factory=set)
    versioned: set[str] = field(default_factory=set)
    uploads: dict[str, tuple[str, str, dict[int, Stored]]] = field(default_factory=dict)
    keys: dict[str, Credential] = field(default_factory=lambda: {KEY: Credential(SECRET)})
    log: list[dict[str, Any]] = field(default_factory=list)
    behaviour: Behaviour = field(default_factory=Behaviour)
    faults: Faults = field(default_factory=lambda: Faults(Behaviour()))
    faults_made: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    state: State

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def handle_expect_100(self) -> bool:
        """botocore waits for this before it sends a body."""
        told = super().handle_expect_100()
        self.wfile.flush()
        return told

    def _serve(self) -> None:
        target = urllib.parse.urlsplit(self.path)  # absolute, as a proxy sees it
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        if target.path.startswith("/-/"):
            return self._answer(200, self._control(target.path[3:], body))
        host = headers.get("host", "").split(":")[0]
        request = Request(
            method=self.command,
            bucket=_bucket_of(host),
            path=target.path or "/",
            query=target.query,
            headers=headers,
        )
        with self.state.lock:
            self.state.log.append(
                {
                    "method": self.command,
                    "host": host,
                    "path": request.path,
                    "query": target.query,
                    "headers": headers,
                }
            )
        try:
            self._check(request)
            self._dispatch(request, body)
        except Refusal as refusal:
            self._refuse(refusal, host)

    def _refuse(self, refusal: Refusal, host: str) -> None:
        text = (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>\n  <Code>{refusal.code}</Code>\n'
            f"  <Message>{escape(refusal.message)}</Message>\n  <RequestId>5CAC0CF8DE0170</RequestId>\n"
            f"  <HostId>{host}</HostId>\n</Error>\n"
        ).encode()
        extra = {"Content-Type": "application/xml", "x-oss-err": base64.b64encode(text).decode()}
        self._answer(refusal.status, text, extra)

    def _check(self, request: Request) -> None:
        """Whether the server lets a request in: its host, its signature, its encoding."""
        if not request.bucket:
            raise Refusal(
                403, "SecondLevelDomainForbidden", "Please use virtual hosted style to access."
            )
        authorization = request.headers.get("authorization")
        if authorization is None:
            if request.bucket not in self.state.public or request.method not in ("GET", "HEAD"):
                raise Refusal(
                    403, "AccessDenied", "Anonymous access is forbidden for this operation."
                )
            return
        claim = read_claim(authorization)
        if claim is None:
            raise Refusal(400, "InvalidArgument", "Authorization header is invalid.")
        if claim.scope[1] not in (REGION, ANY_REGION):
            raise Refusal(
                400,
                "InvalidArgument",
                f"Invalid signing region in Authorization header: {claim.scope[1]}.",
            )
        credential = self.state.keys.get(claim.access_key_id)
        if credential is None:
            raise Refusal(
                403,
                "InvalidAccessKeyId",
                "The OSS Access Key Id you provided does not exist in our records.",
            )
        if credential.expires and credential.expires < time.time():
            raise Refusal(
                403, "SecurityTokenExpired", "The security token you provided has expired."
            )
        if request.headers.get("x-amz-security-token", "") != credential.token:
            raise Refusal(
                403, "InvalidSecurityToken", "The security token you provided is invalid."
            )
        if not is_signed_by(request, claim, credential.secret):
            raise Refusal(
                403, "SignatureDoesNotMatch", "The request signature we calculated does not match."
            )
        of_oss = {name for name in request.headers if name.startswith("x-oss-")}
        if not of_oss <= set(claim.signed_headers):
            raise Refusal(403, "AccessDenied", "There were headers which were not signed.")
        if "aws-chunked" in request.headers.get("content-encoding", "") or "STREAMING" in str(
            request.headers
        ):
            raise Refusal(400, "InvalidArgument", "aws-chunked encoding is not supported.")

    def _dispatch(self, request: Request, body: bytes) -> None:
        objects = self.state.buckets.get(request.bucket)
        if objects is None:
            raise Refusal(404, "NoSuchBucket", "The specified bucket does not exist.")
        _check_digests(request, body)
        query = dict(request.parameters)
        action = f"{request.method} {'object' if request.key else 'bucket'}"
        if action == "GET bucket":
            self._answer(
                200, _listing(request, objects, query), {"Content-Type": "application/xml"}
            )
        elif action in ("GET object", "HEAD object"):
            self._object(request, objects)
        elif action == "PUT object" and "uploadId" in query:
            self._part(query, body)
        elif action == "PUT object":
            self._put(request, objects, body)
        elif action == "POST object":
            self._multipart(request, objects, query, body)
        elif action == "DELETE object" and "uploadId" in query:
            self.state.uploads.pop(query["uploadId"], None)
            self._answer(204, b"")
        elif action == "DELETE object":
            objects.pop(request.key, None)
            self._answer(204, b"")
        elif action == "POST bucket" and "delete" in query:
            if "content-md5" not in request.headers:
                raise Refusal(
                    400, "MissingArgument", "Missing Some Required Arguments: Content-MD5."
                )
            for item in ElementTree.fromstring(body).findall(".//{*}Key"):
                objects.pop(item.text or "", None)
            self._answer(200, b"<DeleteResult/>")
        else:
            raise Refusal(405, "MethodNotAllowed")

    def _object(self, request: Request, objects: dict[str, Stored]) -> None:
        behaviour = self.state.behaviour
        if behaviour.status:
            raise Refusal(
                behaviour.status, "ServiceUnavailable" if behaviour.status == 503 else "Forced"
            )
        stored = objects.get(request.key)
        if stored is None:
            raise Refusal(404, "NoSuchKey", "The specified key does not exist.")
        wanted = request.headers.get("if-match")
        if wanted and wanted.strip('"') != stored.etag:
            raise Refusal(
                412,
                "PreconditionFailed",
                "At least one of the pre-conditions you specified did not hold.",
            )
        headers = {
            "ETag": f'"{stored.etag}"',
            "Last-Modified": email.utils.formatdate(stored.modified, usegmt=True),
            "Accept-Ranges": "bytes",
            "x-oss-object-type": "Multipart" if "-" in stored.etag else "Normal",
        }
        start, stop, partial = _range_of(request, len(stored.data))
        if partial:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(stored.data)}"
        status = 206 if partial else 200
        if request.method == "HEAD":
            return self._answer(status, stored.data[start:stop], headers)
        with self.state.lock:
            fault, delay = self.state.faults.draw()
            self.state.faults_made += fault is not None
        time.sleep(delay)
        return self._faulty(fault, status, stored.data, start, stop, headers)

    def _faulty(
        self,
        fault: str | None,
        status: int,
        data: bytes,
        start: int,
        stop: int,
        headers: dict[str, str],
    ) -> None:
        if fault == "error":
            raise Refusal(503, "ServiceUnavailable", "Please reduce your request rate.")
        if fault == "short":
            stop = start + max(1, (stop - start) // 2)
        if fault == "overlong":
            stop = min(stop + 64, len(data))
        body = data[start:stop]
        if fault not in ("reset", "truncate", "stall"):
            return self._answer(status, body, headers)
        self._begin(status, len(body), headers)
        self.wfile.write(body[: len(body) // 2])
        self.wfile.flush()
        if fault == "stall":
            self.connection.settimeout(60)
            with contextlib.suppress(OSError):
                self.connection.recv(1)  # until the client gives up
        if fault == "reset":
            # SOL_SOCKET, SO_LINGER: close sends RST
            self.connection.setsockopt(1, 13, struct.pack("ii", 1, 0))
        self.close_connection = True
        return None

    def _put(self, request: Request, objects: dict[str, Stored], body: bytes) -> None:
        if "if-match" in request.headers or "if-none-match" in request.headers:
            raise Refusal(
                501,
                "NotImplemented",
                "A header you provided implies functionality that is not implemented.",
            )
        forbid = request.headers.get("x-oss-forbid-overwrite") == "true"
        if forbid and request.bucket not in self.state.versioned and request.key in objects:
            raise Refusal(
                409,
                "FileAlreadyExists",
                "The object you specified already exists and can not be overwritten.",
            )
        source = request.headers.get("x-amz-copy-source")
        if source is not None:
            bucket, _, key = urllib.parse.unquote(source).lstrip("/").partition("/")
            body = self.state.buckets[bucket][key].data
            if len(body) > MOST_COPY_BYTES:
                raise Refusal(
                    400,
                    "EntityTooLarge",
                    "Your proposed copy source exceeds the maximum allowed size.",
                )
        stored = Stored(body, _md5(body))
        objects[request.key] = stored
        self._answer(200, b"", {"ETag": f'"{stored.etag}"'})

    def _part(self, query: dict[str, str], body: bytes) -> None:
        upload = self.state.uploads.get(query["uploadId"])
        if upload is None:
            raise Refusal(404, "NoSuchUpload", "The specified upload does not exist.")
        part = Stored(body, _md5(body))
        upload[2][int(query["partNumber"])] = part
        self._answer(200, b"", {"ETag": f'"{part.etag}"'})

    def _multipart(
        self, request: Request, objects: dict[str, Stored], query: dict[str, str], body: bytes
    ) -> None:
        if "uploads" in query:
            number = os.urandom(16).hex().upper()
            self.state.uploads[number] = (request.bucket, request.key, {})
            return self._xml(
                "InitiateMultipartUploadResult",
                Bucket=request.bucket,
                Key=request.key,
                UploadId=number,
            )
        upload = self.state.uploads.get(query.get("uploadId", ""))
        if upload is None:
            raise Refusal(404, "NoSuchUpload", "The specified upload does not exist.")
        parts = [(int(part.findtext("{*}PartNumber", "0")), part.findtext("{*}ETag", "").strip('"'))
                 for part in ElementTree.fromstring(body).findall("{*}Part")]  # fmt: skip
        held = [upload[2].get(number) for number, _ in parts]
        if not parts:
            raise Refusal(400, "MalformedXML", "The XML you provided was not well-formed.")
        if any(
            part is None or part.etag != etag for part, (_, etag) in zip(held, parts, strict=True)
        ):
            raise Refusal(
                400, "InvalidPart", "One or more of the specified parts could not be found."
            )
        bodies = [part.data for part in held if part is not None]
        if any(len(data) < LEAST_PART_BYTES for data in bodies[:-1]):
            raise Refusal(
                400, "EntityTooSmall", "Your proposed upload smaller than the minimum allowed size."
            )
        etag = f"{_md5(''.join(etag for _, etag in parts).encode())}-{len(parts)}"
        objects[request.key] = Stored(b"".join(bodies), etag)
        del self.state.uploads[query["uploadId"]]
        return self._xml(
            "CompleteMultipartUploadResult",
            Bucket=request.bucket,
            Key=request.key,
            ETag=f'"{etag}"',
        )

    def _xml(self, name: str, **fields: str) -> None:
        inner = "".join(f"<{tag}>{escape(text)}</{tag}>" for tag, text in fields.items())
        text = f'<?xml version="1.0" encoding="UTF-8"?><{name}{NAMESPACE}>{inner}</{name}>'
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self._begin(status, len(body), headers or {})
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    def _begin(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("x-oss-request-id", os.urandom(12).hex().upper())
        if status != 204:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _control(self, name: str, body: bytes) -> bytes:
        """What tests say to the server itself."""
        state = self.state
        told = json.loads(body) if body else {}
        with state.lock:
            if name == "behaviour":
                state.behaviour = Behaviour(**told)
                state.faults = Faults(state.behaviour)
            elif name == "bucket":
                state.buckets[told["name"]] = {}
                state.public |= {told["name"]} if told["public"] else set()
                state.versioned |= {told["name"]} if told["versioned"] else set()
            elif name == "fill":
                state.buckets[told["bucket"]].update(
                    {f"many/{i:05d}": Stored(b"x", _md5(b"x")) for i in range(told["count"])}
                )
            elif name == "keys":
                state.keys = {key: Credential(**fields) for key, fields in told.items()}
            elif name == "log":
                taken = state.log
                state.log = []
                return json.dumps(taken).encode()
            uploads = len(state.uploads)
            return json.dumps(
                {"faults": state.faults_made, "requests": len(state.log), "uploads": uploads}
            ).encode()

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


def _bucket_of(host: str) -> str:
    """The bucket that a host names, or an empty text."""
    for domain in DOMAINS:
        found = re.fullmatch(rf"([a-z0-9-]+)\.s3\.{re.escape(domain)}", host)
        if found:
            return found[1]
    return ""


def _range_of(request: Request, size: int) -> tuple[int, int, bool]:
    """[start, stop) of the body, and whether it is a part.

    A range that reaches out of the object does not take effect.
    """
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
    if not found:
        return 0, size, False
    start = int(found[1])
    last = int(found[2]) if found[2] else size - 1
    if start <= last < size:
        return start, last + 1, True
    if request.headers.get("x-oss-range-behavior") != "standard":
        return 0, size, False
    if start >= size:
        raise Refusal(416, "InvalidRange", "The requested range cannot be satisfied")
    return start, size, True


def _check_digests(request: Request, body: bytes) -> None:
    told = request.headers.get("content-md5")
    if told and base64.b64decode(told) != hashlib.md5(body).digest():
        raise Refusal(400, "InvalidDigest", "The Content-MD5 you specified was invalid.")
    told = request.headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
    if told not in ("UNSIGNED-PAYLOAD", hashlib.sha256(body).hexdigest()):
        raise Refusal(400, "XAmzContentSHA256Mismatch")


def _listing(request: Request, objects: dict[str, Stored], query: dict[str, str]) -> bytes:
    """ListObjects, version 2: at most 1,000 names a page."""
    prefix = query.get("prefix", "")
    delimiter = query.get("delimiter", "")
    after = query.get("continuation-token") or query.get("start-after") or ""
    most = min(1000, int(query.get("max-keys") or 1000))
    rows: dict[str, Stored | None] = {}
    for key in sorted(objects):
        rest = key[len(prefix) :]
        if not key.startswith(prefix):
            continue
        name = (
            prefix + rest.split(delimiter)[0] + delimiter
            if delimiter and delimiter in rest
            else key
        )
        if name > after:
            rows.setdefault(name, objects[key] if name == key else None)
    names = list(rows)[:most]
    encode = urllib.parse.quote if query.get("encoding-type") == "url" else escape
    fields = [
        f"<Name>{request.bucket}</Name><Prefix>{encode(prefix)}</Prefix><MaxKeys>{most}</MaxKeys>"
    ]
    if "encoding-type" in query:
        fields.append("<EncodingType>url</EncodingType>")
    truncated = len(rows) > most
    fields.append(f"<IsTruncated>{str(truncated).lower()}</IsTruncated>")
    if truncated:
        fields.append(f"<NextContinuationToken>{encode(names[-1])}</NextContinuationToken>")
    for name in names:
        stored = rows[name]
        if stored is None:
            fields.append(f"<CommonPrefixes><Prefix>{encode(name)}</Prefix></CommonPrefixes>")
            continue
        when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.modified))
        fields.append(
            f"<Contents><Key>{encode(name)}</Key><LastModified>{when}</LastModified><ETag>&quot;{stored.etag}&quot;</ETag>"
            f"<Type>Normal</Type><Size>{len(stored.data)}</Size><StorageClass>Standard</StorageClass></Contents>"
        )
    text = f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult{NAMESPACE}>{"".join(fields)}</ListBucketResult>'
    return text.encode()


def _md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest().upper()


# --- the side of the tests -----------------------------------------------------------------------------------------------------


@dataclass
class Oss:
    """A running server in another process, and how to reach it."""

    process: subprocess.Popen[str]
    port: int
    buckets: int = 0

    @property
    def proxy(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> str:
        return f"http://{DOMAIN}"

    @property
    def options(self) -> dict[str, Any]:
        """storage_options in the manner of ossfs."""
        return {"endpoint": self.endpoint, "key": KEY, "secret": SECRET}

    @property
    def environment(self) -> dict[str, str]:
        """What makes OSS's host names lead to this server."""
        return {"http_proxy": self.proxy, "no_proxy": "127.0.0.1,localhost"}

    def new_bucket(self, *, public: bool = False, versioned: bool = False) -> str:
        self.buckets += 1
        name = f"bucket-{self.buckets}"
        self._tell("bucket", name=name, public=public, versioned=versioned)
        return name

    def fill(self, bucket: str, count: int) -> None:
        """Store so many objects of one byte, below many/."""
        self._tell("fill", bucket=bucket, count=count)

    def behave(self, **fields: Any) -> None:
        """Set the faults, as of `tools.bench.object_server.Behaviour`."""
        self._tell("behaviour", **dataclasses.asdict(Behaviour(**fields)))

    def know(self, **keys: dict[str, Any]) -> None:
        """The keys that the server knows from now on: {id: {"secret": ..., "token": ..., "expires":
        ...}}.
        """
        self._tell("keys", **keys)

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = self._tell("counts")
        return counts

    def take_log(self) -> list[dict[str, Any]]:
        """The requests since the last call."""
        log: list[dict[str, Any]] = self._tell("log")
        return log

    def _tell(self, what: str, /, **fields: Any) -> Any:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(
            f"{self.proxy}/-/{what}", json.dumps(fields).encode(), timeout=30
        ) as answer:
            return json.load(answer)


@contextlib.contextmanager
def oss_server(port: int = 0) -> Iterator[Oss]:
    """A server in another process, for the time of a `with` block."""
    command = [sys.executable, "-m", "tests.support.oss_server", str(port)]
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
    assert process.stdout is not None
    try:
        yield Oss(process, int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    Handler.state = State()
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer.request_queue_size = 1024
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
