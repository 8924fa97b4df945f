"""Whether a Prometheus answers every query of every board and rule."""

from tests.support.monitoring.committed import paths, read
from tests.support.monitoring.promcheck import names
from tests.support.monitoring.prometheus import Api, finite
from tests.support.monitoring.tables import ALERTS, RECORDS

PICTURES = "quartet_encoder_cache_queried"  # a share of those that were asked for: no answer where nobody sends any


def silent(api: Api, window: str, at: float) -> list[str]:
    """Every panel query, recording and alert input without a finite answer at `at` (unix time)."""
    unanswered = []
    for page in (read(path, window) for path in paths()):
        asked = [(f"{page.uid}: {panel.title}", query.expr) for panel in page.panels for query in panel.asked]
        asked = [(where, expr) for where, expr in asked if PICTURES not in expr]
        unanswered += [f"{where}: {expr}" for where, expr in asked if not finite(api.ask(expr, at))]
    unanswered += [f"records {record.name}" for record in RECORDS if not finite(api.ask(record.name, at))]
    needed = {name for alert in ALERTS for name in names(alert.expr)}
    unanswered += [f"alerts need {name}" for name in sorted(needed) if not finite(api.ask(name, at))]
    return unanswered + [f"{rule['name']}: {rule['lastError']}" for rule in api.rules() if rule["health"] != "ok"]
