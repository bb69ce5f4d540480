"""``python -m vramlab``; see `vramlab.command`."""

import sys

from vramlab.command import main

if __name__ == "__main__":
    sys.exit(main())
