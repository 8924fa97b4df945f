"""`python -m deploy.cli` is `quartet`."""

import sys

from deploy.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
