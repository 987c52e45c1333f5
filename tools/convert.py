#!/usr/bin/env python3
"""`python tools/convert.py ...` is `streammega convert ...`."""

import sys

from streammega.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
