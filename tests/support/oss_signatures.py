"""The three signatures that OSS understands, computed by a server's side: OSS V1, OSS V4, and AWS's
V4 on its S3 side.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

SUBRESOURCES = (
    "acl",
    "continuation-token",
    "delete",
    "partNumber",
    "security-token",
    "uploadId",
    "uploads",
)
"""Those of OSS's V1 signature that this server serves; other query parameters are
not signed there.
"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a signature covers.

    `path` is as it was sent, percent-encoded; `headers` have lower-case names.
    """

    method: str
    bucket: str
    path: str
    query: str
    headers: Mapping[str, str]

    @property
    def key(self) -> str:
        return urllib.parse.unquote(self.path[1:])

    @property
    def parameters(self) -> list[tuple[str, str]]:
        return urllib.parse.parse_qsl(self.query, keep_blank_values=True)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Who a request says it comes from, and the proof."""

    kind: str
    access_key_id: str
    signature: str
    scope: tuple[str, ...] = ()
    signed_headers: tuple[str, ...] = ()


def read_claim(authorization: str) -> Claim | None:
    """The claim of an Authorization header, or None for one of no known kind."""
    if found := re.fullmatch(r"OSS ([^:]+):(.+)", authorization):
        return Claim(kind="oss-v1", access_key_id=found[1], signature=found[2])
    kinds = {"OSS4-HMAC-SHA256": "oss-v4", "AWS4-HMAC-SHA256": "aws-v4"}
    name, _, rest = authorization.partition(" ")
    if name not in kinds:
        return None
    fields = dict(part.strip().split("=", 1) for part in rest.split(","))
    access_key_id, *scope = fields["Credential"].split("/")
    signed = fields.get("SignedHeaders", fields.get("AdditionalHeaders", ""))
    return Claim(
        kind=kinds[name],
        access_key_id=access_key_id,
        signature=fields["Signature"],
        scope=tuple(scope),
        signed_headers=tuple(filter(None, signed.split(";"))),
    )


def is_signed_by(request: Request, claim: Claim, secret: str) -> bool:
    """Whether the claim's signature is that of this request under the secret."""
    compute = {"oss-v1": _oss_v1, "oss-v4": _oss_v4, "aws-v4": _aws_v4}[claim.kind]
    return hmac.compare_digest(compute(request, claim, secret), claim.signature)


def _oss_v1(request: Request, claim: Claim, secret: str) -> str:
    headers = request.headers
    own = "".join(
        f"{name}:{headers[name]}\n" for name in sorted(headers) if name.startswith("x-oss-")
    )
    signed = sorted(pair for pair in request.parameters if pair[0] in SUBRESOURCES)
    query = "&".join(f"{name}={value}" if value else name for name, value in signed)
    resource = f"/{request.bucket}/{request.key}" + (f"?{query}" if query else "")
    date = headers.get("x-oss-date") or headers.get("date", "")
    lines = [
        request.method,
        headers.get("content-md5", ""),
        headers.get("content-type", ""),
        date,
        own + resource,
    ]
    digest = hmac.new(secret.encode(), "\n".join(lines).encode(), hashlib.sha1).digest()
    return base64.b64encode(digest).decode()


def _oss_v4(request: Request, claim: Claim, secret: str) -> str:
    own = sorted(
        name
        for name in request.headers
        if name.startswith("x-oss-")
        or name in ("content-type", "content-md5")
        or name in claim.signed_headers
    )
    canonical = "\n".join(
        [
            request.method,
            _quoted(f"/{request.bucket}/{request.key}", safe="/"),
            _canonical_query(request, blank=""),
            "".join(f"{name}:{request.headers[name]}\n" for name in own),
            ";".join(claim.signed_headers),
            request.headers.get("x-oss-content-sha256", "UNSIGNED-PAYLOAD"),
        ]
    )
    return _signed(
        "OSS4-HMAC-SHA256", request.headers["x-oss-date"], claim, f"aliyun_v4{secret}", canonical
    )


def _aws_v4(request: Request, claim: Claim, secret: str) -> str:
    headers = request.headers
    canonical = "\n".join(
        [
            request.method,
            request.path,
            _canonical_query(request, blank="="),
            "".join(
                f"{name}:{' '.join(headers.get(name, '').split())}\n"
                for name in claim.signed_headers
            ),
            ";".join(claim.signed_headers),
            headers.get("x-amz-content-sha256", ""),
        ]
    )
    return _signed("AWS4-HMAC-SHA256", headers["x-amz-date"], claim, f"AWS4{secret}", canonical)


def _signed(algorithm: str, date: str, claim: Claim, key: str, canonical: str) -> str:
    scope = "/".join(claim.scope)
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    signing_key = key.encode()
    for part in claim.scope:
        signing_key = hmac.new(signing_key, part.encode(), hashlib.sha256).digest()
    text = "\n".join([algorithm, date, scope, digest])
    return hmac.new(signing_key, text.encode(), hashlib.sha256).hexdigest()


def _canonical_query(request: Request, *, blank: str) -> str:
    pairs = sorted((_quoted(name), _quoted(value)) for name, value in request.parameters)
    return "&".join(f"{name}={value}" if value else f"{name}{blank}" for name, value in pairs)


def _quoted(text: str, safe: str = "") -> str:
    return urllib.parse.quote(text, safe=f"{safe}-_.~")
