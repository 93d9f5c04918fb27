"""The gateway on real Ray Serve."""

import asyncio
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from gymnasium import spaces
from toy_serving.undeploying import undeploy
from waiting import until

from marl_ray.cluster.local_ray import LocalRay, free_port
from marl_ray.config import NetworkConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.policies.bundles.actor_critic import PolicyParts, save_bundle
from marl_ray.policies.bundles.manifest import Lineage
from marl_ray.serving.administration.deploy import deploy

pytestmark = pytest.mark.shared_ray("one")

SEES = {"agent_0": [0, 1], "agent_1": [1, 0]}


def make_bundle(folder: Path, action: int) -> str:
    """A small policy that all but certainly takes one action."""
    observation, network = spaces.MultiDiscrete([2, 2]), NetworkConfig(hidden=(8,))
    policy = ActorCritic(observation, spaces.Discrete(3), network)
    with torch.no_grad():
        policy.actor.rest[-1].bias[action] = 30.0
    parts = PolicyParts(network, observation, spaces.Discrete(3), policy.actor.state_dict())
    lineage = Lineage(
        run="r", algorithm={"p": "ippo"}, config_hash="c", code_version="v", seed=0, env={}, steps=1, metrics={}
    )
    return str(save_bundle(folder, {"agent_0": "p", "agent_1": "p"}, {"p": parts}, lineage))


@pytest.fixture(scope="module")
def serve_config(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("serving")
    arms = {f"arm{action}": {"bundle": make_bundle(folder, action), "cpus": 0.1} for action in (0, 2)}
    applications = []
    for name, placement in (("ab", "replica"), ("apart", "deployment")):
        args = {
            "experiments": [
                {"name": "exp", "arms": arms, "min_outcomes": 5, "placement": placement, "outcome_window_s": 10.0}
            ],
            "database": f"sqlite:///{folder}/{name}.db",
            "spool": str(folder / name),
            "cpus_per_replica": 0.5,
        }
        applications.append(
            {"name": name, "route_prefix": f"/{name}", "import_path": "marl_ray.serving.app:build", "args": args}
        )
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": free_port()},
        "applications": applications,
    }


@pytest.mark.long
def test_a_port_that_is_taken_is_named(ray_cluster):
    """Before any application runs, because Serve keeps the port that it was started with."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        nothing = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": port},
            "applications": [],
        }
        try:
            with pytest.raises(MarlRayError, match=rf"the HTTP proxy is STARTING \(is port {port} taken\?\)"):
                deploy(nothing, ray_cluster.dashboard_url, timeout_s=20)
        finally:
            undeploy(ray_cluster.dashboard_url)


@pytest.fixture(scope="module")
def apart(ray_cluster: LocalRay, serve_config: dict[str, Any]) -> Iterator[str]:
    """The URL of a gateway whose arms are in deployments of their own."""
    alone = serve_config | {"applications": serve_config["applications"][1:]}
    url = deploy(alone, ray_cluster.dashboard_url).urls["apart"]
    yield url
    undeploy(ray_cluster.dashboard_url)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", timeout=60)


@pytest.fixture(scope="module")
def ab(apart: str, ray_cluster: LocalRay, serve_config: dict[str, Any]) -> str:
    """The URL of a gateway whose arms are in its replica, beside the other one."""
    return deploy(serve_config, ray_cluster.dashboard_url).urls["ab"]


@pytest.mark.usefixtures("apart")
def test_replicas_listen_on_loopback_alone(ray_cluster):
    """Gateways and arms have them. Who reaches the server that Serve opens in each runs any code there."""
    shared = psutil.Process().children(recursive=True)
    replicas = [process for process in shared if "ServeReplica" in " ".join(process.cmdline())]
    assert len(replicas) == 3
    for replica in replicas:
        listening = [c.laddr.ip for c in replica.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert {host.removeprefix("::ffff:") for host in listening} == {"127.0.0.1"}


@pytest.mark.parametrize("application", ["apart", pytest.param("ab", marks=pytest.mark.long)])
def test_act_outcomes_and_report(application, serve_config, request):
    url = request.getfixturevalue(application)

    async def play() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:

            async def episode(k: int) -> dict[str, Any]:
                sent = {"session_id": f"s{k}", "observations": SEES}
                answers = [await client.post("/v1/act", json=sent) for _ in range(3)]
                outcome = await client.post("/v1/outcomes", json={"session_id": f"s{k}", "value": k % 3})
                assert [answer.status_code for answer in [*answers, outcome]] == [200] * 4
                assert len({answer.json()["arm"] for answer in answers}) == 1
                return answers[-1].json()

            return await asyncio.gather(*(episode(k) for k in range(40)))

    answers = asyncio.run(play())
    for answer in answers:
        assert answer["actions"] == dict.fromkeys(SEES, int(answer["arm"][-1]))

    def arms() -> dict[str, Any]:
        """Return the reports of the arms."""
        return httpx.get(f"{url}/v1/experiments/exp", timeout=60).json()["arms"]

    until(lambda: not any(arm["in_window"] for arm in arms().values()), "all windows to end", details=arms, look_s=1.0)
    report = httpx.get(f"{url}/v1/experiments/exp", timeout=60).json()
    for arm in ("arm0", "arm2"):
        values = [k % 3 for k, answer in enumerate(answers) if answer["arm"] == arm]
        row = report["arms"][arm]
        assert (row["exposures"], row["outcomes"]) == (len(values), len(values))
        assert row["mean"] == pytest.approx(statistics.fmean(values))
        assert report["arms"][arm]["digest"].startswith(
            Path(serve_config["applications"][0]["args"]["experiments"][0]["arms"][arm]["bundle"]).name
        )
    assert report["arms"]["arm2"]["verdict"] == "undecided"


@pytest.mark.long
def test_an_arm_whose_process_is_killed_is_answered_for_and_comes_back(apart, serve_config):
    treatment = serve_config["applications"][1]["args"]["experiments"][0]["arms"]["arm2"]["bundle"]

    def processes() -> list[psutil.Process]:
        title = f"ray::ServeReplica:arm-{Path(treatment).name}"
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if "".join(process.info["cmdline"] or ()).startswith(title)
        ]

    async def body() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=apart, timeout=60) as client:

            async def ask(k: int) -> dict[str, Any]:
                answer = await client.post("/v1/act", json={"session_id": f"killed{k}", "observations": SEES})
                assert answer.status_code == 200, answer.text
                return answer.json()

            for _ in range(10):  # one death of an arm that has answered often rolls nothing back
                arms = {k: (await ask(k))["arm"] for k in range(20)}
            sessions = [k for k, arm in arms.items() if arm == "arm2"]
            (victim,) = processes()
            victim.suspend()  # so that it answers none of these
            under_way = [asyncio.create_task(ask(k)) for k in sessions for _ in range(5)]
            await asyncio.gather(*(ask(k) for k, arm in arms.items() if arm == "arm0"))
            assert not any(task.done() for task in under_way)
            victim.kill()
            successors: list[psutil.Process] = []
            while not all(task.done() for task in under_way):  # a quick successor would answer what was sent twice
                successors += [process for process in processes() if process not in [victim, *successors]]
                for process in successors:
                    process.suspend()
                await asyncio.sleep(0.05)
            for process in successors:
                process.resume()
            answers = [task.result() for task in under_way]
            deadline = time.monotonic() + 60
            while (await ask(sessions[0]))["arm"] != "arm2":
                assert time.monotonic() < deadline, "the arm does not come back"
                await asyncio.sleep(0.2)
            return answers

    answers = asyncio.run(body())
    assert {(answer["arm"], answer["fallback_for"]) for answer in answers} == {("arm0", "arm2")}
    assert all(answer["actions"] == dict.fromkeys(SEES, 0) for answer in answers)
    report = httpx.get(f"{apart}/v1/experiments/exp", timeout=60).json()
    assert report["status"] == "running" and not report["arms"]["arm2"]["rolled_back"]


def test_bad_input_is_4xx(apart):
    with httpx.Client(base_url=apart, timeout=60) as client:
        codes = [
            client.post("/v1/act", content=b"{").status_code,
            client.post("/v1/act", json={"observations": SEES}).status_code,
            client.post("/v1/act", json={"session_id": "s", "observations": {"agent_0": [5, 5]}}).status_code,
            client.post("/v1/act", content=b" " * 1_500_000).status_code,
            client.post("/v1/outcomes", json={"session_id": "never", "value": 1}).status_code,
            client.get("/v1/act").status_code,
            client.get("/v1/experiments/none").status_code,
            client.get("/nothing").status_code,
        ]
    assert codes == [400, 400, 400, 413, 404, 405, 404, 404]


def test_health_and_metrics_are_served(apart):
    assert httpx.get(f"{apart}/health", timeout=60).json()["status"] == "ok"
    assert "marl_ray_gateway_act_seconds_bucket" in httpx.get(f"{apart}/metrics", timeout=60).text


def test_http_options_of_a_running_serve_cannot_change(apart, ray_cluster, serve_config):
    with pytest.raises(MarlRayError, match=r"http_options\.port: Serve already runs with \d+, not 1;"):
        deploy(serve_config | {"http_options": {"host": "127.0.0.1", "port": 1}}, ray_cluster.dashboard_url)


@pytest.mark.long
def test_a_missing_bundle_fails_the_deployment_with_one_line(ab, ray_cluster, serve_config, tmp_path):
    application = serve_config["applications"][0]
    arms = {"a": {"bundle": str(tmp_path / "none")}, "b": {"bundle": str(tmp_path / "none")}}
    broken = application | {
        "name": "broken",
        "route_prefix": "/broken",
        "args": application["args"] | {"experiments": [{"name": "x", "arms": arms}]},
    }
    with pytest.raises(MarlRayError) as caught:
        deploy(serve_config | {"applications": [application, broken]}, ray_cluster.dashboard_url)
    assert str(caught.value).startswith("application 'broken' is DEPLOY_FAILED: experiments.x.arms.a: bundle ")
    assert "\n" not in str(caught.value)
    assert httpx.get(f"{ab}/health", timeout=60).status_code == 200  # the other one continues


@pytest.mark.long
def test_a_session_keeps_its_arm_when_weights_change(ab, ray_cluster, serve_config):
    def arms() -> list[str]:
        with httpx.Client(base_url=ab, timeout=60) as client:
            sent = [{"session_id": f"kept{k}", "observations": SEES} for k in range(20)]
            return [client.post("/v1/act", json=body).json()["arm"] for body in sent]

    before = arms()
    application = serve_config["applications"][0]
    experiment = application["args"]["experiments"][0]
    moved = {arm: part | {"weight": float(arm == "arm2")} for arm, part in experiment["arms"].items()}
    args = application["args"] | {"experiments": [experiment | {"arms": moved}]}
    deploy(serve_config | {"applications": [application | {"args": args}]}, ray_cluster.dashboard_url)
    with httpx.Client(base_url=ab, timeout=60) as client:
        assert client.get("/v1/experiments").json()["experiments"][0]["epoch"] == 2
    assert arms() == before
    assert set(before) == {"arm0", "arm2"}


@pytest.mark.long
def test_a_deployment_that_takes_too_long_says_how_far_it_is(ab, ray_cluster, serve_config):
    application = serve_config["applications"][0]
    crowded = application | {
        "name": "crowded",
        "route_prefix": "/crowded",
        "args": application["args"] | {"cpus_per_replica": 1000},
    }
    both = serve_config | {"applications": [application, crowded]}
    try:
        # Each call builds the applications anew, which takes Serve longer than ten seconds on a busy machine.
        for timeout_s in (10, 20, 40, 80):
            late = rf"^after {timeout_s} s not everything runs: .*'crowded' is DEPLOYING"
            with pytest.raises(MarlRayError, match=late) as caught:
                deploy(both, ray_cluster.dashboard_url, timeout_s=timeout_s)
            if "'crowded' is DEPLOYING (" in str(caught.value):
                break
        assert "'crowded' is DEPLOYING (0 of 1 replicas run" in str(caught.value)
    finally:
        deploy(serve_config, ray_cluster.dashboard_url)


def test_an_unreachable_dashboard_is_one_line(serve_config):
    with pytest.raises(MarlRayError, match="no Ray dashboard answers"):
        deploy(serve_config, f"http://127.0.0.1:{free_port()}")
    with pytest.raises(MarlRayError, match="expected the dashboard's URL"):
        deploy(serve_config, "127.0.0.1:8265")
