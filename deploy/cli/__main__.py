"""`python -m deploy.cli`: the command line, as `quartet` is."""

import sys

from deploy.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
