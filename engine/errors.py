"""Every error that Quartet raises on purpose, and its status. Only `deploy/edge/http/http_errors.py` decides status codes.

    QuartetError
    |-- InvalidRequest      400
    |   `-- ModelNotFound   404
    |-- Overloaded          429
    |-- EngineDead          503
    |-- SlowReader          408
    |-- GenerationFailed    500
    |-- ConfigError
    |   `-- CheckpointError
    `-- PageViolation
"""


class QuartetError(Exception):
    """The message is fit for a user."""


class InvalidRequest(QuartetError):
    """It can never succeed as sent. `param`: the wrong field; `code`: OpenAI's."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelNotFound(InvalidRequest):
    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model}` does not exist.", param="model", code="model_not_found")


class Overloaded(QuartetError):
    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDead(QuartetError):
    """The message says which process ended the group and how."""


class SlowReader(QuartetError):
    pass


class GenerationFailed(QuartetError):
    """Only this request ended."""


class ConfigError(QuartetError):
    pass


class CheckpointError(ConfigError):
    pass


class PageViolation(QuartetError):
    """A sequence would read or write another's page: a bug of ours, which ends the group."""
