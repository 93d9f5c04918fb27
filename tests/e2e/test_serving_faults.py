"""The gateway under load while its processes are killed, and while its database is away.

Clients play sessions of five acts and an outcome, repeat every request until it succeeds, and write down what they were
told. That is then compared with the database.
"""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from processes.faults import CONTROLLER, PROXY, REPLICA, OwnRay, Postgres, own_ray, postgres
from processes.load_client import ACT, OUTCOME, Load, Sent, running
from toy_serving.gateways import SEES, make_bundle
from waiting import until

from marl_ray.cluster.local_ray import free_port
from marl_ray.experiments.database import schema
from marl_ray.experiments.database.connections import Database

SECRET = "admin's secret"
CONTROL, TREATMENT = "one", "four"
REPLICAS = 2
"""Replicas of the gateway."""
CUT_S = 1.0
"""Seconds after the acknowledgement of a rollback within which every replica stops exposing the arm."""
QUIET_S = 2.0
"""Seconds of load before a fault, and after everything answers again."""
AWAY_S = 10.0
"""Seconds that the database is away."""
KILLS = {"replica": REPLICA, "controller": CONTROLLER, "proxy": PROXY}
NOTICED_S = 2.0
"""Seconds after a replica's death within which no request is sent to it any more."""
RECOVERY_S = 5.0
"""Seconds after the database's return within which no request is refused any more."""
SPOOLED_S = 3.0
"""Seconds after which exposures that the database does not take are on disk."""
DELIVERED_S = 30.0
"""Seconds within which other replicas deliver what a dead one left on disk."""
KEPT = [f"kept{k}" for k in range(30)]
"""Sessions that begin in the first epoch."""


@dataclass(frozen=True)
class Deployed:
    """A gateway under test: for every fault an experiment `main-FAULT` and one, for the rollback, `cut-FAULT`."""

    ray: OwnRay
    config: dict[str, Any]
    url: str
    database: str

    def load(self, fault: str) -> Load:
        return Load(self.url, SECRET, (f"main-{fault}", f"cut-{fault}"), SEES)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {SECRET}"}
        answer = httpx.post(self.url + path, json=body, headers=headers, timeout=10)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def arms(self, experiment: str, sessions: Sequence[str]) -> dict[str, str]:
        """Session -> the arm that an act of it gets now."""
        requests = {s: {"experiment": experiment, "session_id": s, "observations": SEES} for s in sessions}
        return {session: self.post(ACT, body)["arm"] for session, body in requests.items()}

    def rows(self, table: sa.Table, experiment: str) -> dict[str, Any]:
        """Unit -> row of the database."""
        database = Database(self.database)
        try:
            with database.transaction() as connection:
                selected = connection.execute(sa.select(table).where(table.c.experiment == experiment))
                return {row.unit: row for row in selected}
        finally:
            database.close()


@pytest.fixture(scope="module")
def ray(tmp_path_factory) -> Iterator[OwnRay]:
    # By default Serve looks at its proxy every ten seconds and replaces it after three failures.
    with own_ray(tmp_path_factory.mktemp("ray"), RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S="1") as ray:
        yield ray


@pytest.fixture(scope="module")
def port() -> int:
    """Serve keeps the port that it was started with."""
    return free_port()


def deploy_gateway(ray: OwnRay, port: int, folder: Path, database: str, faults: Sequence[str]) -> Deployed:
    keys = [
        {
            "name": "ops",
            "sha256": hashlib.sha256(SECRET.encode()).hexdigest(),
            "scopes": ["admin", "inference", "outcomes"],
        }
    ]
    (folder / "keys.yaml").write_text(json.dumps({"keys": keys}))
    # Another test's rollback bars the bundle there; here it is an arm all the same.
    treatment = {"bundle": make_bundle(folder, 4), "allow_rolled_back": True}
    arms = {CONTROL: {"bundle": make_bundle(folder, 1)}, TREATMENT: treatment}
    # Nothing is decided but by the test: for that there are never outcomes or exposures enough.
    common = {"arms": arms, "min_outcomes": 10**6, "min_exposures": 10**6}
    climbing = {"strategy": "gradual", "stages": [0.2, 0.6], "promotion": "manual"}
    experiments = [{"name": f"main-{fault}", **common, **climbing} for fault in faults]
    experiments += [{"name": f"cut-{fault}", **common, "on_rollback": "cut"} for fault in faults]
    args = {
        "experiments": experiments,
        "database": database,
        "api_keys": str(folder / "keys.yaml"),
        "spool": str(folder / "spool"),
        "replicas": REPLICAS,
        "cpus_per_replica": 0.5,
    }
    application = {"name": "ab", "route_prefix": "/", "import_path": "marl_ray.serving.app:build", "args": args}
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [application],
    }
    return Deployed(ray, config, ray.deploy(config)["ab"].rstrip("/"), database)


@pytest.fixture(scope="module")
def gateway(ray: OwnRay, port: int, tmp_path_factory) -> Deployed:
    folder = tmp_path_factory.mktemp("sqlite")
    return deploy_gateway(ray, port, folder, f"sqlite:///{folder}/experiments.db", ("kills", "crash"))


@contextmanager
def check_under_load(gateway: Deployed, fault: str, recovery_s: float = 0.0) -> Iterator[list[Sent]]:
    """Put load on the fault's two experiments, and afterwards compare what clients were told with the database.

    The main one has reached its second epoch, in which replicas ask the database for sessions that they do not know,
    and the other one's treatment has been rolled back under load. Sessions have their arms within `recovery_s`.
    """
    main, cut = f"main-{fault}", f"cut-{fault}"
    before = gateway.arms(main, KEPT)
    gateway.post(f"/v1/experiments/{main}/next_stage", {"reason": "test"})
    time.sleep(CUT_S)
    with running(gateway.load(fault)) as requests:
        time.sleep(QUIET_S)
        gateway.post(f"/v1/experiments/{cut}/rollback", {"reason": "test", "arm": TREATMENT})
        rolled_back = time.monotonic()
        time.sleep(CUT_S + QUIET_S)
        yield requests
        time.sleep(QUIET_S)
    late = [r.sent - rolled_back for r in requests if r.experiment == cut and r.path == ACT and r.arm == TREATMENT]
    last = max(late, default=float("-inf"))  # a slow machine may have sent none since the rollback, or before it
    print(f"rollback: the arm's last answer was to a request sent {last:+.3f} s from the acknowledgement")
    assert last < CUT_S
    assert any(r.arm == TREATMENT for r in requests if r.experiment == main and r.sent > rolled_back + CUT_S)
    assert set(before.values()) == {CONTROL, TREATMENT}
    has_its_arms_again(gateway, main, before, recovery_s)
    check_against_database(gateway, requests, main, cut)


def has_its_arms_again(gateway: Deployed, experiment: str, before: Mapping[str, str], recovery_s: float) -> None:
    """Wait until every session gets the arm that it had, from both replicas.

    An AssertionError says if that takes longer than `recovery_s`.
    """
    deadline = time.monotonic() + recovery_s
    while True:
        late = time.monotonic() >= deadline
        answers = [gateway.arms(experiment, KEPT) for _ in range(3)]
        if all(arms == before for arms in answers):
            return
        assert not late, f"sessions have other arms: {[dict(arms.items() - before.items()) for arms in answers]}"


def check_against_database(gateway: Deployed, requests: Sequence[Sent], main: str, cut: str) -> None:
    for experiment in (main, cut):
        successful = [r for r in requests if r.experiment == experiment and r.status == 200]
        exposures, outcomes = (gateway.rows(table, experiment) for table in (schema.exposures, schema.outcomes))
        answered = defaultdict(set)
        for request in successful:
            if request.path == ACT:
                answered[request.session].add(request.arm)
        assert len(answered) > 20
        # Each session that acted is exposed, and to nothing but the arm that it was told.
        if experiment == main:
            assert {session: {exposures[session].arm} for session in answered} == answered
        # Each acknowledged outcome is there, with its value and for the arm that was answered; and no other is.
        acknowledged = {r.session: (r.value, r.arm) for r in successful if r.path == OUTCOME}
        assert acknowledged.keys() == answered.keys()
        assert {unit: (row.value, exposures[unit].arm) for unit, row in outcomes.items()} == acknowledged


def failures(requests: Sequence[Sent], fault: float) -> list[Sent]:
    """Failed requests; their window, in seconds after the fault, is printed."""
    failed = [r for r in requests if r.status != 200]
    counts = defaultdict(list)
    for r in failed:
        counts[(r.path, r.status)].append(r.sent - fault)
    for (path, status), sent in counts.items():
        print(f"{len(sent)} x {path} {status or 'no answer'}: sent {min(sent):+.3f} to {max(sent):+.3f} s")
    return failed


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_process_costs_only_the_requests_of_that_moment(gateway):
    """A replica, the controller and the proxy, one after another under one load."""
    killed_at, intact_at = {}, {}
    with check_under_load(gateway, "kills") as requests:
        for fault, title in KILLS.items():
            victims = gateway.ray.actors(title)
            assert len(victims) == (REPLICAS if fault == "replica" else 1)
            assert [victim.nice() for victim in victims] == [0] * len(victims)  # else other tests starve the next ones
            killed_at[fault] = time.monotonic()
            victims[0].kill()
            gateway.ray.wait_until_complete(REPLICAS)
            intact_at[fault] = time.monotonic()
            time.sleep(QUIET_S)
    failed: dict[str, list[Sent]] = {fault: [] for fault in ("none", *KILLS)}
    for request in requests:
        if request.status != 200:
            before = [fault for fault in KILLS if killed_at[fault] <= request.answered]
            failed[before[-1] if before else "none"].append(request)
    for fault in KILLS:
        print(f"{fault}: whole after {intact_at[fault] - killed_at[fault]:.1f} s")
        failures(failed[fault], killed_at[fault])
    assert failed["none"] == []
    assert [r for r in failed["replica"] if r.status != 500 or r.sent > killed_at["replica"] + NOTICED_S] == []
    assert failed["controller"] == []  # no request goes through it
    # The only proxy: until there is another one nobody listens, and for a moment that one knows no routes.
    assert [r for r in failed["proxy"] if r.status not in (0, 404) or r.sent > intact_at["proxy"]] == []


@pytest.mark.slow
def test_a_rollback_survives_the_death_of_all_replicas_and_a_redeployment(gateway):
    sessions = [f"s{k}" for k in range(40)]
    before = gateway.arms("cut-crash", sessions)
    assert set(before.values()) == {CONTROL, TREATMENT}
    gateway.post("/v1/experiments/cut-crash/rollback", {"reason": "test", "arm": TREATMENT})
    # What is killed takes the exposures of its last moments with it.
    until(lambda: gateway.rows(schema.exposures, "cut-crash").keys() >= {*sessions}, "all exposures in the database")
    victims = gateway.ray.actors(REPLICA)
    assert len(victims) == REPLICAS
    for victim in victims:
        victim.kill()
    gateway.ray.wait_until_complete(REPLICAS)
    gateway.ray.deploy(gateway.config)
    gateway.ray.wait_until_complete(REPLICAS)
    after = gateway.arms("cut-crash", [*sessions, *(f"new{k}" for k in range(40))])
    assert set(after.values()) == {CONTROL}
    assert {
        unit: row.arm for unit, row in gateway.rows(schema.exposures, "cut-crash").items() if unit in before
    } == before


@pytest.fixture(scope="module")
def database() -> Iterator[Postgres]:
    with postgres() as server:
        yield server


@pytest.fixture(scope="module")
def on_postgres(ray: OwnRay, port: int, database: Postgres, tmp_path_factory) -> Deployed:
    """Takes the place of `gateway`, whose tests come first: a Serve config is the whole truth."""
    return deploy_gateway(ray, port, tmp_path_factory.mktemp("postgres"), database.url, ("away", "memory", "death"))


@pytest.mark.slow
def test_sessions_go_on_while_the_database_is_away(on_postgres, database):
    with check_under_load(on_postgres, "away", RECOVERY_S) as requests:
        stopping = time.monotonic()
        database.stop()
        stopped = time.monotonic()
        time.sleep(AWAY_S)
        starting = time.monotonic()
        database.start()
        started = time.monotonic()
        time.sleep(RECOVERY_S)
    print(f"down at {stopped - stopping:.2f} s, up between {starting - stopping:.2f} and {started - stopping:.2f} s")
    failed = failures(requests, stopping)
    away = [r for r in requests if stopped < r.sent and r.answered < starting]
    # Nobody who acts notices; no outcome is acknowledged that is not stored.
    assert len([r for r in away if r.path == ACT]) > 100
    assert {r.status for r in away if r.path == OUTCOME} == {503}
    assert [r for r in failed if r.path == ACT] == []
    assert [r for r in failed if r.status != 503 or r.answered < stopping or r.sent > started + RECOVERY_S] == []


@pytest.mark.slow
def test_a_session_has_its_arm_again_when_the_database_is_back(on_postgres, database):
    experiment = "main-memory"
    before = on_postgres.arms(experiment, KEPT)
    on_postgres.post(f"/v1/experiments/{experiment}/next_stage", {"reason": "test"})
    time.sleep(CUT_S)
    database.stop()
    try:
        # The weights have changed: what a replica answers a session that another one knows, it can only guess.
        guessed = [on_postgres.arms(experiment, KEPT) for _ in range(2)]
    finally:
        database.start()
    print(f"{[sum(arms[s] != before[s] for s in KEPT) for arms in guessed]} of {len(KEPT)} sessions had another arm")
    has_its_arms_again(on_postgres, experiment, before, RECOVERY_S)


@pytest.mark.slow
def test_exposures_outlive_a_replica_that_dies_while_the_database_is_away(on_postgres, database):
    experiment = "main-death"
    database.stop()
    try:
        answered = on_postgres.arms(experiment, [f"s{k}" for k in range(60)])
        time.sleep(SPOOLED_S)
        on_postgres.ray.actors(REPLICA)[0].kill()
        time.sleep(1.0)
    finally:
        database.start()
    on_postgres.ray.wait_until_complete(REPLICAS)

    def stored() -> dict[str, str]:
        return {session: row.arm for session, row in on_postgres.rows(schema.exposures, experiment).items()}

    until(lambda: stored().keys() == answered.keys(), "all exposures in the database", DELIVERED_S, stored)
    assert stored() == answered
