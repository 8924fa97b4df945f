"""What a kernel's PTX does with memory: which arguments it reads and writes, when, and in which width it computes addresses."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WAIT = "griddepcontrol.wait"
_ACCESS = re.compile(r"(?P<op>(?:ld|st|atom|red|prefetch)\.[\w.:]*global[\w.:]*|cp\.async\.c[ga][\w.:]*)(?P<rest>.*)")
_PARAMETER = re.compile(r"ld\.param\.\w+\s+(%\w+), \[\w+_param_(\d+)\]")
_REGISTER = re.compile(r"%[a-z]+\d+")
_BRANCH = re.compile(r"(?P<condition>@!?%p\d+\s+)?(?P<op>bra(?:\.uni)?|ret|exit|trap)\b\s*(?P<label>[$\w]*)")
_LABEL = re.compile(r"([$\w]+):")
_NARROW = re.compile(r"(mul\.lo|mad\.lo|shl)\.[bsu]32\b")


@dataclass(frozen=True)
class Access:
    """One access to global memory: its opcode, the arguments that its address comes from, and whether it stands before the wait."""

    op: str
    arguments: frozenset[str]
    early: bool

    @property
    def reads(self) -> bool:
        return self.op.startswith(("ld", "atom", "cp.async"))

    @property
    def writes(self) -> bool:
        return self.op.startswith(("st", "atom", "red"))


def accesses(ptx: str, names: Sequence[str]) -> list[Access]:
    """All accesses in the PTX's order; `names`: the arguments that are not compiled in. An asynchronous copy counts as a read."""
    return [access for _, access in _annotated(ptx, names) if access is not None]


def early_reads(ptx: str, names: Sequence[str]) -> set[str]:
    """The arguments from whose memory something is read before the kernel waits for its predecessors."""
    return set().union(*(access.arguments for access in accesses(ptx, names) if access.early and access.reads))


def ends_without_waiting(ptx: str) -> bool:
    """Whether a path from the kernel's entry to an end passes no wait."""
    blocks = _blocks(_lines(ptx))
    open_, seen = [next(iter(blocks))], set()
    while open_:
        label = open_.pop()
        if label in seen:
            continue
        seen.add(label)
        lines, successors = blocks[label]
        if any(WAIT in line for line in lines):
            continue
        if not successors:
            return True
        open_ += successors
    return False


def narrow_products(ptx: str, names: Sequence[str], argument: str) -> list[str]:
    """32-bit products and shifts of what was loaded from `argument`: an offset that must be 64-bit is made of it."""
    tainted = set()
    found = []
    for line, access in _annotated(ptx, names):
        registers = _REGISTER.findall(line)
        if access is not None and access.op.startswith("ld") and argument in access.arguments:
            tainted |= set(_REGISTER.findall(line.split("[")[0]))
        elif access is None and registers and set(registers[1:]) & tainted:
            if _NARROW.search(line):
                found.append(line)
            if registers[0].startswith("%r") and not registers[0].startswith("%rd"):
                tainted.add(registers[0])
    return found


def _annotated(ptx: str, names: Sequence[str]) -> Iterator[tuple[str, Access | None]]:
    """Each line, and what it accesses. Registers carry the arguments that they were computed from, in the order of the text."""
    sources = {}
    early = True
    for line in _lines(ptx):
        early = early and WAIT not in line
        if parameter := _PARAMETER.search(line):
            place = int(parameter[2])
            sources[parameter[1]] = frozenset(names[place : place + 1])
            yield line, None
        elif found := _ACCESS.search(line):
            yield line, Access(found["op"], _address(found["op"], found["rest"], sources), early)
        else:
            target, *given = _REGISTER.findall(line) or [""]
            sources[target] = frozenset().union(*(sources.get(register, frozenset()) for register in given))
            yield line, None


def _address(op: str, rest: str, sources: dict[str, frozenset[str]]) -> frozenset[str]:
    """The arguments behind an access's address: its first bracket, of an asynchronous copy its second."""
    brackets = re.findall(r"\[([^\]]*)\]", rest)
    address = brackets[1] if op.startswith("cp.async") else brackets[0]
    return frozenset().union(*(sources.get(register, frozenset()) for register in _REGISTER.findall(address)))


def _lines(ptx: str) -> list[str]:
    """The body's lines without comments and debug information."""
    body = ptx.split(".entry", 1)[1].split("{", 1)[1]
    lines = (line.split("//")[0].strip() for line in body.splitlines())
    return [line for line in lines if line and not line.startswith((".loc", ".reg", ".file"))]


def _blocks(lines: Sequence[str]) -> dict[str, tuple[list[str], list[str]]]:
    """Basic blocks by label, each with its lines and the labels that may follow; none: the kernel ends."""
    blocks = {"": ([], [])}
    label, open_ = "", True
    for line in lines:
        if found := _LABEL.match(line):
            if open_:
                blocks[label][1].append(found[1])
            label, open_ = found[1], True
            blocks[label] = ([], [])
            continue
        if not open_:  # behind a jump: a block that only falls through to
            label, open_ = f"{label}+", True
            blocks[label] = ([], [])
        blocks[label][0].append(line)
        if branch := _BRANCH.match(line):
            if branch["label"] and branch["op"].startswith("bra"):
                blocks[label][1].append(branch["label"])
            open_ = branch["condition"] is not None
            if open_:
                blocks[label][1].append(f"{label}+")
                label = f"{label}+"
                blocks[label] = ([], [])
    return blocks
