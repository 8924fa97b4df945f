"""Settings, model references, public shapes, capacity and Ray's environment."""

import errno
import itertools
import json
import re
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub
import msgspec
import pytest
import yaml

from deploy import environment
from deploy.models.resolve import resolve
from deploy.nodes import check_host_of_nodes, check_nodes, check_replicas, gpus_of
from deploy.placement import check_model, place
from deploy.ports import HAPROXY_PORTS, PROXY_PORTS, REPLICA_RANGE
from deploy.settings import Settings, read_config, read_settings
from engine.config import EngineConfig, engine_config
from engine.errors import CheckpointError, ConfigError
from engine.geometry import read_geometry
from engine.rank.load.slices import elements
from engine.rank.models.assistant_geometry import read_assistant
from engine.rank.models.assistant_weights import TENSORS
from tests.nano import model_shapes as shapes
from tests.nano.random_models import write_texts
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.pure

# Settings beside a model, and what is said of them.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"modle": "x"}, "modle: unknown setting"),
    ({"metrics": {"prot": 1}}, "metrics.prot: unknown setting"),
    ({"tp": 0}, "tp: "),
    ({"tp": "four"}, "tp: "),
    ({"device": "tpu"}, "device: "),
    ({"dtype": "float16"}, "dtype: "),
    ({"thinking": "sometimes"}, "thinking: "),
    ({"chat_template": "template.jinja"}, "chat_template: "),
    ({"keys": {"file": "/a\0b"}}, "keys.file: "),
    ({"memory_fraction": 1.5}, "memory_fraction: "),
    ({"metrics": {"port": 70000}}, "metrics.port: "),
    ({"metrics": {"host": "127.0.0.1:9400"}}, "metrics.host: "),
    ({"metrics": {"discovery": {"host": ""}}}, "metrics.discovery.host: "),
    ({"max_queue": 1 << 63}, "max_queue: expected int <= 4398046511104, not 9223372036854775808"),
    ({"limits": {"requests": 1 << 31}}, "limits.requests: expected int <= 2147483647, not 2147483648"),
    ({"limits": {"min_priority": 1}}, "limits.min_priority: expected int <= 0, not 1"),
    ({"metrics": {"ttft_objective_s": 0}}, "metrics.ttft_objective_s: "),
    ({"metrics": {"discovery": {"prot": 1}}}, "metrics.discovery.prot: unknown setting"),
    ({"limits": {"n": 0}}, "limits.n: "),
    ({"limits": {"body_bytes": 2 << 30}}, "limits: body_bytes 2147483648 exceeds upload_bytes 1073741824"),
    ({"limits": {"hosts": ["llm.example:8000"]}}, "limits.hosts: "),
    ({"limits": {"cors_origins": ["https://page.example/"]}}, "limits.cors_origins: "),
    ({"limits": {"cors_origins": ["https://Page.example"]}}, "limits.cors_origins: "),
    ({"media": {"fetch": ["https://cdn.example"]}}, "media.fetch: "),
    ({"logs": {"format": "xml"}}, "logs.format: "),
    ({"tracing": {"endpoint": "localhost:4318"}}, "tracing.endpoint: "),
    ({"tracing": {"sample_ratio": 1.5}}, "tracing.sample_ratio: "),
    ({"heartbeat_timeout_s": 0.2}, "heartbeat_timeout_s: expected float >= 0.5, not 0.2"),
    ({"step_timeout_s": float("nan")}, "step_timeout_s: expected float > 0.0, not nan"),
    ({"step_timeout_s": float("inf")}, "step_timeout_s: expected float <= 2147483, not inf"),
    ({"boot_timeout_s": 2147484}, "boot_timeout_s: expected float <= 2147483, not 2147484"),
    ({"mtp": {"drafts": 9}}, "mtp.drafts: expected auto or int <= 8, not 9"),
    ({"limits": 5}, "limits: expected a mapping, not 5"),
    ({"policy": "fifo"}, "policy: expected fair or arrival, not 'fifo'"),
    ({"media": {"max_soft_tokens": 100}}, "media.max_soft_tokens: expected 70 or 140 or 280 or 560 or 1120, not 100"),
    ({"keys": {"file": "/k", "variable": "K"}}, "keys: either file or variable"),
]

@pytest.mark.parametrize(("args", "complaint"), BAD, ids=[complaint for _, complaint in BAD])
def test_a_bad_setting_is_named_in_one_line(args: dict[str, Any], complaint: str) -> None:
    """The key, and what is wrong with it."""
    with pytest.raises(ConfigError) as caught:
        Settings.read({"model": "a/b"} | args)
    assert str(caught.value).startswith(complaint)
    assert "\n" not in str(caught.value)


def test_words_of_a_command_line_are_numbers() -> None:
    """`serve run deploy.app:build model=a/b tp=4` hands on text."""
    assert Settings.read({"model": "a/b", "tp": "4", "prefix_cache": "false"}) == Settings(model="a/b", tp=4, prefix_cache=False)


def test_hosts_and_origins_as_they_are_compared() -> None:
    """Names, addresses of IPv6, and any; the table above refuses what would never be equal to what a client sends."""
    hosts, origins = ("localhost", "[::1]", "Box_1.lan"), ("*", "null", "https://page.example:8443", "vscode-webview://1a")
    args = {"model": "a/b", "limits": {"hosts": hosts, "cors_origins": origins}, "media": {"fetch": ("*", "::1", "cdn.example")}}
    settings = Settings.read(args)
    assert (settings.limits.hosts, settings.limits.cors_origins) == (hosts, origins)


def test_all_bad_settings_are_named_at_once() -> None:
    """Nobody fixes a file one error at a time."""
    with pytest.raises(ConfigError, match=r"tp: .*; colour: unknown setting"):
        Settings.read({"model": "a/b", "tp": -1, "colour": "red"})
    with pytest.raises(ConfigError, match=r"^model: is required$"):
        Settings.read({})


@pytest.mark.parametrize(("text", "thinking"), [("on", "on"), ("off", "off"), ("auto", "auto"), ("'on'", "on"), ("true", "on")])
def test_on_and_off_are_words(text: str, thinking: str) -> None:
    """YAML reads on and off as booleans; they are the setting's words, also when settings are handed on as plain values."""
    assert Settings.read(yaml.safe_load("{model: a/b, debug_pages: off}")).debug_pages is False
    settings = Settings.read(yaml.safe_load(f"{{model: a/b, thinking: {text}}}"))
    assert settings.thinking == thinking
    assert Settings.read(msgspec.to_builtins(settings)) == settings


OUR_FILES = {"nano": 4, "gemma4": 4, "31b-two-gpus": 2, "31b-fp8": 1, "26b": 1, "12b": 1, "e4b": 1}


def test_all_our_files_are_tested() -> None:
    assert {path.stem for path in (ROOT / "deploy").glob("*.yaml")} == set(OUR_FILES)


@pytest.mark.parametrize("name", OUR_FILES)
def test_our_own_files_are_good(name: str) -> None:
    """Each file that we ship passes our check and Serve's schema, and overrides the deployment by its name."""
    from ray.serve.schema import ServeDeploySchema

    config = read_config(ROOT / "deploy" / f"{name}.yaml")
    settings = read_settings(config, name)
    assert settings.tp == OUR_FILES[name]
    schema = ServeDeploySchema.model_validate(config)
    assert [deployment.name for deployment in schema.applications[0].deployments] == ["Quartet"]
    assert schema.http_options.host == "127.0.0.1"
    ongoing = schema.applications[0].deployments[0].max_ongoing_requests
    assert not isinstance(ongoing, int) or ongoing > settings.capacity, "our own 429 must come first: it has OpenAI's shape"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [", "not YAML"),
        ("a: " + "[" * 5000 + "]" * 5000, "not YAML: maximum recursion depth"),
        ("a: 2026-13-45", "not YAML: month must be in 1..12"),
        ("- 1", "list of applications"),
        ("a: 1\nb: {c: {d: 1, e: 2, d: 3}}", 'the key d stands twice in what begins in "<unicode string>", line 2, column 8'),
        ("b: {? [c] : 1}", "unhashable"),
        ("applications: [{import_path: 'x:y'}]", "no application has"),
        ("applications: [{import_path: 'deploy.app:build'}, {import_path: 'deploy.app:build'}]", "one application has /, and"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    """As are the settings in it."""
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(path)) + ".*" + complaint):
        read_settings(read_config(path), str(path))


def test_a_key_stands_once_where_anchors_are_merged(tmp_path: Path) -> None:
    """What is merged into a mapping gives way to its own keys; a key of its own stands once. Otherwise PyYAML keeps the last."""
    path = tmp_path / "q.yaml"
    path.write_text("applications: []\na: &a {x: 1}\nb: {<<: *a, x: 2}\nc: [{x: 1}, {x: 2}]")
    assert read_config(path) == {"applications": [], "a": {"x": 1}, "b": {"x": 2}, "c": [{"x": 1}, {"x": 2}]}
    assert yaml.safe_load("x: 1\nx: 2") == {"x": 2}


def test_the_clients_name_of_a_model_is_its_own() -> None:
    """Unless served_model_name says otherwise."""
    assert Settings(model="google/gemma-4-31B-it").name == "gemma-4-31B-it"
    assert Settings(model="/models/mine/").name == "mine"
    assert Settings(model="a/b", served_model_name="c").name == "c"


@pytest.mark.parametrize("member", shapes.PUBLIC)
def test_a_published_config_is_that_of_the_shape(member: str, tmp_path: Path) -> None:
    """So are the files that stand in beside it; of another shape the config is not."""
    folder = resolve(f"dummy:{member}")
    published = json.loads((folder / "config.json").read_text())
    assert [name for name, shape in shapes.PUBLIC.items() if shapes.config(shape, "bfloat16") == published] == [member]
    write_texts(published, tmp_path)
    files, written = ({path.name: path.read_bytes() for path in place.glob("*.*")} for place in (folder, tmp_path))
    assert files == written


@pytest.mark.parametrize(("member", "published"), shapes.PUBLISHED_DRAFTERS.items())
def test_a_public_drafter_counts_what_was_published(member: str, published: int) -> None:
    """To the last parameter, and it is its own model's alone."""
    folder, target = resolve(f"dummy:{member}-assistant"), read_geometry(resolve(f"dummy:{member}"))
    drafter = read_assistant(folder, target)
    order = drafter.vocab if drafter.centroids else 0  # ids by cluster, which is no weight
    assert elements(TENSORS, drafter) + order == published
    other = "e2b" if member == "31b" else "31b"
    with pytest.raises(CheckpointError, match="is no drafter of this model: hidden size of its model"):
        read_assistant(folder, read_geometry(resolve(f"dummy:{other}")))


def test_a_cache_of_another_dtype_is_refused() -> None:
    """`kv_dtype` is `dtype`, auto or fp8; pages have the bytes of its elements."""
    asked = {"model": str(resolve("dummy:31b")), "device": "cuda", "load_format": "dummy"}
    with pytest.raises(ConfigError, match="kv_dtype float32 with dtype bfloat16 is not implemented"):
        engine_config(**asked, kv_dtype="float32")
    with pytest.raises(ConfigError, match="kv_dtype"):
        engine_config(**asked, kv_dtype="fp4")
    half, whole = engine_config(**asked, kv_dtype="bfloat16"), engine_config(**asked, dtype="float32")
    byte = engine_config(**asked, kv_dtype="fp8")
    groups = zip(byte.kv_groups, half.kv_groups, whole.kv_groups, strict=True)
    assert all(4 * one.page_bytes == 2 * two.page_bytes == four.page_bytes for one, two, four in groups)


def test_a_config_reads_its_models_shapes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is checked; another config reads its own."""
    config = engine_config(model=str(resolve("dummy:31b")), device="cpu")
    monkeypatch.setattr(EngineConfig, "architecture", property(lambda config: pytest.fail(f"{config.model} is read again")))
    assert config.geometry == read_geometry(resolve("dummy:31b"))
    with pytest.raises(pytest.fail.Exception):
        _ = msgspec.structs.replace(config).geometry


def test_a_drafter_that_is_not_there_is_said_to_be_one() -> None:
    """By the key that named it; so is a hub id that cannot be downloaded."""
    for name, why in (("nano:70b-assistant", "is not one of nano:"), ("someone/assistant", "is not in the local hub cache")):
        with pytest.raises(ConfigError, match=f"^mtp.model: {name} {why}"):
            place(Settings.read({"model": "nano:31b", "mtp": {"model": name}}))


def test_eight_drafts_where_a_gpu_verifies_them() -> None:
    """All members at every tensor-parallel size but the 12B on one GPU, whose full layers have a single KV head for 16 heads."""
    mtp, refused = {"model": "any", "drafts": 8}, []
    for member, tp in itertools.product(shapes.PUBLIC, (1, 2, 4)):
        asked = {"model": str(resolve(f"dummy:{member}")), "tp": tp, "load_format": "dummy"}
        engine_config(**asked, device="cpu", mtp=mtp)
        try:
            engine_config(**asked, device="cuda", mtp=mtp)
        except ConfigError as error:
            refused.append((member, tp, str(error)))
    assert refused == [("12b", 1, "mtp.drafts 8: at most 7 with tp 1, where 16 query heads share a KV head")]


def test_plans_that_no_ring_record_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest settings there can be fit a record of the ring; were it smaller, an error would name what is too large."""
    asked = {"model": str(resolve("dummy:31b")), "tp": 4, "device": "cuda", "dtype": "bfloat16", "load_format": "dummy"}
    engine_config(**asked, max_seqs=4096, max_len=262_144, prefill_budget=1 << 16, page=16)
    monkeypatch.setattr("engine.config.MAX_RECORD", 1 << 20)
    with pytest.raises(ConfigError, match=r"a step's plan may take \d+ bytes with max_seqs 256, max_len 262144 and prefill_budget"):
        engine_config(**asked, max_seqs=256, max_len=262_144)


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("nano:7b", "nano:7b is not one of nano:26b-a4b, nano:31b, nano:e2b"),
        ("dummy:7b", "dummy:7b is not one of dummy:e2b"),
        ("~no-such-user/folder", "is no folder here"),
        ("just-a-name", "is no folder here, and no hub id"),
        ("google/gemma-4-31B-it", "not in the local hub cache and HF_HUB_OFFLINE is set"),
    ],
)
def test_a_model_that_is_not_there_is_said_so_at_once(
    model: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever kind of reference it was."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        resolve(model)


def test_a_download_that_the_disk_has_no_room_for_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a cache that must not be written; the model is named."""
    for number, why in ((errno.ENOSPC, "No space left on device"), (errno.EROFS, "Read-only file system")):

        def fails(*_: object, number: int = number, why: str = why, **_more: object) -> NoReturn:
            raise OSError(number, why, "/cache/blobs/1")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
        with pytest.raises(ConfigError, match=re.escape(f"model: a/b: [Errno {number}] {why}: '/cache/blobs/1'")):
            resolve("a/b")


def test_a_folder_is_itself_and_must_be_a_checkpoint(tmp_path: Path) -> None:
    """One with config.json."""
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path


def nodes(*gpus: int) -> list[int]:
    return gpus_of({"Alive": True, "Resources": {"GPU": float(count)} if count else {}} for count in gpus)


def test_the_largest_node_decides() -> None:
    """Eight GPUs on eight nodes hold no group of four; a dead node holds nothing."""
    settings = Settings(model="a/b", tp=4, device="cuda")
    check_nodes(settings, nodes(1, 4))
    dead = gpus_of([{"Alive": False, "Resources": {"GPU": 8.0}}])
    for too_small in (nodes(1, 1, 1, 1, 1, 1, 1, 1), nodes(0), [], dead):
        with pytest.raises(ConfigError, match=r"needs 4 GPUs on one node.*deploy/nano\.yaml.*wait_for_nodes"):
            check_nodes(settings, too_small)
    check_nodes(msgspec.structs.replace(settings, wait_for_nodes=True), [])
    check_nodes(Settings(model="nano:31b", tp=4), [])
    check_nodes(Settings(model="a/b", tp=4, device="cpu"), [])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"ray_actor_options": {"num_cpus": 64}}, "1 replica(s) of 64 CPUs each need 64; this machine has 8"),
        ({"num_replicas": 2, "ray_actor_options": {"num_gpus": 4}}, "2 replica(s) of 4 GPUs each need 8; this machine has 4"),
        ({"autoscaling_config": {"min_replicas": 2}}, "2 replica(s) of 4 GPUs each need 8; this machine has 4"),
        ({"num_replicas": 9, "ray_actor_options": {"num_gpus": 0}}, "9 replica(s) of 1 CPUs each need 9; this machine has 8"),
        ({"num_replicas": 9, "ray_actor_options": {"num_gpus": None}}, "9 replica(s) of 1 CPUs each need 9; this machine has 8"),
        ({"num_replicas": 9, "name": "Gateway"}, "9 replica(s) of 1 CPUs each need 9; this machine has 8"),
        ({"ray_actor_options": {"resources": {"rack": 1}}}, "1 replica(s) of 1 racks each need 1; this machine has 0"),
    ],
)
def test_replicas_that_never_fit_are_refused(options: dict[str, Any], why: str) -> None:
    """Of what must run all the time; what may come later waits for its node."""
    settings, there = Settings(model="a/b", tp=4, device="cuda"), {"CPU": 8.0, "GPU": 4.0}
    config = {"applications": [{"deployments": [options]}]}
    with pytest.raises(ConfigError, match=re.escape(why)):
        check_replicas(config, settings, there)
    check_replicas(config, msgspec.structs.replace(settings, wait_for_nodes=True), there)
    with pytest.raises(ConfigError, match=re.escape("17 replica(s) of 0.5 CPUs each need 8.5; this machine has 8")):
        check_replicas({"applications": [{"deployments": [{"num_replicas": 17}]}]}, Settings(model="nano:31b"), there)
    fine = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 8}, "ray_actor_options": {"num_cpus": 0.5, "num_gpus": 4}}
    check_replicas({"applications": [{"deployments": [fine]}, {}]}, settings, there)


def test_loopback_is_refused_on_several_nodes() -> None:
    """As HAProxy of another node could not reach the replicas. A wildcard is fine, and so is an address of the network."""
    for host in ("127.0.0.1", "localhost", "::1"):
        with pytest.raises(ConfigError, match=re.escape(f"http_options.host: {host}: this cluster has 2 nodes")):
            check_host_of_nodes(host, 2)
    for host in ("0.0.0.0", "10.0.0.1"):
        check_host_of_nodes(host, 2)


def test_rays_environment_is_set_and_the_users_wins(tmp_path: Path) -> None:
    """HAProxy's files and Ray's token go to the private folder, and what stood there stays."""
    environ = {"RAY_worker_niceness": "5", "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace"}
    environment.prepare(environ, tmp_path, {"RAY_SERVE_HAPROXY_STATS_PORT": 8404})
    assert environ["RAY_worker_niceness"] == "5"
    assert environ["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert environ["RAY_SERVE_HAPROXY_SOCKET_PATH"] == f"{tmp_path}/admin.sock"
    assert environ["RAY_SERVE_HAPROXY_STATS_PORT"] == "8404"
    assert "PYTHONBREAKPOINT" not in environ
    assert [environment.haproxy_threads(cores) for cores in (1, 2, 8, 16, 64)] == [1, 1, 1, 2, 4]
    assert environ["RAY_SERVE_HAPROXY_NBTHREAD"] in "1234"
    assert [environment.haproxy_connections(files) for files in (1024, 4096, 20_000, 1 << 20, -1)] == [64, 1228, 7590, 16384, 16384]
    assert int(environ["RAY_SERVE_HAPROXY_MAXCONN"]) >= 64
    token = Path(environ["RAY_AUTH_TOKEN_PATH"])
    assert (environ["RAY_AUTH_MODE"], token.parent, token.stat().st_mode & 0o777) == ("token", tmp_path, 0o600)
    assert len(token.read_text()) == 64


@pytest.mark.parametrize("own", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "x"}, {"RAY_AUTH_TOKEN_PATH": "/x"}])
def test_a_token_of_the_users_own_is_kept(tmp_path: Path, own: dict[str, str]) -> None:
    """As is their choice to have none: no file is written."""
    environ = dict(own)
    environment.prepare(environ, tmp_path, {})
    assert own.items() <= environ.items()
    assert list(tmp_path.iterdir()) == []


def test_every_variable_has_a_reader_in_ray() -> None:
    """Each name that we set occurs in the installed Ray (or torch): a renamed variable would be dead weight."""
    import importlib.util

    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    serve = Path(spec.origin).parent / "serve" / "_private"
    text = "".join(path.read_text() for path in (serve / "constants.py", serve / "haproxy.py"))
    ports = (*HAPROXY_PORTS, *PROXY_PORTS, *REPLICA_RANGE)
    ours = (*environment.RAY, *environment.HAPROXY_FILES, *environment.haproxy_paths(), "RAY_SERVE_HAPROXY_NBTHREAD", *ports)
    names = [name for name in ours if name.startswith("RAY_SERVE_")]
    assert len(names) > 10
    assert [name for name in names if f'"{name}"' not in text] == []


def test_a_proxy_that_starts_slowly_is_waited_for() -> None:
    """As long as the launcher's call of Serve waits for it. Planted: Serve's own 5 s, at which a loaded machine's boot ended."""
    from ray.serve._private import constants

    wait_s = float(environment.RAY.get("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", constants.PROXY_READY_CHECK_TIMEOUT_S))
    assert wait_s >= constants.HTTP_PROXY_TIMEOUT


def test_a_builder_refuses_a_model_that_no_replica_could_serve(tmp_path: Path) -> None:
    """A name that nothing has, a shape that the settings do not fit; not a folder that only other nodes may have, or a hub id."""
    check_model(Settings.read({"model": "nano:31b", "device": "cpu"}))
    check_model(Settings.read({"model": "some/model"}))
    for wrong, said in (
        ({"model": "nano:no-such-member"}, "model: nano:no-such-member is not one of"),
        ({"model": "nano:31b", "tp": 3}, "tensor-parallel size 3"),
        ({"model": "nano:31b", "mtp": {"model": "nano:none-assistant", "drafts": 2}}, "mtp.model"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_model(Settings.read({"device": "cpu", **wrong}))
