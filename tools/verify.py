#!/usr/bin/env python3
"""`python tools/verify.py ...` is `streammega verify ...`."""

import sys

from streammega.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["verify", *sys.argv[1:]]))
