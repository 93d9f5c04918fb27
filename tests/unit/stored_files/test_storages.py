"""Storages as configs name them."""

import pytest
from toy_runs.runs import config

from marl_ray.errors import MarlRayError
from marl_ray.stored_files.storages import open_storage


@pytest.mark.parametrize("storage", ["s3://", "gs://"])
def test_a_uri_without_a_bucket_is_refused(storage):
    with pytest.raises(MarlRayError, match=f"^storage: '{storage}' cannot be used: it names no bucket$"):
        open_storage(storage)


def test_a_storage_in_the_home_folder_is_there(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert config("storage=~/runs").storage == "/home/ada/runs"
    assert config("storage=s3://bucket/~x").storage == "s3://bucket/~x"
