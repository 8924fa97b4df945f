"""Writes the golden plan stream: `python -m tests.golden.record`. Run it only where what a model answers is meant to change.

One rank in fp32 on the CPU serves the requests of `tests.support.engine.recording` with the trained nano 31b. The file
(`tests.support.engine.plan_stream`) holds every plan, and of every result row the token and the reported logprobs.
"""

from pathlib import Path

from deploy.models.resolve import resolve
from engine.plan import StepPlan, StepResult
from tests.support.engine.plan_stream import PlanStream, read_stream, write_stream
from tests.support.engine.recording import PAGES, SETTINGS, record

PATH = Path(__file__).with_name("nano-31b.json.gz")
MODEL = "nano:31b"


def load() -> tuple[list[StepPlan], list[StepResult]]:
    """The committed stream and what it gave."""
    stream = read_stream(PATH)
    return stream.plans, stream.results


def main() -> None:
    """Record and write."""
    recording = record(resolve(MODEL), grammars=False)
    write_stream(PlanStream(MODEL, SETTINGS, PAGES, recording.plans, recording.results, recording.masks), PATH)
    print(f"{len(recording.plans)} steps, {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
