"""Taking in by itself what is appended to datasets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from streammega.config.setting_checks import set_whole_numbers
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls, redacted_repr


@dataclass(frozen=True, kw_only=True)
class FollowConfig:
    """Take in by itself what is appended to datasets that the blend names by a version (`web@7`)."""

    every_samples: int
    """Newer versions are looked for at each multiple of so many samples of training, or where the
    step ends that holds it. What they have more joins there, in a phase.
    """
    record: str | None = None
    """A folder, path or URL, of small files that say what joined at which sample. Every rank,
    worker and resume of the run goes by them: all must see it, and it must keep conditional writes.
    None: `follow` in train.out_dir, in runs of streammega.train.
    """

    def __repr__(self) -> str:
        return redacted_repr(self)

    def __post_init__(self) -> None:
        set_whole_numbers(self, ("every_samples",))
        if self.every_samples < 1:
            raise ConfigError(
                f"follow.every_samples is {self.every_samples}; it must be at least 1"
            )
        if self.record is not None:
            try:
                object.__setattr__(self, "record", os.fspath(self.record).rstrip("/"))
            except TypeError:
                raise ConfigError(
                    f"follow.record is {self.record!r}; it must be the path or URL of a folder"
                ) from None
            if not self.record:
                raise ConfigError(
                    "follow.record is empty; name a folder of the run's own, path or URL"
                )


def check_follow(follow: Any, order: str, has_schedule: bool) -> None:
    """Raise ConfigError for what is no FollowConfig, and where nothing can be followed."""
    if not isinstance(follow, FollowConfig):
        raise ConfigError(
            f"follow is {redact_urls(repr(follow))}; it must be a FollowConfig, such as "
            "FollowConfig(every_samples=1_000_000, record='s3://bucket/run/follow')"
        )
    if order != "stream":
        raise ConfigError('follow belongs to the stream order: set order="stream"')
    if has_schedule:
        raise ConfigError(
            "follow begins phases, and blend_schedule holds in the first one alone; give its "
            "weights to phases"
        )
