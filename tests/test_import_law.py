"""The import law: who may import whom, and that the control side needs neither torch nor transformers."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.repo_rules import CONTROL, ROOT, floors, knots, law_complaints, module_name, package_of, sources

pytestmark = pytest.mark.pure

# Every breach that the law names, as (module, source, a word of the complaint).
BREACHES = [
    ("kernels.norm", "from engine.errors import QuartetError", "kernels may not import"),
    ("kernels.norm", "import numpy as np", "not numpy"),
    ("engine.plan", "def f():\n    import torch", "leaf may not import torch"),
    ("engine.plan", "from engine.core.pages import Pages", "may not import engine.core.pages"),
    ("engine.plan", "from . import rank", "may not import engine.rank"),
    ("engine.core.loop", "from engine.front import client", "may not import engine.front.client"),
    ("engine.core.loop", "import engine.rank.worker", "may not import engine.rank.worker"),
    ("engine.core.loop", "from ..rank.worker import main", "may not import engine.rank.worker"),
    ("engine.core.loop", "from kernels import norm", "may not import kernels.norm"),
    ("engine.core.loop", "try:\n    import torch\nexcept ImportError:\n    pass", "torch at module level"),
    ("engine.rank.runner", "def f():\n    from engine.core.scheduler import Scheduler", "may not import engine.core"),
    ("engine.rank.runner", "from engine.front.text import Text", "may not import engine.front"),
    (
        "engine.rank.runner",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import engine.core.loop",
        "may not import engine.core",
    ),
    ("engine.front.text", "class A:\n    import transformers", "transformers at module level"),
    ("engine.front.text", "from engine.rank.sampler import sample", "may not import engine.rank"),
    (
        "engine.front.client",
        "import importlib\nimportlib.import_module('engine.core.loop')",
        "may not import engine.core",
    ),
    ("engine.sidecar", "", "no package"),
    ("cluster.group", "def f():\n    import ray", "only deploy imports ray"),
    ("cluster.group", "from fastapi import FastAPI", "only deploy.edge imports fastapi"),
    ("cluster.group", "from deploy.settings import Settings", "may not import deploy"),
    ("cluster.capability", "from torch import cuda", "torch at module level"),
    ("deploy.models.resolve", "from kernels.norm import rms_norm", "may not import kernels"),
    ("deploy.models.resolve", "import torch.nn as nn", "torch at module level"),
    ("deploy.app", "from tests.support.fake import Fake", "may not import tests"),
    ("deploy.app", "import starlette.types", "only deploy.edge imports starlette"),
    ("deploy.app", "def f():\n    from deploy.cli.main import main", "deploy may not import deploy.cli"),
    ("deploy.edge.routes", "import ray", "only deploy imports ray"),
    ("deploy.edge.routes", "from deploy.settings import Settings", "deploy.edge may not import deploy.settings"),
    ("deploy.edge.routes", "from cluster.group import Group", "deploy.edge may not import cluster"),
    ("deploy.models.resolve", "from deploy.edge.http.scope import RECORD", "deploy.models may not import deploy.edge"),
    ("deploy.models.resolve", "from fastapi import FastAPI", "only deploy.edge imports fastapi"),
    ("deploy.cli.plan_command", "from ray import serve", "only deploy imports ray"),
    ("deploy.cli.plan_command", "from starlette.types import Scope", "only deploy.edge imports starlette"),
    ("dashboards.exporter", "from engine.core.loop import Loop", "may not import engine.core"),
]

LAWFUL = [
    ("kernels.norm", "import math\nimport torch\nimport triton.language as tl\nfrom kernels.tune import table"),
    ("engine.plan", "import struct\nfrom engine.errors import QuartetError\nfrom . import protocol"),
    (
        "engine.core.loop",
        "import zmq\nfrom engine import plan\nfrom engine.core.pages import Pages\nfrom .prefix import Prefix",
    ),
    ("engine.rank.runner", "import torch\nfrom kernels.norm import rms_norm\nfrom engine.rank.kv import KV"),
    ("engine.front.text", "import tokenizers\ndef f():\n    import transformers"),
    (
        "cluster.group",
        "from engine.rank import worker\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
    ),
    (
        "deploy.app",
        "import ray\nfrom deploy.edge.routes import create_app\nfrom cluster.group import Group\nimport dashboards.exporter",
    ),
    ("deploy.edge.routes", "from fastapi import FastAPI\nfrom engine.front.text import Pieces\nfrom deploy.edge.http import scope"),
    ("deploy.cli.plan_command", "from deploy.settings import Settings\nimport deploy.models\nfrom engine.rank import kv"),
    ("dashboards.exporter", "import prometheus_client\nfrom engine.events import Sink"),
]

# Runs in a fresh interpreter: whatever asks for a blocked package gets what a machine without it gives.
IMPORT_ALL = textwrap.dedent("""
    import importlib, sys

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {"torch", "transformers"}:
                raise ModuleNotFoundError(f"{name} is blocked: the control side must import without it", name=name)

    sys.meta_path.insert(0, Blocked())
    sys.path.insert(0, sys.argv[1])
    for name in sys.argv[2:]:
        importlib.import_module(name)
    print("imported", len(sys.argv) - 2)
""")


def import_all(root: str, names: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, root, *names], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_repository_keeps_the_law() -> None:
    """No file of the import packages imports what its package may not."""
    assert sources(), "no sources found: the checker looked in the wrong place"
    complaints = [
        line
        for path in sources()
        for line in law_complaints(path.read_text(), module_name(path), is_package=path.name == "__init__.py")
    ]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(
    ("module", "source", "why"), BREACHES, ids=[f"{module}-{index}" for index, (module, *_) in enumerate(BREACHES)]
)
def test_a_planted_breach_is_caught(module: str, source: str, why: str) -> None:
    """Each breach that the law names, planted in one file, gives exactly one complaint, and that one says why."""
    complaints = law_complaints(source, module)
    assert len(complaints) == 1, complaints
    assert why in complaints[0]


@pytest.mark.parametrize(("module", "source"), LAWFUL, ids=[module for module, _ in LAWFUL])
def test_lawful_imports_pass(module: str, source: str) -> None:
    """What the law allows is not complained about."""
    assert law_complaints(source, module) == []


def edge_modules() -> dict[str, str]:
    return {name: path.read_text() for path in sources() if (name := module_name(path)).startswith("deploy.edge.")}


def test_no_arrow_runs_back_inside_the_edge() -> None:
    """Of the rooms of deploy/edge, at most 22 folders and single files, none imports another that leads back to it."""
    assert len(edge_modules()) > 40
    assert len({name.split(".")[2] for name in edge_modules()}) <= 22
    assert knots(edge_modules(), "deploy.edge") == []


@pytest.mark.parametrize(
    ("module", "planted", "knot"),
    [
        ("deploy.edge.jobs.job_builder", "from deploy.edge.openai import schemas", {"jobs", "serving", "openai"}),
        ("deploy.edge.keys.quotas", "def f():\n    from deploy.edge.guards import key_gate", {"keys", "guards"}),
    ],
)
def test_an_arrow_back_is_caught(module: str, planted: str, knot: set[str]) -> None:
    """One import more in one file, wherever it stands in it, ties that file's room and all between into one knot."""
    modules = edge_modules()
    modules[module] += f"\n{planted}\n"
    (found,) = knots(modules, "deploy.edge")
    assert knot <= set(found)


def test_the_core_is_low_and_has_few_files() -> None:
    """engine/core has at most fifteen files, on at most seven floors: the longest chain of imports inside it. Planted: were the
    masks built on the scheduler, there would be one more."""
    modules = {module_name(path): path.read_text() for path in sources() if package_of(module_name(path)) == "engine.core"}
    assert len(modules) <= 15
    assert floors(modules, "engine.core") <= 7
    modules["engine.core.masks"] += "\nfrom engine.core.scheduler import Scheduler"
    assert floors(modules, "engine.core") == 8


def test_relative_imports_of_a_package_resolve_from_the_package() -> None:
    """In `engine/core/__init__.py`, `..rank` is `engine.rank`, and in `engine/core/loop.py` it is the same."""
    for module, is_package in (("engine.core", True), ("engine.core.loop", False)):
        assert law_complaints("from ..rank import worker", module, is_package=is_package) == [
            f"{module}:1: engine.core may not import engine.rank.worker"
        ]


def test_control_side_imports_with_torch_blocked() -> None:
    """Leaves, core, front, cluster, deploy and dashboards import where neither torch nor transformers is."""
    names = [name for path in sources() if _is_control(name := module_name(path)) and not name.endswith("__main__")]
    done = import_all(str(ROOT), names)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["imported", str(len(names))]


def test_the_block_catches_a_planted_torch_import(tmp_path: Path) -> None:
    """A module that reaches torch through another one fails to import under the block, and the message names torch."""
    (tmp_path / "innocent.py").write_text("import guilty\n")
    (tmp_path / "guilty.py").write_text("import torch\n")
    done = import_all(str(tmp_path), ["innocent"])
    assert done.returncode != 0
    assert "torch is blocked" in done.stderr


def _is_control(module: str) -> bool:
    return package_of(module) in {"engine.leaf", *CONTROL}
