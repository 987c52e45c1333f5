#!/usr/bin/env python3
"""`python tools/describe.py ...` is `streammega describe ...`."""

import sys

from streammega.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["describe", *sys.argv[1:]]))
