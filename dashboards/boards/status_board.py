"""The Status board: what lives, what hangs, and whether the figures themselves can be believed."""

from dashboards.alerts import recorded
from dashboards.boards.panels import Board, Panel, Query, Row
from dashboards.promql import BOARD, DISCOVERY_JOB, JOB

UP = ((0, "down", "red"), (1, "up", "green"))
BY_RANK = ("replica", "rank")
RANK = "{{replica}} rank {{rank}}"

GROUP_ROW = Row(
    "Groups",
    (
        Panel(
            "Groups over time",
            "As the discovery endpoint sees each replica, and as the replica sees its engine: a dead one is a red bar, not a hole.",
            "short",
            (
                Query(BOARD.total("quartet_group_up", ("replica",), "max"), "{{replica}}"),
                Query(BOARD.total("quartet_engine_up", ("replica",), "min"), "{{replica}} engine"),
            ),
            "timeline",
            names=UP,
        ),
        Panel(
            "Ended unasked, 1 h",
            "Groups by cause of their end.",
            "short",
            (Query(BOARD.over("1h").increase("quartet_group_restarts_total", ("cause",)), "{{cause}}"),),
            "stack",
        ),
        Panel(
            "Scrapes that fail",
            "Targets that are listed and do not answer; failed refreshes of the list, a second: Prometheus keeps the last one.",
            "short",
            (
                Query(f"count ({BOARD.level('up', job=f'~{JOB}|{DISCOVERY_JOB}')} == 0) or vector(0)", "targets"),
                Query(BOARD.rate("prometheus_sd_http_failures_total"), "refreshes"),
            ),
        ),
    ),
)


def _by_rank(title: str, name: str, about: str) -> Panel:
    return Panel(title, about, "s", (Query(BOARD.total(name, BY_RANK, "max"), RANK),))


RANK_ROW = Row(
    "Ranks",
    (
        Panel(
            "Processes over time",
            "Each rank and core.",
            "short",
            (Query(BOARD.total("quartet_rank_up", BY_RANK, "min"), RANK),),
            "timeline",
            names=UP,
        ),
        _by_rank(
            "Stall",
            "quartet_rank_stall_seconds",
            "How long each process has owed a step; at quartet_engine_step_bound_seconds its group is ended. One line alone:"
            " that GPU; all together: a collective.",
        ),
        _by_rank(
            "Step time by rank",
            "quartet_rank_step_seconds",
            "The last step's wall time on each rank. One above the others for long: a throttled GPU.",
        ),
        Panel(
            "GPU of a step",
            "How long the last step kept the GPU busy, and how long it stood idle before (of steps with decode rows). Idle above"
            " 20 us for long: the host or the core is late.",
            "s",
            (
                Query(BOARD.total("quartet_rank_device_busy_seconds", BY_RANK, "max"), f"{RANK} busy"),
                Query(BOARD.total("quartet_rank_device_idle_seconds", BY_RANK, "max"), f"{RANK} idle"),
            ),
        ),
        Panel(
            "Late compilations",
            "Kernels compiled while serving, in all: each stalled a step by up to seconds. Zero, or a shape was not warmed.",
            "short",
            (Query(BOARD.count("quartet_rank_late_compilations_total", BY_RANK), RANK),),
        ),
        Panel(
            "Requests unaccounted for",
            "Received minus ended minus open, by replica: zero, or a defect of ours.",
            "short",
            (Query(recorded("quartet:requests_unaccounted", BOARD), "{{replica}}"),),
        ),
    ),
)

BOARD_STATUS = Board(
    "quartet-status",
    "Quartet / Status",
    "What runs, what hangs, and whether the figures can be believed.",
    (GROUP_ROW, RANK_ROW),
)
