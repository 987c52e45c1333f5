"""`python -m streammega` is the `streammega` command."""

import sys

from streammega.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
