"""A profile as a trace that chrome://tracing and Perfetto show: products in one row, what may hide behind them in another."""

from typing import Any

from engine.rank.profiling.step_nodes import StepNode, StepProfile

_PRODUCTS, _OTHERS = 1, 2


def chrome_trace(profile: StepProfile) -> dict[str, Any]:
    """The JSON document; times in microseconds from the step's start."""
    title = f"decode step, batch {profile.batch}, context {profile.context}"
    names = [("process_name", 0, title), ("thread_name", _PRODUCTS, "products"), ("thread_name", _OTHERS, "other nodes")]
    about = [{"ph": "M", "pid": 0, "tid": row, "name": kind, "args": {"name": name}} for kind, row, name in names]
    return {"traceEvents": [*about, *(_event(profile, node) for node in profile.nodes)], "displayTimeUnit": "ns"}


def _event(profile: StepProfile, node: StepNode) -> dict[str, Any]:
    args = {
        "kernels": " ".join(node.kernels), "bytes": node.bytes, "floor_us": round(profile.floor_us(node), 3),
        "us": round(node.us, 3), "alone_us": round(node.alone_us, 3),
    }  # fmt: skip
    return {
        "ph": "X", "pid": 0, "tid": _PRODUCTS if node.weights else _OTHERS,
        "name": node.name if node.layer is None else f"{node.layer} {node.name}",
        "ts": round(node.start_us, 3), "dur": round(node.end_us - node.start_us, 3), "args": args,
    }  # fmt: skip
