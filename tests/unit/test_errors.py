"""Errors of one line: what was meant by a name, and the hint for a missing extra."""

import json

import pytest

from marl_ray.errors import did_you_mean, install_hint

EDITABLE = {"url": "file:///home/a%20b/marl-ray", "dir_info": {"editable": True}}
WHEEL = {"url": "file:///tmp/marl_ray-0.1.0-py3-none-any.whl", "archive_info": {}}


@pytest.mark.parametrize(
    ("origin", "hint"),
    [
        pytest.param(None, "pip install 'marl-ray[redis]'", id="an index"),
        pytest.param(WHEEL, "pip install 'marl-ray[redis]'", id="a wheel"),
        pytest.param(
            EDITABLE, "pip install -c constraints.txt -e '.[redis]' in /home/a b/marl-ray", id="an editable checkout"
        ),
    ],
)
def test_an_extra_is_installed_as_the_package_was(origin, hint, tmp_path, monkeypatch):
    """pip writes these files; `direct_url.json` only for what comes from no index."""
    written = tmp_path / "marl_ray-0.1.0.dist-info"
    written.mkdir()
    (written / "METADATA").write_text("Metadata-Version: 2.4\nName: marl-ray\nVersion: 0.1.0\n")
    if origin is not None:
        (written / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert install_hint("redis") == hint


def test_sources_that_were_never_installed_have_a_hint(monkeypatch):
    monkeypatch.setattr("sys.path", [])
    assert install_hint("redis") == "pip install 'marl-ray[redis]'"


def test_a_name_that_is_the_beginning_of_a_known_one_is_told_so():
    kinds = ("environment", "engine", "reward")
    assert did_you_mean("env", kinds) == "; did you mean environment?"
    assert did_you_mean("xyz", kinds) == "; expected one of environment, engine, reward"


def test_capital_letters_do_not_hide_what_was_meant():
    assert did_you_mean("MAPPO", ("mappo", "ppo")) == "; did you mean mappo or ppo?"
    assert did_you_mean("multigrid-empty-5x5", ("MultiGrid-Empty-5x5-v0",)) == "; did you mean MultiGrid-Empty-5x5-v0?"
