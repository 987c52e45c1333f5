"""The limit of open files: errors that it causes name it, and how far it may be raised."""

from __future__ import annotations

import errno
import os
import resource

TOO_MANY_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE})
_SIGNS = ("too many open files", "os error 24)", "os error 23)")
"""Texts of libraries whose errors have no errno: the C library's, and Rust's."""
NEARLY = 4
"""A failed connection is blamed on the limit when no more than so many descriptors are free.

Sockets that could not be made are closed before their error arrives, and looking up a name takes a
few descriptors.
"""


def explain_fd_limit(error: BaseException) -> str:
    """The message for an error that the limit of open files caused; empty for all other errors."""
    # Two errors may be each other's context: such a chain has no end.
    visited: set[int] = set()
    behind: BaseException | None = error
    while behind is not None and id(behind) not in visited:
        visited.add(id(behind))
        text = str(behind).lower()
        has_number = isinstance(behind, OSError) and behind.errno in TOO_MANY_ERRNOS
        if has_number or any(sign in text for sign in _SIGNS):
            return fd_limit_message()
        behind = behind.__cause__ or behind.__context__
    return ""


def explain_fd_limit_of_connection(error: BaseException) -> str:
    """As `explain_fd_limit`, for a failed connection: also where the limit is nearly reached."""
    blame = explain_fd_limit(error)
    if blame:
        return blame
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A negative limit means unlimited.
    if 0 <= soft <= open_files() + NEARLY:
        return fd_limit_message()
    return ""


def fd_limit_message() -> str:
    """How many files are open, how many may be, and what to do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    remedy = "raise `ulimit -n`"
    if soft != hard:
        remedy += f" (up to {hard:,} without asking anybody)"
    return f"too many open files: {open_files():,} of {allowed}; {remedy}, or lower max_concurrent_requests"


def open_files() -> int:
    """Descriptors open in this process. Where counting them fails for lack of one, the limit."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder)) - 1  # without the one that lists
        except FileNotFoundError:
            continue
        except OSError:
            break
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft
