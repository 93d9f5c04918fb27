"""Whoever follows a job decides whether it ends with Ctrl-C."""

from typing import cast

import pytest

from marl_ray.cli.cluster import offer_to_end
from marl_ray.cluster.kuberay.client.connection import Connection


@pytest.mark.parametrize("key", [EOFError, KeyboardInterrupt])
def test_whoever_does_not_answer_is_told_that_the_job_goes_on(key, monkeypatch, capsys):
    def answered_no(question: str) -> str:
        assert "end the job? [y/N]" in question
        raise key

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", answered_no)
    offer_to_end(cast(Connection, None), "mine")
    line = "rayjob/mine: it continues; marl-ray cluster logs|wait|delete rayjob/mine\n"
    assert capsys.readouterr() == ("", line)
