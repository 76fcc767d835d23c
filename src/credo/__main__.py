"""`python -m credo` is the command `credo`."""

import sys

from credo.cli import main

if __name__ == "__main__":
    sys.exit(main())
