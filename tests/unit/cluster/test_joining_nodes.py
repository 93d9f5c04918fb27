"""Nodes of a local cluster that do not join, without Ray: the message says which of the two causes it has."""

from contextlib import nullcontext

import pytest
import ray

from marl_ray.cluster import local_nodes
from marl_ray.cluster.local_ray import LocalRay
from marl_ray.errors import MarlRayError


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "print('no room'); raise SystemExit(3)",
            "local cluster: node 1 has ended with status 3; its log ends: no room",
        ),
        (
            "import time; time.sleep(600)",
            "local cluster: 1 of 2 nodes have joined in 0.1 s; the log of node 1 ends: nothing",
        ),
    ],
    ids=["ended", "too slow"],
)
def test_a_node_that_ends_and_one_that_is_too_slow_have_messages_of_their_own(program, message, monkeypatch, tmp_path):
    head = LocalRay(dashboard_url="", address="127.0.0.1:1", temp_dir=tmp_path, token="")
    monkeypatch.setattr(local_nodes, "local_ray", lambda **_: nullcontext(head))
    monkeypatch.setattr(local_nodes, "JOIN_PROGRAM", program)
    monkeypatch.setattr(local_nodes, "START_S", 60.0 if "ended" in message else 0.1)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}])
    with pytest.raises(MarlRayError) as error, local_nodes.local_cluster(2, 1):
        pass
    assert str(error.value) == message
