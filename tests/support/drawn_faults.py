"""One-line faults made from the syntax tree of files, for `python -m tests.support.mutation --drawn 113`.

Each operator changes one expression or statement. A fault's id is its file, function, operator and place among those, so it stays
when other functions change.
"""

import ast
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support.mutants import Fault

SEED = 59

# file -> the tests, below tests/, that should notice its faults, nearest first
TARGETS: dict[str, str] = {
    "deploy/edge/media/videos.py": "deploy/edge/test_videos.py",
    "deploy/edge/media/rasters.py": "deploy/edge/test_rasters.py",
    "deploy/edge/media/audio_features.py": "deploy/edge/test_audio_features.py",
    "deploy/edge/media/media_preparer.py": "deploy/edge/test_clips.py",
    "engine/vision_geometry.py": "engine/test_media_items.py engine/test_config_keys.py",
    "deploy/edge/keys/key_ring.py": "deploy/edge/test_keys.py",
    "deploy/edge/keys/quotas.py": "deploy/edge/test_quotas.py",
    "deploy/edge/admission_control.py": "deploy/edge/test_admission.py",
    "deploy/edge/bodies/raw_json.py": "deploy/edge/test_body_bounds.py deploy/edge/test_asks.py deploy/edge/test_validation.py",
    "deploy/edge/guards/uploads.py": "deploy/edge/test_uploads.py",
    "deploy/edge/routes.py": "deploy/edge/test_browsers.py deploy/edge/test_openapi.py deploy/edge/test_keys.py "
                             "deploy/edge/test_sharing.py deploy/edge/test_transcriptions.py deploy/edge/test_streams.py",
    "engine/core/draft_policy.py": "engine/core/test_draft_policy.py",
    "engine/core/step_budget.py": "engine/core/test_policy.py",
    "engine/core/scheduler.py": "engine/core/test_media.py engine/core/test_scheduler.py",
    "kernels/sequence_parallel.py": "engine/rank/test_sequence_parallel.py",
    "engine/adapters.py": "engine/rank/test_adapter_folders.py",
    "engine/rank/load/adapter_tensors.py": "engine/rank/test_adapter_folders.py engine/rank/test_adapters.py",
    "engine/rank/adapter_stacks.py": "engine/rank/test_adapters.py",
    "kernels/lora.py": "kernels/test_lora.py",
    "engine/quantisation.py": "engine/test_config_keys.py engine/rank/test_quantised_folders.py engine/rank/test_public_folders.py",
    "engine/weight_formats.py": "engine/rank/test_weight_formats.py engine/rank/test_quantised_folders.py",
    "engine/rank/int4.py": "engine/rank/test_int4.py engine/rank/test_formats.py",
    "engine/rank/fp8.py": "engine/rank/test_fp8.py engine/rank/test_quantised_folders.py",
    "engine/rank/int8.py": "engine/rank/test_int8.py",
}  # fmt: skip

# id of a fault that no test can notice -> why
EXPLAINED: dict[str, str] = {
    "engine/core/scheduler.py:Scheduler._admit:constant:1":
        "Only a sequence that was preempted in the same step has no share. A token of it at once is as right.",
    "engine/rank/int4.py:Int4Weight.loaded:constant:3":
        "Blocks bound the memory of a copy. Blocks of two rows give the same words.",
    "deploy/edge/media/audio_features.py:raw_rows:constant:2":
        "numpy reads any negative number of a shape as -1.",
    "deploy/edge/guards/uploads.py:Uploads.__init__:constant:1":
        "What was freed is counted anew when the line forms, before it is read.",
    "kernels/sequence_parallel.py:SequenceParallel._send:dropped:1":
        "It orders two streams of a GPU. The CPU has none.",
}

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add}


def faults(file: str, text: str) -> list[Fault]:
    """All faults of a file, in the order of their functions. Nothing outside of functions is changed."""
    lines = text.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = []
    seen: Counter[str] = Counter()
    for name, node in _bodies(ast.parse(text)):
        for operator, changed, new in _changes(node):
            begin = starts[changed.lineno - 1] + changed.col_offset
            end = starts[changed.end_lineno - 1] + changed.end_col_offset
            place = f"{file}:{name}:{operator}"
            seen[place] += 1
            old = text.encode()[begin:end].decode()
            found.append(Fault(f"{place}:{seen[place]}", file, old, new, TARGETS[file], begin))
    return found


def drawn(root: Path, count: int, seed: int = SEED) -> list[Fault]:
    """So many faults, from the targets in turn; seed and id decide which of a file comes first."""

    def rank(fault: Fault) -> bytes:
        return hashlib.sha256(f"{seed} {fault.id}".encode()).digest()

    columns = []
    for file in TARGETS:
        of_file = [fault for fault in faults(file, (root / file).read_text()) if fault.id not in EXPLAINED]
        columns.append(sorted(of_file, key=rank))
    rows = itertools.zip_longest(*columns)
    return list(itertools.islice((fault for row in rows for fault in row if fault), count))


def _bodies(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """(qualified name, function) of all that are no functions inside of others."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _bodies(node, f"{prefix}{node.name}.")


def _changes(function: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """(operator, the node that is replaced, its new source) of each change to a function's statements. Messages, annotations and
    asserts are left alone."""
    for statement in getattr(function, "body", []):
        for node in _walked(statement):
            yield from _of_node(node)


def _walked(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.arg):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walked(child)


def _of_node(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        changed = ast.Compare(node.left, [_COMPARISONS[type(node.ops[0])]()], node.comparators)
        yield "comparison", node, f"({ast.unparse(changed)})"
    elif isinstance(node, ast.BoolOp):
        other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield "boolean", node, f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield "arithmetic", node, f"({ast.unparse(ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right))})"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "constant", node, repr(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield "branch", node, f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})"
    elif isinstance(node, ast.If):
        yield "branch", node.test, f"not ({ast.unparse(node.test)})"
    elif _can_drop(node):
        assert isinstance(node, ast.stmt)
        yield "dropped", node, "pass"


def _can_drop(node: ast.AST) -> bool:
    """A call for its effect, or a change of what has a value already; no docstring, and no name's first value."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.AugAssign)
