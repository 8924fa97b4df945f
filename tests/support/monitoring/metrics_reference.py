"""The reference of metrics, from their table: `python -m tests.support.monitoring.metrics_reference` writes METRICS.md."""

import re
from collections.abc import Iterable

from dashboards.aliases import CACHE_CONFIG, LORA, PREFIX, SUCCESS
from dashboards.metrics import CAUSES, DISCOVERY_METRICS, ENGINE, LABEL_VALUES, TARGET_LABELS, Metric
from tests.support.repo_rules import ROOT

PATH = ROOT / "dashboards" / "METRICS.md"

_HEAD = f"""# Metrics

Generated from `dashboards/metrics.py` by `python -m tests.support.monitoring.metrics_reference`; do not edit.

Every replica has an exporter. Prometheus finds them all at the discovery endpoint (`http_sd`, path `/targets`), which also puts
these labels on every series of a replica: {", ".join(f"`{label}`" for label in TARGET_LABELS)}. The endpoint's own figures are at
`/metrics` of the same port. Counters start at zero with their replica. A clock point is a moment in the replica
(`engine/events.py`): *submitted*, *scheduled*, *first* and *last* token, *ended*.

| label | values |
|---|---|
| `outcome` | {", ".join(LABEL_VALUES["outcome"])} |
| `slo`, `verdict` of objectives | {", ".join(LABEL_VALUES["slo"])}; {", ".join(LABEL_VALUES["verdict"])} |
| `group` of KV pages | sliding, full |
| `rank` | 0 to tp - 1, and core |
| `cause` of restarts | {", ".join(CAUSES)} |
"""

_ALIASES = f"""
## vLLM's names

Read off the same samples at each scrape, with vLLM's labels `model_name` and `engine="0"`.
Histograms have our buckets, which contain every bound of vLLM's. `{SUCCESS}_total` sums our outcomes by `finished_reason`:
client_gone, deadline, slow_reader and queue_timeout are `abort`; error, sibling_failed and dead are `error`; refused requests are
not in it. vLLM counts prompt tokens as they are prefilled, we at submission; its iteration is our step. Its inter-token latency is
the gap between two outputs, with drafts too; ours is divided by the tokens of the later one.

| alias | shows |
|---|---|
"""


def reference() -> str:
    """The whole page."""
    shown = [(PREFIX + row.alias, row.name) for row in ENGINE if row.alias]
    shown += [(f"{SUCCESS}_total", "quartet_requests_total"), (CACHE_CONFIG, "quartet_kv_pages")]
    shown.append((LORA, "quartet_adapter_requests"))
    aliases = _ALIASES + "".join(f"| `{alias}` | `{name}` |\n" for alias, name in shown)
    parts = [_HEAD, _section("A replica", ENGINE), _section("The discovery endpoint", DISCOVERY_METRICS), aliases, _buckets(ENGINE)]
    return "".join(parts)


def documented_aliases() -> set[str]:
    """Every name of vLLM's that the committed page promises."""
    return set(re.findall(r"^\| `(vllm:\w+)` \|", PATH.read_text(), re.MULTILINE))


def lacking_aliases(names: set[str]) -> set[str]:
    """Which of them no series in `names` has; a histogram has its buckets."""
    return {name for name in documented_aliases() if not {name, f"{name}_bucket"} & names}


def _section(title: str, rows: Iterable[Metric]) -> str:
    head = f"\n## {title}\n\n| metric | kind | labels | what it says |\n|---|---|---|---|\n"
    return head + "".join(_line(row) for row in rows)


def _line(row: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in row.labels)
    return f"| `{row.name}` | {row.kind} | {labels} | {row.help} |\n"


def _buckets(rows: Iterable[Metric]) -> str:
    head = "\n## Buckets\n\n| histogram | upper bounds, +Inf besides |\n|---|---|\n"
    return head + "".join(f"| `{row.name}` | {' '.join(f'{bound:g}' for bound in row.buckets)} |\n" for row in rows if row.buckets)


def main() -> None:
    """The command."""
    PATH.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
