"""Writes the boards: `python -m dashboards.boards [FOLDER]`; the committed ones lie in `dashboards/`."""

import sys
from pathlib import Path

from dashboards.boards.latency_board import BOARD_LATENCY
from dashboards.boards.operator_board import BOARD_OPERATOR
from dashboards.boards.render import document
from dashboards.boards.status_board import BOARD_STATUS

BOARDS = (BOARD_OPERATOR, BOARD_LATENCY, BOARD_STATUS)
FOLDER = Path(__file__).parents[1]


def write(folder: Path) -> None:
    """One file a board, named by its uid."""
    for board in BOARDS:
        (folder / f"{board.uid}.json").write_text(document(board))


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
