"""Built-ins, entry points of installed packages and `package.module:NAME` come through one door."""

import sys
from pathlib import Path

import pytest

from marl_ray import extensions
from marl_ray.algorithms import algorithm_of
from marl_ray.errors import MarlRayError
from marl_ray.extensions import ALGORITHM, BENCHMARK, ENVIRONMENT, ExtensionPoint


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path whose packages have metadata as pip writes it."""
    monkeypatch.syspath_prepend(tmp_path)
    extensions._installed.cache_clear()
    yield tmp_path
    extensions._installed.cache_clear()


def install(folder: Path, package: str, points: str) -> None:
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(points)


def test_a_package_ships_an_algorithm_by_name(installed: Path) -> None:
    (installed / "shipped_ppo.py").write_text("from marl_ray.algorithms.with_critic.ppo import PPO as OURS\n")
    install(installed, "shipped", "[marl_ray.algorithms]\nour_ppo = shipped_ppo:OURS\nppo = shipped_ppo:OTHER\n")
    assert algorithm_of("our_ppo") is algorithm_of("ppo")
    assert ALGORITHM.names()[-1] == "our_ppo" and ALGORITHM.names().count("ppo") == 1
    sys.modules.pop("shipped_ppo")


def test_a_name_that_two_packages_claim_is_refused_with_both(installed: Path) -> None:
    install(installed, "one", "[marl_ray.environments]\nmaze = one_maze:make\n")
    install(installed, "two", "[marl_ray.environments]\nmaze = two_maze:make\n")
    with pytest.raises(MarlRayError, match=r"'maze' is of one and two; expected package.module:NAME to say which"):
        ENVIRONMENT.reference("maze")


@pytest.mark.parametrize("point", extensions.POINTS.values(), ids=lambda point: point.kind)
def test_every_built_in_is_where_its_extension_point_says(point: ExtensionPoint) -> None:
    for name in point.builtins:
        assert callable(point.load(name)) or point in (ALGORITHM, BENCHMARK)
