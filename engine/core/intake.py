"""The one way by which a request enters the core."""

from engine.core.masks import Masks
from engine.core.requests import Requests
from engine.protocol import GenerateRequest


class Intake:
    """Queues new requests, and has masks made for those that need them."""

    def __init__(self, requests: Requests, masks: Masks) -> None:
        self._requests = requests
        self._masks = masks

    def add(self, request: GenerateRequest) -> None:
        """Queue a request, or refuse it if it can never run here."""
        params = request.params
        needs_masks = params.grammar is not None or params.thought is not None
        if needs_masks and not self._masks.available:
            self._requests.refuse(request.id, "grammars are not available: the checkpoint has no tokenizer to make them for")
            return
        sequence = self._requests.add(request)
        if sequence is not None:
            self._masks.add(sequence)
