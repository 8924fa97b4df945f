"""`python -m tests.support.stack.paced_cli serve CONFIG` is `quartet serve` with paced_app.

ray is not imported here: the launcher must set its environment first.
"""

import sys

from deploy.cli import main as cli
from deploy.cli import serve_command
from deploy.launcher import Launch


class PacedLaunch(Launch):
    """Of a config that has been read and checked as it stands."""

    def start(self) -> None:
        """With paced_app in the place of each application."""
        for each in self.config["applications"]:
            each["import_path"] = "tests.support.stack.paced_app:build"
        super().start()


if __name__ == "__main__":
    serve_command.Launch = PacedLaunch  # type: ignore[misc]
    sys.exit(cli.main())
