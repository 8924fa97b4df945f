"""The Serve application with a rank that needs no model: it makes one token a row in each step, each taking PACE_VARIABLE seconds.

Front, core, Serve and HAProxy are the real ones: what they cost can be measured at the rate of a GPU. paced_cli starts it.
"""

import os
from functools import partial
from typing import Any

import msgspec
from ray import serve
from ray.serve import Application

from cluster.group import Group
from deploy import app
from deploy.settings import DEPLOYMENT, Settings
from tests.support.engine.fake_child import Behaviour, commands

PACE_VARIABLE = "QUARTET_TEST_STEP_S"
LETTERS = 320  # from here on the nano models' ids are a letter each


@serve.deployment(name=DEPLOYMENT)
class PacedQuartet(app.Quartet.func_or_class):  # type: ignore[name-defined, misc]  # the class behind Serve's wrapper
    """A replica whose ranks only wait."""

    async def __init__(self, args: dict[str, Any]) -> None:
        paced = Behaviour(step_s=float(os.environ[PACE_VARIABLE]), first_token=LETTERS)
        Group.boot = partial(Group.boot, command=commands(ranks=paced))  # type: ignore[method-assign]
        await super().__init__({**args, "adapters": {}})  # there is no model that one could change


def build(args: dict[str, Any]) -> Application:
    """As deploy.app.build."""
    settings = Settings.read(args)
    return PacedQuartet.options(**app.deployment_options(settings)).bind(msgspec.to_builtins(settings))  # type: ignore[attr-defined]
