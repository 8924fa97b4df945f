"""A config held against Ray Serve's own schema, strictly: Serve drops a key that it does not know without a word."""

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from deploy.scaling import POLICY, Scaling
from engine.errors import ConfigError


def check_schema(config: dict[str, Any], source: str) -> None:
    """Raises ConfigError that names the keys that Serve itself would refuse or ignore, or its controller stumble over."""
    place = ""
    try:
        ServeDeploySchema.model_validate(config)
        place = "autoscaling_config."  # for which Serve's schema takes any mapping
        for options in (options for app in config["applications"] for options in app.get("deployments") or ()):
            scaling = options.get("autoscaling_config") or {}
            AutoscalingConfig.model_validate(scaling)
            policy = scaling.get("policy") or {}
            if policy.get("policy_function") == POLICY:
                Scaling(**(policy.get("policy_kwargs") or {}))
    except ValidationError as error:
        details = error.errors(include_url=False)
        errors = (f"{place}{'.'.join(map(str, detail['loc'])) or 'all'}: {detail['msg']}" for detail in details)
        raise ConfigError(f"{source}: {'; '.join(errors)}") from error
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"{source}: autoscaling_config.policy: {error}") from error
    if unknown := list(unknown_keys(ServeDeploySchema, config, "")):
        raise ConfigError(f"{source}: {'; '.join(f'{key}: unknown key, which Serve would ignore' for key in unknown)}")


def unknown_keys(schema: type[BaseModel], value: Any, path: str) -> Iterator[str]:
    """Yields dotted paths in `value` that `schema` and the models inside it have no field for: Serve drops them without a word."""
    if not isinstance(value, dict) or schema.model_config.get("extra") == "allow":
        return
    for key, inner in value.items():
        field = schema.model_fields.get(key)
        here = f"{path}{key}"
        if field is None:
            yield here
            continue
        for model in _models(field.annotation):
            for index, entry in enumerate(inner) if isinstance(inner, list) else [(None, inner)]:
                yield from unknown_keys(model, entry, f"{here}." if index is None else f"{here}.{index}.")


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Returns the one model that an annotation holds, as itself, optional or in a list; none where it holds several or others."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    models = [model for inner in get_args(annotation) for model in _models(inner)]
    return models if len(models) == 1 and get_origin(annotation) is not dict else []
