"""Every error that Quartet raises on purpose.

    QuartetError
    |-- InvalidRequest      the client's fault: bad value, unknown parameter, prompt that cannot fit      -> HTTP 400
    |   `-- ModelNotFound   a model name that this deployment does not serve                               -> HTTP 404
    |-- Overloaded          refused before any work was done; try again later                              -> HTTP 429
    |-- EngineDead          the group ended (a process died, hung or raised); a new one is on its way      -> HTTP 503
    |-- SlowReader          the client took its answer too slowly, and too much of it was waiting          -> HTTP 408
    |-- GenerationFailed    one request ended in error (NaN logits, an unreadable message)                 -> HTTP 500
    |-- ConfigError         a setting, a YAML key or the node cannot be used as asked; names the key
    |   `-- CheckpointError a checkpoint is absent, incomplete or mis-shaped; names the tensor or the file
    `-- PageViolation       a page table or a plan is wrong (debug_pages); names slot, group and entry

`deploy/edge/http_errors.py` alone decides status codes.
"""


class QuartetError(Exception):
    """The message is fit for a user."""


class InvalidRequest(QuartetError):
    """A request that can never succeed as sent. `param`: the wrong field; `code`: OpenAI's short
    code."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelNotFound(InvalidRequest):
    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model}` does not exist.", param="model", code="model_not_found")


class Overloaded(QuartetError):
    """`retry_after_s` is the client's advice."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDead(QuartetError):
    """The message says which process ended the group and how."""


class SlowReader(QuartetError):
    pass


class GenerationFailed(QuartetError):
    """Only this request ended in error."""


class ConfigError(QuartetError):
    pass


class CheckpointError(ConfigError):
    pass


class PageViolation(QuartetError):
    """A sequence would read or write another's page: a bug of ours, which ends the group."""
