"""The commands of the README, as a user types them."""

import itertools
import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from processes.command_line import PROGRAM, ROOT, marl_ray
from processes.environment import without_ray
from toy_runs.runs import mlflow_database

from marl_ray.cluster.local_ray import free_port
from marl_ray.config import SPECS, RunConfig, load_config
from marl_ray.policies.bundles.manifest import Manifest
from marl_ray.training.single_process import train_alone

pytestmark = pytest.mark.shared_ray("two")

CONFIG = "jobs/configs/multigrid_mappo.yaml"
SHORT = [
    "train.total_steps=1024",
    "train.env_copies=16",
    "evaluation.episodes=4",
    "resources.workers=1",
    "tracking.progress=false",
]


def command(*arguments: str, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the environment in the repository's root, outside of any running Ray's variables."""
    program = [str(Path(PROGRAM).with_name(arguments[0])), *arguments[1:]]
    return subprocess.run(program, cwd=ROOT, env=without_ray() | env, capture_output=True, text=True, timeout=timeout)


def bundle_digests(storage: Path, name: str = "gridworld-mappo") -> dict[int, dict[str, str]]:
    """Steps -> policy -> sha256 of its weights in the bundles that a run has kept."""
    manifests = [Manifest.model_validate_json(p.read_bytes()) for p in (storage / name).glob("*/bundle/bundle.json")]
    assert manifests
    return {
        entry.lineage.steps: {policy: part.sha256 for policy, part in entry.policies.items()} for entry in manifests
    }


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["submit", "--help"], ["demo", "--help"]])
def test_help_shows_the_usage_of_a_command(arguments):
    done = marl_ray(*arguments)
    assert done.returncode == 0
    assert "Usage: marl-ray" in done.stdout


def test_the_installed_program_is_this_command_line():
    """In its own process; other tests call it in theirs."""
    for arguments in (["--help"], ["train", CONFIG, "hyper.lr=high"]):
        installed, in_process = command("marl-ray", *arguments), marl_ray(*arguments)
        assert (installed.returncode, installed.stdout, installed.stderr) == (
            in_process.returncode,
            in_process.stdout,
            in_process.stderr,
        )


def test_a_dry_run_prints_the_resolved_config_and_starts_nothing():
    done = marl_ray("train", CONFIG, "name=untrained", "hyper.lr=3e-4", "--dry-run")
    config = yaml.safe_load(done.stdout)
    policy = config["team"]["shared"]
    assert policy["hyper"]["lr"] == 3e-4
    assert policy["hyper"]["gamma"] == 0.99
    assert policy["algorithm"] == "mappo"


def test_algorithms_are_listed_with_papers_needs_and_hyper_parameters():
    lines = marl_ray("algorithms").stdout.splitlines()
    assert [line.split()[0] for line in lines[: len(SPECS)]] == list(SPECS)
    assert any("macpo" in line and "2110.02793" in line and "costs and budgets" in line for line in lines)
    described = marl_ray("algorithms", "dapo").stdout
    assert "hyper.clip_high = 0.28" in described and "hyper.kl_coef = 0.0" in described
    done = marl_ray("algorithms", "dapoo")
    assert done.returncode == 2 and "algorithm: 'dapoo' is unknown" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if not spec.pairs])
def test_every_algorithm_trains_a_team(name, tmp_path):
    """Two workers; a team of two in turn under a budget, or on a gridworld."""
    spec = SPECS[name]
    config, more = ("multigrid_grpo" if spec.needs_whole_episodes else "multigrid_ippo"), ["train.total_steps=12288"]
    if spec.needs_costs:
        config, more = "budget_dag", ["env.kwargs={workers: 2}", "train.total_steps=8192"]
    overrides = [f"algorithm={name}", f"storage={tmp_path}", "resources.workers=2", *more]
    done = command("marl-ray", "train", f"jobs/configs/{config}.yaml", *overrides)
    assert done.returncode == 0, done.stderr
    assert "models:/" in done.stdout


@pytest.mark.parametrize("kind", ["run", "gateway"])
def test_the_schema_is_json_schema(kind):
    assert json.loads(marl_ray("config", "schema", kind).stdout)["type"] == "object"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([CONFIG, "hyper.learning_rate=1"], "unknown key 'hyper.learning_rate'"),
        ([CONFIG, "algorithm=sarsa"], "algorithm: 'sarsa' is unknown; expected one of ppo, ippo, mappo"),
        ([CONFIG, "env.id=CartPole-v1"], "env.id: 'CartPole-v1' is unknown"),
        ([CONFIG, "storage=/proc/runs"], "storage: '/proc/runs' cannot be written"),
        ([CONFIG, "nonsense"], "override 'nonsense': expected dotted.key=value"),
        (["no/such/file.yaml"], "config file 'no/such/file.yaml' cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, message):
    done = marl_ray("train", *arguments)
    assert done.returncode == 2
    assert re.fullmatch(f"marl-ray: .*{message}.*\n", done.stderr)
    assert done.stdout == ""


def test_more_workers_than_this_machine_can_hold(tmp_path):
    done = marl_ray("train", CONFIG, "resources.workers=64", "train.env_copies=64", f"storage={tmp_path}")
    assert done.returncode == 2
    assert re.fullmatch(r"marl-ray: resources.workers=64 .* can never have more than \d+\n", done.stderr)
    assert not list(tmp_path.iterdir())  # refused before anything started


@pytest.mark.long
def test_a_job_trains_what_the_command_trains(ray_cluster, tmp_path):
    job, submitted = tmp_path / "job", tmp_path / "submitted"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ray_cluster.token}
    address = ["--address", ray_cluster.dashboard_url]
    mlflow_database(job)
    mlflow_database(submitted)
    with ThreadPoolExecutor() as side_by_side:
        script = ["python", "jobs/train.py", CONFIG, *SHORT, f"storage={job}"]
        by_ray = side_by_side.submit(command, "ray", "job", "submit", *address, "--", *script, **token)
        run = ["train", CONFIG, *SHORT, f"storage={submitted}"]
        by_us = side_by_side.submit(command, "marl-ray", "submit", *run, *address, "--json", **token)
        train_alone(load_config(RunConfig, ROOT / CONFIG, SHORT), tmp_path / "here" / "gridworld-mappo")
    for done, log in ((by_ray.result(), by_ray.result().stdout), (by_us.result(), by_us.result().stderr)):
        assert done.returncode == 0, done.stdout + done.stderr
        assert "gridworld-mappo: best return" in log
    ended = json.loads(by_us.result().stdout)
    assert (ended["name"], ended["status"]) == ("gridworld-mappo", 0) and ended["job"].startswith("marl-ray-")
    assert bundle_digests(tmp_path / "here") == bundle_digests(job) == bundle_digests(submitted)


@pytest.mark.slow
@pytest.mark.timeout(900)  # two trainings and a gateway, each with a Ray of its own
def test_a_gateway_on_this_machine_serves_what_was_trained_and_takes_the_next_bundle(tmp_path):
    """Train, serve, deploy, as the README says."""
    for kind in ("ippo", "mappo"):
        config = ROOT / f"jobs/configs/multigrid_{kind}.yaml"
        done = command("marl-ray", "train", str(config), *SHORT, f"storage={tmp_path}")
        assert done.returncode == 0, done.stderr
    config = yaml.safe_load((ROOT / "serve/configs/gridworld.yaml").read_text())
    config["http_options"]["port"] = free_port()
    stores = {"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db", "database": f"sqlite:///{tmp_path}/experiments.db"}
    config["applications"][0]["args"] |= stores | {"spool": str(tmp_path / "spool")}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    arguments = [PROGRAM, "serve", str(tmp_path / "serve.yaml"), "--local"]
    with subprocess.Popen(arguments, cwd=ROOT, env=without_ray(), stdout=subprocess.PIPE, text=True) as gateway:
        try:
            assert gateway.stdout is not None
            lines = list(itertools.takewhile(lambda line: line != "serving until Ctrl-C\n", gateway.stdout))
            key = lines[1].strip().partition("export MARL_RAY_API_KEY=")[2]
            url = f"http://127.0.0.1:{config['http_options']['port']}"
            assert lines[0] == f"gridworld runs at {url}, its page at {url}/ui\n" and key
            deployed = command(
                *("marl-ray", "deploy", "models:/gridworld-mappo/1", "--url", url), MARL_RAY_API_KEY=key, timeout=60
            )
            assert deployed.returncode == 0 and "gridworld-2: running" in deployed.stdout, deployed.stderr
        finally:
            gateway.terminate()
            assert gateway.wait(60) == 143
