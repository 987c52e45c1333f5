#!/usr/bin/env python3
"""`python tools/train.py ...` is `streammega train ...`."""

import sys

from streammega.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
