"""moto's server, with writes under a condition that are one step, as those of S3 are: moto looks,
and then writes.
"""

from __future__ import annotations

import threading
from typing import Any

from moto.s3.responses import S3Response
from moto.server import main

_one_at_a_time = threading.Lock()
_put_object = S3Response.put_object


def _put_in_one_step(response: Any) -> Any:
    if "If-None-Match" not in response.headers:
        return _put_object(response)
    with _one_at_a_time:
        return _put_object(response)


if __name__ == "__main__":
    setattr(S3Response, "put_object", _put_in_one_step)  # noqa: B010
    main()
