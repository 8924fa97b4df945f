"""The command `quartet`, as pip installs it: finds the checkout, and hands over to its command line.

    QUARTET_HOME          where it is set
    <checkout>/.venv      the folder that this virtual environment lies in
    the working folder    or the nearest folder above it that holds the code
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

MARK = Path("deploy") / "cli" / "main.py"


def candidates() -> Iterator[Path]:
    """Yields folders that may be the checkout, the surest first."""
    if home := os.environ.get("QUARTET_HOME"):
        yield Path(home)
        return
    yield Path(sys.prefix).parent
    yield from (Path.cwd(), *Path.cwd().parents)


def main() -> int:
    """Runs the command line of the checkout; 2 where there is none."""
    root = next((folder for folder in candidates() if (folder / MARK).is_file()), None)
    if root is None:
        sys.stderr.write("quartet: no checkout found: run it from one, or set QUARTET_HOME to its folder\n")
        return 2
    sys.path.insert(0, str(root))
    from deploy.cli.main import main as command_line

    return command_line()
