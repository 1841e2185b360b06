"""`python -m ringattn` is the command `ringattn`."""

import sys

from ringattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
