"""Events derived from the engine's: verdicts on objectives, phases of a request, step time."""

from engine.events import EngineLoad, Event, EventRecord, FirstToken, RequestFinished

_COMPLETED = ("stop", "length")
_OURS = ("error", "dead", "deadline")  # ends without a token that count against the objective at once


class Judged(EventRecord):
    """verdict: good if a request met an objective, else bad."""

    slo: str
    verdict: str


class Completed(EventRecord):
    e2e_s: float
    decode_s: float
    inference_s: float | None


class MeanStep(EventRecord):
    """The mean step between two reports of a core with constant work."""

    seconds: float
    tokens: float


Derived = Judged | Completed | MeanStep


class Derivation:
    """`last` is the core's last report. Objectives in seconds."""

    def __init__(self, ttft_objective_s: float, tpot_objective_s: float) -> None:
        self._objectives = {"ttft": ttft_objective_s, "tpot": tpot_objective_s}
        self.last: EngineLoad | None = None

    def __call__(self, event: Event) -> list[Derived]:
        if isinstance(event, FirstToken):
            return [self._judged("ttft", event.ttft_s)]
        if isinstance(event, RequestFinished):
            return self._finished(event)
        if isinstance(event, EngineLoad):
            return self._steps(event)
        return []

    def _judged(self, slo: str, seconds: float) -> Judged:
        return Judged(slo, "good" if seconds <= self._objectives[slo] else "bad")

    def _finished(self, event: RequestFinished) -> list[Derived]:
        derived: list[Derived] = [] if event.tpot_s is None else [self._judged("tpot", event.tpot_s)]
        if event.ttft_s is None:  # a user who never saw a token: our failure, or longer than promised, or not judged
            late = event.e2e_s > self._objectives["ttft"] and event.outcome != "refused"
            if late or event.outcome in _OURS:
                return [Judged("ttft", "bad")]
            return []
        if event.outcome in _COMPLETED:
            decode_s = (event.tpot_s or 0.0) * (event.output_tokens - 1)
            inference_s = None if event.queue_s is None else event.ttft_s - event.queue_s + decode_s
            derived.append(Completed(event.e2e_s, decode_s, inference_s))
        return derived

    def _steps(self, event: EngineLoad) -> list[Derived]:
        last = self.last
        self.last = event
        if last is None or event.interval_s is None or (steps := event.load.step - last.load.step) == 0:
            return []
        before = last.load
        load = event.load
        tokens = load.prefill_tokens + load.decode_tokens - before.prefill_tokens - before.decode_tokens
        return [MeanStep(event.interval_s / steps, tokens / steps)]
