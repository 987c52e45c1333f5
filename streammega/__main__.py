"""`streammega` and `python -m streammega`: the command."""

import sys


def main() -> int:
    """Run the command line. Ctrl-C is one word here too, while modules are imported."""
    try:
        from streammega.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
