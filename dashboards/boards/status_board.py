"""The Status board: what lives, what hangs, and whether the figures themselves can be believed."""

from dashboards.alerts import recorded
from dashboards.boards.panels import Board, Panel, Query, Row, good_above, good_below
from dashboards.promql import BOARD, DISCOVERY_JOB, JOB

UP = ((0, "down", "red"), (1, "up", "green"))
RANK = "{{replica}} rank {{rank}}"
RANKS = "~[0-9]+"  # not the core
HOUR = BOARD.over("1h")

OVERVIEW_ROW = Row(
    "At a glance",
    (
        Panel(
            "Groups alive",
            "Replicas registered, with a recent heartbeat.",
            "short",
            (Query(BOARD.total("quartet_groups"), "groups"),),
            "stat",
            4,
            good_above(0.5, 1),
        ),
        Panel(
            "Groups silent",
            "Registered once, now silent or gone; kept for ten minutes. Drained ones count too.",
            "short",
            (Query(f"count ({BOARD.level('quartet_group_up')} == 0) or vector(0)", "silent"),),
            "stat",
            4,
            good_below(1, 2),
        ),
        Panel(
            "Targets unreachable",
            "Listed by discovery, and do not answer scrapes.",
            "short",
            (Query(f"count ({BOARD.level('up', job=f'~{JOB}|{DISCOVERY_JOB}')} == 0) or vector(0)", "unreachable"),),
            "stat",
            4,
            good_below(1, 1),
        ),
        Panel(
            "Processes alive", "Ranks and cores that live.", "short", (Query(BOARD.total("quartet_rank_up"), "alive"),), "stat", 4
        ),
        Panel(
            "Longest stall",
            'Longest time a process has owed a step. The group is ended at quartet_engine_bound_seconds{bound="step"}.',
            "s",
            (Query(BOARD.total("quartet_rank_stall_seconds", fold="max"), "stall"),),
            "stat",
            4,
            good_below(1, 5),
        ),
        Panel(
            "Alerts firing",
            "All severities.",
            "short",
            (Query(f"count ({BOARD.level('ALERTS', alertstate='firing')}) or vector(0)", "firing"),),
            "stat",
            4,
            good_below(1, 1),
        ),
    ),
)

LIFECYCLE_ROW = Row(
    "Groups",
    (
        Panel(
            "Groups over time",
            "As the discovery endpoint sees them: a dead group is a red bar, not a hole.",
            "short",
            (Query(BOARD.total("quartet_group_up", ("replica",), "max"), "{{replica}}"),),
            "timeline",
            names=UP,
        ),
        Panel(
            "Engines over time",
            "As each replica sees its own group.",
            "short",
            (Query(BOARD.total("quartet_engine_up", ("replica",), "min"), "{{replica}}"),),
            "timeline",
            names=UP,
        ),
        Panel(
            "Ended unasked, 1 h",
            "Groups by cause of their end.",
            "short",
            (Query(HOUR.increase("quartet_group_restarts_total", ("cause",)), "{{cause}}"),),
            "stack",
        ),
        Panel(
            "Age",
            "Since each replica's exporter opened: a saw-tooth is a restart loop.",
            "s",
            (Query(f"time() - {BOARD.total('quartet_engine_start_time_seconds', ('replica',), 'max')}", "{{replica}}"),),
        ),
        Panel(
            "Boot time",
            "From spawn to ready: what scaling up from zero costs a user.",
            "s",
            (Query(BOARD.total("quartet_engine_boot_seconds", ("replica",), "max"), "{{replica}}"),),
        ),
        Panel(
            "Left in order, 1 h",
            "Replicas that drained.",
            "short",
            (Query(HOUR.increase("quartet_groups_drained_total", ("deployment",)), "{{deployment}}"),),
        ),
    ),
)


def _by_rank(title: str, name: str, unit: str, about: str) -> Panel:
    return Panel(title, about, unit, (Query(BOARD.total(name, ("replica", "rank"), "max"), RANK),))


RANK_ROW = Row(
    "Ranks",
    (
        Panel(
            "Processes over time",
            "Each rank and core.",
            "short",
            (Query(BOARD.total("quartet_rank_up", ("replica", "rank"), "min"), RANK),),
            "timeline",
            names=UP,
        ),
        _by_rank(
            "Stall",
            "quartet_rank_stall_seconds",
            "s",
            "How long each process has owed a step: a hung rank shows here before its group is"
            " ended. One line alone: that GPU; all together: a collective.",
        ),
        _by_rank(
            "Heartbeat age",
            "quartet_rank_heartbeat_age_seconds",
            "s",
            "Since each process was last scheduled: a stopped one grows.",
        ),
        _by_rank(
            "Progress age", "quartet_rank_progress_age_seconds", "s", "Since a step was launched or finished; grows while idle."
        ),
        _by_rank("Step time by rank", "quartet_rank_step_seconds", "s", "The last step's wall time on each rank."),
        Panel(
            "Skew",
            "Slowest over fastest rank of a group, last step. Above 1.2 for long: a throttled GPU.",
            "short",
            (
                Query(
                    f"{BOARD.total('quartet_rank_step_seconds', ('replica',), 'max', rank=RANKS)}"
                    f" / ({BOARD.total('quartet_rank_step_seconds', ('replica',), 'min', rank=RANKS)} > 0)",
                    "{{replica}}",
                ),
            ),
        ),
        Panel(
            "Steps",
            "Steps each rank finishes a second: ranks of one group must agree.",
            "short",
            (Query(BOARD.rate("quartet_rank_steps_total", ("replica", "rank")), RANK),),
        ),
        _by_rank("GPU time of a step", "quartet_rank_device_busy_seconds", "s", "Of the last step, by CUDA events."),
        _by_rank(
            "GPU idle between steps",
            "quartet_rank_device_idle_seconds",
            "s",
            "Before the last step with decode rows. Above 20 us for long: the host or the core is late.",
        ),
        Panel(
            "Late compilations",
            "Kernels compiled while serving, in all: each stalled a step by up to seconds. Zero, or a shape was not warmed.",
            "short",
            (Query(BOARD.count("quartet_rank_late_compilations_total", ("replica", "rank")), RANK),),
        ),
        _by_rank("Memory", "quartet_rank_memory_bytes", "bytes", "As reported at the last change of phase."),
    ),
)

_CORE_GOT = BOARD.count("quartet_core_requests_received_total", ("replica",))
_CORE_OPEN = f"{_CORE_GOT} - {BOARD.count('quartet_core_requests_total', ('replica',))}"

ACCOUNTING_ROW = Row(
    "Can the figures be believed",
    (
        Panel(
            "Requests unaccounted for",
            "Received minus ended minus open, by replica: zero, or a defect of ours.",
            "short",
            (Query(recorded("quartet:requests_unaccounted", BOARD), "{{replica}}"),),
        ),
        Panel(
            "Open, twice counted",
            "Open requests as counted by the replica and by the core: they agree but for what is on its way.",
            "short",
            (
                Query(BOARD.total("quartet_requests_in_flight", ("replica",)), "{{replica}} front"),
                Query(_CORE_OPEN, "{{replica}} core"),
            ),
        ),
        Panel(
            "Scrape time",
            "What a scrape of each replica takes.",
            "s",
            (Query(BOARD.total("scrape_duration_seconds", ("replica",), "max", job=JOB), "{{replica}}"),),
        ),
        Panel(
            "Samples a scrape",
            "Series of each replica.",
            "short",
            (Query(BOARD.total("scrape_samples_scraped", ("replica",), "max", job=JOB), "{{replica}}"),),
        ),
        Panel(
            "Discovery failures",
            "Refreshes of the list of groups that failed, a second. Prometheus keeps the last list meanwhile.",
            "short",
            (Query(BOARD.rate("prometheus_sd_http_failures_total"), "failures"),),
        ),
        Panel(
            "Requests of dead groups",
            "Ended requests of the replicas that are gone, by how: their counters outlive them.",
            "short",
            (Query(BOARD.count("quartet_retired_requests_total", ("outcome",)), "{{outcome}}"),),
            "stack",
        ),
    ),
)

BOARD_STATUS = Board(
    "quartet-status",
    "Quartet / Status",
    "What runs, what hangs, and whether the figures can be believed.",
    (OVERVIEW_ROW, LIFECYCLE_ROW, RANK_ROW, ACCOUNTING_ROW),
)
