"""The command `quartet key new`."""

import argparse
import json
import os
from datetime import UTC, datetime
from pathlib import Path

from deploy.cli.output import OK, Subparsers, command, emit
from deploy.edge.edge_settings import KeySettings
from deploy.edge.keys.key_file import NAME, digest_of, new_key, parse, read
from engine.errors import ConfigError

HELP = """\
A file of keys is a list in YAML, with each key's SHA-256: the key itself is shown now, and nowhere again. `keys.file` in the YAML
names the file, which replicas read again when it changes; to replace a key, add a second entry of the same name, and take out the
first when nobody uses its key any more. docs/security.md has the rest.

  quartet key new --name alice --append /etc/quartet/keys
  quartet key new --name batch --rights generate --requests 600 --tokens 2000000 --concurrent 64 --expires 2027-01-01 --append keys
  quartet key new --name alice --json | jq -r .entry

exit codes: 0 made; 2 a limit or the file is wrong, and nothing was changed"""


def register(commands: Subparsers) -> None:
    parser = command(commands, "key", run, "make an API key, and the entry of it for the file of keys", HELP)
    parser.add_argument("what", choices=("new",), help="new: a key that nobody has yet")
    parser.add_argument("--name", required=True, help="its holder: 1 to 64 of A-Z a-z 0-9 . _ -; shown in logs and metrics")
    parser.add_argument("--rights", metavar="LIST", help="of generate,tokenize,models,docs,adapters (default: all but adapters)")
    parser.add_argument("--models", metavar="LIST", help="names that `model` may be in its requests (default: all)")
    parser.add_argument("--requests", type=int, metavar="N", help="a minute, at all replicas together (default: no limit)")
    parser.add_argument("--tokens", type=int, metavar="N", help="a minute, of prompts and answers (default: no limit)")
    parser.add_argument("--concurrent", type=int, metavar="N", help="requests open at once (default: no limit)")
    parser.add_argument("--expires", metavar="TIME", help="a day, or a time by ISO 8601, in UTC if it has no zone (default: never)")
    parser.add_argument("--append", type=Path, metavar="FILE", help="append the entry to this file, which is made if absent")


def run(args: argparse.Namespace) -> int:
    """ConfigError: a wrong option, or a conflict with the file."""
    if not NAME.fullmatch(args.name):
        raise ConfigError("--name: 1 to 64 of A-Z a-z 0-9 . _ -")
    key = new_key()
    lists = {name: value.split(",") for name in ("rights", "models") if (value := getattr(args, name)) is not None}
    others = {name: value for name in ("requests", "tokens", "concurrent", "expires") if (value := getattr(args, name)) is not None}
    entry = {"sha256": digest_of(key.encode()).hex(), "name": args.name, **lists, **others}
    line = f"- {json.dumps(entry)}"
    file = None
    (made,) = parse(line)
    if made.has_expired(datetime.now(UTC)):
        raise ConfigError("--expires: that time has passed")
    where = ["entry for the file of keys:", line]
    if args.append is not None:
        _append(args.append, line)
        file = str(args.append)
        where = [f"added to {file}"]
    value = {"name": made.name, "key": key, "entry": line, "file": file}
    emit(args, value, ["key, shown only now:", key, *where])
    return OK


def _append(path: Path, line: str) -> None:
    """Append in one write: readers see the file before or after, and concurrent entries both stay."""
    if path.exists() and not path.is_file():  # a pipe, say, whose other end would be waited for
        raise ConfigError(f"--append: {path} is no file")
    if path.exists():
        text = read(KeySettings(file=str(path)))
    else:
        text = ""
    if text.endswith("\n") or not text:
        added = f"{line}\n"
    else:
        added = f"\n{line}\n"
    parse(text + added)
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "wb", 0) as file:
            if file.write(added.encode()) < len(added):
                file.truncate(len(text.encode()))
                raise ConfigError(f"{path}: no room for the entry")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
