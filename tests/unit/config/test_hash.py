"""The hash of a config: of what it means, the same in every process."""

import os
import subprocess
import sys

from marl_ray.config import RunConfig, config_hash, load_config, parse_config


def test_the_hash_is_of_the_meaning_not_of_the_file(tmp_path):
    (tmp_path / "a.yaml").write_text("name: run\nenv: {id: x}\nhyper:\n  lr: 0.0007\n")
    (tmp_path / "b.yaml").write_text("# a comment\nenv:\n  id: x\nname: run\n")
    first, other = (load_config(RunConfig, tmp_path / name) for name in ("a.yaml", "b.yaml"))
    assert config_hash(first) == config_hash(other)
    assert config_hash(first) == config_hash(parse_config(RunConfig, first.resolve()))
    assert config_hash(first) != config_hash(load_config(RunConfig, tmp_path / "a.yaml", ["seed=1"]))
    assert len(config_hash(first)) == 64


def test_the_hash_is_the_same_in_another_process():
    code = (
        "from marl_ray.config import *; print(config_hash(parse_config(RunConfig, {'name': 'r', 'env': {'id': 'x'}})))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
