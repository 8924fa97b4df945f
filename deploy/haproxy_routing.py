"""Edits Ray Serve's HAProxy configuration: which application and replica a request goes to.

    python3 haproxy_routing.py FILE     run by haproxy.sh before each start of HAProxy, with the standard library alone

A conversation stays on its first replica by a stick table, which HAProxy shares with its successor
and other nodes. Its key is the header `x-session-id`, else the body's `prompt_cache_key` or
`metadata.user_id`, else Authorization with the user's first turn. QUARTET_ROUTING has the `Routing`
as JSON.
"""

import json
import os
import re
import sys
import zlib
from pathlib import Path
from typing import Any

FRONTEND = "frontend http_frontend"
HEADER = "x-quartet-home"  # says to the replica what became of the request: new, kept or moved
_SERVER = re.compile(r"^ *server (\S+) (?!.* backup\b).*$", re.MULTILINE)
_BACKEND = re.compile(r"^backend .*(?:\n(?![a-z]).*)*", re.MULTILINE)
_JSON_POST = "METH_POST { req.hdr(content-type) -m beg application/json } !{ req.hdr(expect) -m found }"
_KEY_PATHS = ("$.prompt_cache_key", "$.metadata.user_id")
_LOOPBACK = ("127.0.0.1", "::1")
_ANY_SERVER = re.compile(r"^ *server \S+ (\S+):\d+", re.MULTILINE)
_OWN_ADDRESS = "--node_ip_address="  # an option of Ray's raylet
_MESSAGES = (0, 1)  # the first turn of the user stands here, after a system message or without one


def edit(text: str, routing: dict[str, Any], socket: Path, node: str) -> str:
    """Add our lines. `socket`: gives a new HAProxy on loopback the old tables."""
    text = _with_buffer(text, routing["look_bytes"])
    inserted = [f"http-request del-header {HEADER}", *_model_lines(routing)]
    text = text.replace(FRONTEND, _indented(FRONTEND, inserted), 1)
    if not routing["stay"]:
        return text
    edited = _BACKEND.sub(lambda found: _with_homes(found[0], routing), text)
    if edited == text:
        return text
    edited = edited.replace("global\n", f"global\n    localpeer {node}\n", 1)
    peers = _indented("peers quartet", _peer_lines(text, routing["peer_port"], socket, node))
    return edited.replace("defaults\n", f"{peers}\ndefaults\n", 1)


def _peer_lines(text: str, port: int, socket: Path, node: str) -> list[str]:
    if node in _LOOPBACK:
        return [f"peer {node} unix@{socket}"]
    # an ingress is on the head, where Serve's proxy is, and on each node with a replica
    nodes = {node, *_ANY_SERVER.findall(text)}.difference(_LOOPBACK)
    return [f"peer {each} {each}:{port}" for each in sorted(nodes)]


def _indented(section: str, lines: list[str]) -> str:
    return "\n    ".join([section, *lines])


def _with_buffer(text: str, look_bytes: int) -> str:
    """The buffer exceeds what HAProxy keeps free, and is at least Serve's."""
    line = f"tune.bufsize {look_bytes + 1024}"
    if "tune.bufsize" in text:
        return re.sub(r"tune\.bufsize \d+", line, text)
    return text.replace("global\n", f"global\n    {line}\n", 1)


def _wait(routing: dict[str, Any], unless: str = "") -> str:
    return f"http-request wait-for-body time {routing['body_timeout_ms']}ms if {_JSON_POST} {unless}".rstrip()


def _model_lines(routing: dict[str, Any]) -> list[str]:
    others = [served for served in routing["names"] if served["prefix"] != "/"]
    if not others:
        return []
    lines = [_wait(routing), f"http-request set-var(txn.model) req.body,json_query('$.model') if {_JSON_POST}"]
    for served in others:
        prefix = served["prefix"]
        quoted = served["name"].replace("\\", "\\\\").replace('"', '\\"')
        chosen = f'{{ var(txn.model) -m str -- "{quoted}" }} {{ path_beg /v1/ /generate /tokenize /detokenize }}'
        lines.append(f"http-request set-path {prefix}%[path] if {chosen}")
    return lines


def _with_homes(section: str, routing: dict[str, Any]) -> str:
    """Sticky conversations for a backend with several servers."""
    servers = _SERVER.findall(section)
    if len(servers) < 2:
        return section
    name = section.split(None, 2)[1]
    ids = _ids(servers)
    section = _SERVER.sub(lambda found: f"{found[0]} id {ids[found[1]]}", section)
    head, rest = section.split("\n", 1)
    return _indented(head, [*_key_lines(routing), *_home_lines(name, ids, routing)]) + "\n" + rest


def _ids(servers: list[str]) -> dict[str, int]:
    """Number servers by name, so a number stays when others change."""
    ids: dict[str, int] = {}
    for server in servers:
        number = zlib.crc32(server.encode()) % (1 << 30) + 1
        while number in ids.values():
            number += 1
        ids[server] = number
    return ids


def _key_lines(routing: dict[str, Any]) -> list[str]:
    """The conversation's key, as SHA-1 in `txn.home`."""
    unknown = "!has_home"
    turn = "!has_home !has_turn"
    lines = [
        "acl has_home var(txn.home) -m len gt 0",
        "acl has_turn var(txn.turn) -m len gt 0",
        "http-request set-var(txn.home) req.hdr(x-session-id)",
        _wait(routing, unknown),
    ]
    lines += [f"http-request set-var(txn.home) req.body,json_query('{path}') if {unknown}" for path in _KEY_PATHS]
    for content in ("content", "content[0].text"):
        for index in _MESSAGES:
            user = f"{{ req.body,json_query('$.messages[{index}].role') -m str user }}"
            lines.append(f"http-request set-var(txn.turn) req.body,json_query('$.messages[{index}].{content}') if {turn} {user}")
    lines += [
        f"http-request set-var(txn.turn) req.body,json_query('$.input') if {turn}",
        'http-request set-var-fmt(txn.home) "%[req.hdr(authorization)] %[var(txn.turn)]" if !has_home has_turn',
        "http-request set-var(txn.home) var(txn.home),sha1 if has_home",
    ]
    return lines


def _home_lines(backend: str, ids: dict[str, int], routing: dict[str, Any]) -> list[str]:
    """A conversation's replica gets its request if up and not far above the mean."""
    lines = [
        f"stick-table type binary len 20 size {routing['conversations']} expire {routing['idle_ms']}ms peers quartet",
        f"http-request set-var(txn.was) var(txn.home),table_server_id({backend}) if has_home",
        *_load_lines(backend, "was", "load", ids),
        f"http-request set-var(txn.mean) be_conn({backend}),div({len(ids)})",
        f"acl is_far_above var(txn.load),sub(txn.mean) -m int gt {routing['lead']}",
        "acl is_known var(txn.was) -m int gt 0",
        "acl has_replica var(txn.load) -m found",
        "http-request set-var(txn.kept) bool(true) if is_known has_replica !is_far_above",
        "acl is_kept var(txn.kept) -m bool",
        f"http-request set-header {HEADER} new if has_home !is_known",
        f"http-request set-header {HEADER} moved if is_known",
        f"http-request set-header {HEADER} kept if is_kept",
        "stick match var(txn.home) if is_kept",
        "stick store-request var(txn.home) if has_home",
    ]
    return [*lines, *_turn_lines(backend, list(ids), max(1, routing["lead"] // 4))]


def _turn_lines(backend: str, servers: list[str], lead: int) -> list[str]:
    """New conversations go to replicas in turn, or to the idlest."""
    places = {server: place for place, server in enumerate(servers)}
    turn = f"proc.turn_{zlib.crc32(backend.encode())}"  # each application counts for itself
    return [
        f"http-request set-var({turn}) var({turn},0),add(1),mod({len(servers)}) if has_home !is_kept",
        f"http-request set-var(txn.place) var({turn}) if has_home !is_kept",
        *_load_lines(backend, "place", "place_load", places),
        f"acl is_place_free var(txn.place_load),sub(txn.mean) -m int le {lead}",
        *(f"use-server {server} if {{ var(txn.place) -m int {place} }} is_place_free" for server, place in places.items()),
    ]


def _load_lines(backend: str, variable: str, load: str, numbers: dict[str, int]) -> list[str]:
    """Open requests of the server numbered `variable`, if up."""
    lines = []
    for server, number in numbers.items():
        up = f"{{ var(txn.{variable}) -m int {number} }} {{ srv_is_up({backend}/{server}) }}"
        lines.append(f"http-request set-var(txn.{load}) srv_conn({backend}/{server}) if {up}")
    return lines


def _own_address(raylet: str) -> str:
    words = Path(f"/proc/{raylet}/cmdline").read_text().split("\0")
    (address,) = [word.removeprefix(_OWN_ADDRESS) for word in words if word.startswith(_OWN_ADDRESS)]
    return address


def main() -> None:
    path = Path(sys.argv[1])
    routing = json.loads(os.environ["QUARTET_ROUTING"])
    node = _own_address(os.environ["RAY_RAYLET_PID"])
    path.write_text(edit(path.read_text(), routing, path.with_name("peers.sock"), node))


if __name__ == "__main__":
    main()
