"""`streammega` and `python -m streammega`: the command."""

import os
import sys
from contextlib import suppress


def main() -> int:
    """Run the command line. Ctrl-C is one word here too, while modules are imported."""
    try:
        from streammega.cli.main import main as run

        code = run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    if code:
        # After an error requests may be under way in threads of Rust, which abort the process where
        # the interpreter ends while they call it.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
