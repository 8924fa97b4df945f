"""`quartet dashboards`: where boards, rules and provisioning are; builds them."""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from deploy.cli.output import NO, OK, Part, Subparsers, Table, command, emit
from engine.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[2] / "dashboards"
BUILDERS = ("dashboards.boards", "dashboards.alerts")  # modules that write what is committed, when run
KINDS = {
    "*.json": "board",
    "*alert*.yaml": "rules",
    "*rule*.yaml": "rules",
    "*compose*.y*ml": "compose",
    "**/provisioning": "provisioning",
}
_NEXT = "import a board into Grafana and choose its data source; rules go into rule_files of prometheus.yml"

HELP = """\
Boards are code, committed as JSON that any Grafana imports ($datasource chooses the Prometheus); rules are Prometheus' own.

  quartet dashboards               what there is, and where
  quartet dashboards --build       write boards and rules anew, as `make dashboards` does
  quartet dashboards --json

exit codes: 0 as asked; 1 this checkout has no boards; 2 they cannot be built here"""


def register(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = command(commands, "dashboards", "where boards and alerts are; builds them", HELP)
    parser.add_argument("--build", action="store_true", help="write them anew, then list them")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Builds if asked, and lists."""
    for builder in BUILDERS if args.build else ():
        build(builder)
    found = listed(FOLDER)
    rows = [(each["kind"], each["path"], each["what"]) for each in found]
    parts: list[Part] = [Table("", ("kind", "file", "what it holds"), rows)]
    boards = sum(each["kind"] == "board" for each in found)
    parts.append(_NEXT if boards else "no boards in this checkout")
    emit({"folder": str(FOLDER), "files": found}, parts, as_json=args.json)
    return OK if boards else NO


def build(builder: str) -> None:
    """Runs `python -m <builder>`. ConfigError when this checkout has none, or with the last thing it said."""
    if importlib.util.find_spec(builder) is None:
        raise ConfigError(f"dashboards: this checkout has no {builder}, which would write boards or rules")
    done = subprocess.run([sys.executable, "-m", builder], cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()
        raise ConfigError(f"dashboards: {builder} failed: {said[-1]}")


def listed(folder: Path) -> list[dict[str, str]]:
    """Kind, path and content of everything an operator may want, boards first."""
    seen: dict[Path, str] = {}
    for pattern, kind in KINDS.items():
        for path in sorted(folder.glob(pattern)):
            seen.setdefault(path, kind)
    return [{"kind": kind, "path": str(path), "what": _content(path, kind)} for path, kind in seen.items()]


def _content(path: Path, kind: str) -> str:
    if kind == "board":
        board = json.loads(path.read_text(encoding="utf-8"))
        return f"{board.get('title', path.stem)}: {_panels(board)} panels"
    if kind == "rules":
        import yaml

        groups = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("groups", [])
        rules = [rule for group in groups for rule in group.get("rules", [])]
        alerts = sum("alert" in rule for rule in rules)
        return f"{alerts} alerts, {len(rules) - alerts} recording rules"
    return ""


def _panels(board: dict[str, Any]) -> int:
    """Panels of a board, those inside collapsed rows included, rows themselves not."""
    panels = board.get("panels", [])
    return sum(panel.get("type") != "row" for panel in panels) + sum(_panels(panel) for panel in panels)
