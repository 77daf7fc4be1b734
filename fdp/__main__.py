"""``python -m fdp``: the command line, see ``fdp.cli``."""

import sys

from fdp.cli import main

if __name__ == "__main__":
    sys.exit(main())
