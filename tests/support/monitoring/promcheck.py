"""Reads PromQL as Prometheus would and holds it against the table of metrics: names, suffixes, labels, what a rate may be of.

`complaints` takes text, so that a test can hand it a planted fault.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import promql_parser as promql

from tests.support.monitoring.tables import LABELS, METRIC_OF_NAME, RECORDED_LABELS

SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
MOVING = frozenset({"rate", "increase"})


@dataclass(frozen=True)
class Wire:
    """One series name on the wire: the labels its series carry, whether it only ever grows, and the bounds of its buckets."""

    labels: frozenset[str]
    grows: bool
    bounds: frozenset[float] = frozenset()


def wires() -> dict[str, Wire]:
    """Every name that a query may say: the tables', with their suffixes, and the recorded ones."""
    known = {
        f"{name}{suffix}": Wire(
            LABELS[name] | ({"le"} if suffix == "_bucket" else set()), row.kind != "gauge", frozenset({*row.buckets, float("inf")})
        )
        for name, row in METRIC_OF_NAME.items()
        for suffix in SUFFIXES[row.kind]
    }
    return known | {name: Wire(frozenset(labels), grows=False) for name, labels in RECORDED_LABELS.items()}


def complaints(expr: str, legend: str = "", known: Mapping[str, Wire] | None = None) -> list[str]:
    """What is wrong with `expr`, and with a legend that names labels which its answer does not have."""
    reader = _Reader(wires() if known is None else known)
    carried = reader.labels(promql.parse(expr))
    named = re.findall(r"{{(\w+)}}", legend)
    return reader.problems + [f"the legend names {label!r}, which the answer lacks" for label in named if label not in carried]


def names(expr: str) -> set[str]:
    """The series that `expr` asks for."""
    return {str(selector.name) for selector in _selectors(promql.parse(expr))}


def _selectors(node: object) -> Iterator[promql.VectorSelector]:
    if isinstance(node, promql.VectorSelector):
        yield node
    children = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector")]
    for child in [*children, *getattr(node, "args", ())]:
        if child is not None:
            yield from _selectors(child)


class _Reader:
    """Walks an expression; `labels` gives the labels of its answer, and what is wrong gathers in `found`."""

    def __init__(self, known: Mapping[str, Wire]) -> None:
        self._known = known
        self.problems: list[str] = []

    def labels(self, node: object) -> frozenset[str]:
        match node:
            case promql.VectorSelector():
                return self._selector(node)
            case promql.MatrixSelector():
                return self._selector(node.vector_selector)
            case promql.AggregateExpr():
                return self._aggregate(node)
            case promql.Call():
                return self._call(node)
            case promql.BinaryExpr():
                return self._binary(node)
            case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
                return self.labels(node.expr)
        return frozenset()

    def _selector(self, node: promql.VectorSelector) -> frozenset[str]:
        wire = self._known.get(str(node.name))
        if wire is None:
            self.problems.append(f"nothing is called {node.name}")
            return frozenset()
        for matcher in node.matchers.matchers:
            if matcher.name not in wire.labels:
                self.problems.append(f"{node.name} has no label {matcher.name!r}")
            elif matcher.name == "le" and float(matcher.value) not in wire.bounds:
                self.problems.append(f"{node.name} has no bucket {matcher.value}")
        return wire.labels

    def _aggregate(self, node: promql.AggregateExpr) -> frozenset[str]:
        inside = self.labels(node.expr)
        by = frozenset(node.modifier.labels) if node.modifier else frozenset()
        self.problems += [f"{node.prettify()}: no label {label!r} to fold by" for label in sorted(by - inside)]
        return by

    def _call(self, node: promql.Call) -> frozenset[str]:
        inside = [self.labels(argument) for argument in node.args]
        if node.func.name in MOVING:
            name = node.args[0].vector_selector.name
            if name in self._known and not self._known[name].grows:
                self.problems.append(f"{node.func.name} of {name}, which is a gauge")
        if node.func.name == "histogram_quantile" and "le" not in inside[1]:
            self.problems.append("a quantile of something without le")
        return frozenset().union(*inside) - ({"le"} if node.func.name == "histogram_quantile" else set())

    def _binary(self, node: promql.BinaryExpr) -> frozenset[str]:
        left, right = self.labels(node.lhs), self.labels(node.rhs)
        matching = getattr(node.modifier, "matching", None) if node.modifier else None
        if matching is None:
            return left or right
        on = frozenset(matching.labels)
        self.problems += [f"{node.prettify()}: one side lacks {label!r}" for label in sorted(on - (left & right))]
        return on
