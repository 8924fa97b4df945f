"""`python -m tests.support.stack.redeploy GCS CONFIG`: what `serve deploy CONFIG` does, at a cluster whose dashboard does not run.

Returns once Serve's controller has the config. Ray's environment must be the cluster's.
"""

import sys
from pathlib import Path

import ray
import yaml
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema


def main() -> None:
    """Hand it over."""
    address, config = sys.argv[1:]
    ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="error")
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(yaml.safe_load(Path(config).read_text())))


if __name__ == "__main__":
    main()
