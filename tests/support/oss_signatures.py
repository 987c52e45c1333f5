"""AWS's signature, version 4, computed by a server's side, as OSS checks it in its dialect of S3."""

from __future__ import annotations

import hashlib
import hmac
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

ALGORITHM = "AWS4-HMAC-SHA256"


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

    access_key_id: str
    signature: str
    scope: tuple[str, ...]
    signed_headers: tuple[str, ...]


def read_claim(authorization: str) -> Claim | None:
    """The claim of an Authorization header, or None for one of another kind."""
    name, _, rest = authorization.partition(" ")
    if name != ALGORITHM:
        return None
    fields = dict(part.strip().split("=", 1) for part in rest.split(","))
    access_key_id, *scope = fields["Credential"].split("/")
    return Claim(
        access_key_id=access_key_id,
        signature=fields["Signature"],
        scope=tuple(scope),
        signed_headers=tuple(fields["SignedHeaders"].split(";")),
    )


def is_signed_by(request: Request, claim: Claim, secret: str) -> bool:
    """Whether the claim's signature is that of this request under the secret."""
    headers = request.headers
    pairs = sorted((_quoted(name), _quoted(value)) for name, value in request.parameters)
    canonical = "\n".join(
        [
            request.method,
            request.path,
            "&".join(f"{name}={value}" for name, value in pairs),
            "".join(
                f"{name}:{' '.join(headers.get(name, '').split())}\n"
                for name in claim.signed_headers
            ),
            ";".join(claim.signed_headers),
            headers.get("x-amz-content-sha256", ""),
        ]
    )
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join([ALGORITHM, headers["x-amz-date"], "/".join(claim.scope), digest])
    key = f"AWS4{secret}".encode()
    for part in claim.scope:
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    return hmac.compare_digest(signature, claim.signature)


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="-_.~")
