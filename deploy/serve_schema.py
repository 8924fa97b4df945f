"""Checks a config strictly against Ray Serve's schema, which drops unknown keys silently."""

from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import ServeDeploySchema

from deploy.scaling import POLICY, Scaling
from deploy.settings import LONGEST_S, ServeConfig, deployments
from engine.errors import ConfigError


def check_schema(config: ServeConfig, source: str) -> None:
    """ConfigError names keys that Serve refuses or ignores, or that break its controller."""
    prefix = ""
    try:
        http = ServeDeploySchema.model_validate(config, extra="forbid").http_options
        for name, least, most in (("port", 1, 65535), ("keep_alive_timeout_s", 0, LONGEST_S), ("request_timeout_s", 0, LONGEST_S)):
            if not least <= (value := getattr(http, name) or 0) <= most:
                raise ConfigError(f"{source}: http_options.{name}: {value} is not from {least} to {most}")
        for path, options in deployments(config):
            prefix = f"{path}.autoscaling_config."  # for which Serve's schema takes any mapping
            scaling = options.get("autoscaling_config") or {}
            AutoscalingConfig.model_validate(scaling, extra="forbid")
            policy = scaling.get("policy") or {}
            if unknown := policy.keys() - AutoscalingPolicy.model_fields.keys():  # whose own __init__ ignores them
                raise ValueError(f"{min(unknown)}: unknown key, which Serve would ignore")
            if policy.get("policy_function") == POLICY:
                Scaling(**(policy.get("policy_kwargs") or {}))
    except ValidationError as error:
        errors = []
        for detail in error.errors(include_url=False):
            if detail["type"] == "extra_forbidden":
                complaint = "unknown key, which Serve would ignore"
            else:
                complaint = detail["msg"]
            errors.append(f"{prefix}{'.'.join(map(str, detail['loc'])) or 'all'}: {complaint}")
        raise ConfigError(f"{source}: {'; '.join(errors)}") from error
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"{source}: autoscaling_config.policy: {error}") from error
