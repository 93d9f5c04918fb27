"""`marl-ray new` writes a part of each kind whose test and check pass, and `marl-ray check plugin` finds what is wrong."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from marl_ray.cli import app
from marl_ray.config import RunConfig
from marl_ray.config.load import parse_config
from marl_ray.config.sweep import load_sweep
from marl_ray.errors import MarlRayError
from marl_ray.extensions import POINTS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one new part of each kind, called my_KIND."""
    folder = tmp_path_factory.mktemp("kit")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for kind in POINTS:
            written = CliRunner().invoke(app, ["new", kind, f"my_{kind}"])
            assert written.exit_code == 0, written.exception
            assert (
                f"wrote my_{kind}.py\n" in written.output and "\nnext:\n  python -m pytest test_my_" in written.output
            )
    return folder


@pytest.fixture
def inside(kit: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder as current one and on the path, as for a command that is started there."""
    monkeypatch.chdir(kit)
    monkeypatch.syspath_prepend(kit)
    yield kit
    for module in [name for name in sys.modules if name.startswith(("my_", "wrong_"))]:
        del sys.modules[module]


@pytest.mark.long
def test_the_tests_of_new_parts_pass(kit):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=kit, capture_output=True, text=True, timeout=240, env=os.environ)
    assert done.returncode == 0, done.stdout
    assert len(list(kit.glob("test_my_*.py"))) == len(POINTS)


def test_new_parts_keep_the_products_own_rules_of_style(kit):
    files = sorted(path.name for path in kit.glob("*my_*.py"))
    assert len(files) == 2 * len(POINTS)
    tests_only = [option for rule in ("D", "TID251") for option in ("--per-file-ignores", f"test_*.py:{rule}")]
    command = ["-m", "ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml"), *tests_only, *files]
    done = subprocess.run([sys.executable, *command], cwd=kit, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_configs_of_new_parts_are_accepted(inside):
    configs = list(inside.glob("*.yaml"))
    assert len(configs) == 7
    for path in configs:
        if "space" in yaml.safe_load(path.read_text()):
            load_sweep(path)
        else:
            parse_config(RunConfig, yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("page", sorted((ROOT / "docs/extending").glob("*s.md")), ids=lambda page: page.stem)
def test_a_page_shows_what_new_writes(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    for kind, name in re.findall(r"^marl-ray new (\w+) (\w+)$", text, re.MULTILINE):
        written = CliRunner().invoke(app, ["new", kind, name])
        assert written.exit_code == 0, written.exception
        assert f"```text output\n{written.output}" in text
    for file, shown in re.findall(
        r"^```bash\ncat (\S+)\n```\n\n```text output\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    ):
        assert shown == Path(file).read_text()


def test_nothing_is_written_over(inside):
    (inside / "my_environment.yaml").write_text("mine: true\n")
    with pytest.raises(MarlRayError, match=r"my_environment.py is already here"):
        CliRunner().invoke(app, ["new", "environment", "my_environment"], catch_exceptions=False)
    assert (inside / "my_environment.yaml").read_text() == "mine: true\n"
    (inside / "my_environment.yaml").unlink()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["new", "envronment", "mine"], r"KIND 'envronment' is unknown; did you mean environment or engine\?"),
        (["new", "environment", "MyEnv"], r"NAME 'MyEnv': expected letters in lower case"),
        (["new", "environment", "math"], r"NAME 'math': a module of this name is installed, which math.py would hide"),
        (["check", "plugin", "algoritm", "ppo"], r"KIND 'algoritm' is unknown; did you mean algorithm\?"),
        (["check", "plugin", "environment", "reakt"], r"env.id: 'reakt' is unknown; did you mean react\?"),
        (["check", "plugin", "algorithm", "ppu"], r"algorithm: 'ppu' is unknown; did you mean ppo or .*\?"),
        (
            ["check", "plugin", "algorithm", "ppo", "lr=1"],
            r"check algorithm: unknown setting 'lr'; expected none",
        ),
    ],
)
def test_what_is_wrong_is_said_by_name(inside, command, message):
    with pytest.raises(MarlRayError, match=message):
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_a_check_prints_a_line_for_every_property(inside):
    good = CliRunner().invoke(app, ["check", "plugin", "environment", "my_environment:MyEnvironment", "fields=4"])
    assert good.exit_code == 0
    assert [line.split()[:2] for line in good.output.splitlines()] == [
        ["ok", f"{name}:"] for name in ("agents", "spaces", "episodes", "observations", "rewards", "seeds", "close")
    ]


MISTAKES = [
    ("environment", "self.rng = np.random.default_rng(seed)", "pass", "seeds: step 0: observations differ between two"),
    ("environment", "float(together)", "float('nan')", "rewards: step 1: the reward of agent_0 is nan"),
    ("environment", "% self.fields", "", "observations: step "),
    ("environment", "self.agents = []", "pass", "episodes: ValueError: agent_0, agent_1: `agents` and the ends that"),
    ("environment", "over = self.steps == self.length", "over = False", "episodes: an episode of drawn actions is not"),
    (
        "scheduler",
        "stop if stop < self.total_steps else None",
        "stop",
        "stops: next_stop(75000) is 100000, expected more",
    ),
    ("scheduler", "frozenset(stopping)", "frozenset(trials)", "verdicts: "),
    ("scheduler", "frozenset(continuing)", "frozenset()", "end: 1 at a time: trials ["),
    (
        "scheduler",
        "best - self.settings.margin",
        "vars(self).setdefault('a', trial.scores[trial.at])",
        "memory: the sch",
    ),
    ("tracker", "if math.isfinite(value)", "if 1 / value", "rows: "),
    ("tracker", "def end(self", "def close(self", "rows: AttributeError: 'MyTracker' object has no attribute 'end'"),
    ("benchmark", "if word not in", "if word in", "references: no reference of 'colours' passes"),
    ("benchmark", "(not missing, f", "(True, f", "empty answers: an empty answer to 'colours' passes"),
    ("engine", "policy.logits(states)", "0.5 * policy.logits(states)", "log-probabilities: response 0: a log-prob"),
    ("engine", "(seed, [prompt.stream]", "(0, [prompt.stream]", "streams: another seed gives the same responses"),
    ("engine", "checked_generation(self.policy, prompts, generation)", "self.policy.generation", "prompts: "),
    ("engine", "policy.version)", "0)", "weights: response 0: version is 0, expected the policy's, 1"),
]
CLASSES = {"benchmark": "MY_BENCHMARK"}
SETTINGS = {"scheduler": ["interval=25000", "margin=100"]}


@pytest.mark.parametrize(("kind", "line", "wrong", "failure"), MISTAKES)
def test_a_mistake_is_found(inside, kind, line, wrong, failure):
    text = (inside / f"my_{kind}.py").read_text()
    assert line in text
    (inside / f"wrong_{kind}.py").write_text(text.replace(line, wrong))
    name = CLASSES.get(kind, f"My{kind.capitalize()}")
    bad = CliRunner().invoke(app, ["check", "plugin", kind, f"wrong_{kind}:{name}", *SETTINGS.get(kind, ())])
    assert bad.exit_code == 1, bad.output or bad.exception
    assert f"failed  {failure}" in bad.output
