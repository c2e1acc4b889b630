"""``python -m ceilings``: the same as the command ``ceilings``."""

import sys

from ceilings.cli import main

if __name__ == "__main__":
    sys.exit(main())
