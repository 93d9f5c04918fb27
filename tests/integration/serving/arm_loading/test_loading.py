"""The bundles of a replica: it loads those that serve, each content once, and drops what is over."""

import asyncio
import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from stores.statements import noted_statements
from toy_serving.gateways import act, bearer, make_bundle, serving, windows_end, write_keys
from waiting import until_async

from marl_ray.config import GatewayConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.experiments.lifecycle import Action, ExperimentStatus
from marl_ray.experiments.store.evidence import EvidenceStore
from marl_ray.experiments.store.facade import open_stores
from marl_ray.experiments.store.records import AssignmentState
from marl_ray.serving.arm_loading import loaded_bundles
from marl_ray.serving.arm_loading.loaded_bundles import check_configured
from marl_ray.serving.arm_loading.needed_arms import needed_arms
from marl_ray.serving.routing.endpoints import DRAIN_S


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(("zero", "one", "two")):
        shutil.move(make_bundle(tmp_path, number), tmp_path / name)
    return tmp_path


def config_of(folder: Path, *experiments: dict[str, Any], **more: Any) -> GatewayConfig:
    where = {"database": f"sqlite:///{folder}/experiments.db", "spool": f"{folder}/spool"}
    return parse_config(GatewayConfig, {"experiments": list(experiments)} | where | more)


def experiment(folder: Path, name: str = "exp", arms: tuple[str, ...] = ("zero", "one"), **more: Any) -> dict[str, Any]:
    return {"name": name, "arms": {arm: {"bundle": str(folder / arm)} for arm in arms}, "min_outcomes": 20} | more


def end(folder: Path, name: str, action: Action, arm: str | None = None) -> None:
    stores = open_stores(f"sqlite:///{folder}/experiments.db")
    epoch = stores.experiments.assignment_state(name).epoch
    stores.experiments.change(name, action, epoch=epoch, actor="ops", reason="done", arm=arm)
    stores.close()


def answers(config: GatewayConfig, sessions: int = 20) -> list[dict[str, Any]]:
    async def body() -> list[dict[str, Any]]:
        async with serving(config) as (client, _):
            return [await act(client, f"s{k}") for k in range(sessions)]

    return asyncio.run(body())


@pytest.mark.parametrize(
    ("action", "arm", "serves", "deleted"),
    [
        (Action.PROMOTE, "one", "one", "zero"),
        (Action.STOP, None, "zero", "one"),
        (Action.ROLLBACK, None, "zero", "one"),
    ],
)
def test_an_endpoint_serves_on_when_the_losing_bundle_is_deleted(folder, action, arm, serves, deleted):
    config = config_of(folder, experiment(folder))
    met = {f"s{k}": answer["arm"] for k, answer in enumerate(answers(config))}
    assert set(met.values()) == {"zero", "one"}
    end(folder, "exp", action, arm)
    shutil.rmtree(folder / deleted)
    stores = open_stores(config.database)
    check_configured(config, stores.experiments)  # a deployment of the same file is as good
    stores.close()
    for answer in answers(config, 40):  # old sessions, of both arms, and new ones
        assert set(answer["actions"].values()) == {("zero", "one").index(serves)}


def test_the_same_holds_for_experiments_that_were_created_over_http(folder):
    keys = write_keys(folder / "keys.yaml", ops=("admin", "inference"))
    config = config_of(folder, api_keys=keys)

    async def create() -> None:
        async with serving(config) as (client, _):
            client.headers.update(bearer("ops"))
            made = await client.post("/v1/experiments", json=experiment(folder) | {"reason": "new"})
            assert made.status_code == 201, made.text

    async def assign_again() -> set[str]:
        async with serving(config) as (client, app):
            client.headers.update(bearer("ops"))
            assert app.service.endpoints.routers["exp"].arms.keys() == {"one"}  # before the first request
            return {(await act(client, f"s{k}"))["arm"] for k in range(20)}

    asyncio.run(create())
    end(folder, "exp", Action.PROMOTE, "one")
    shutil.rmtree(folder / "zero")
    assert asyncio.run(assign_again()) == {"one"}


def test_the_control_answers_for_a_live_arm_whose_bundle_is_gone_and_the_log_says_so_once(folder, caplog):
    config = config_of(folder, experiment(folder))
    arms = {answer["arm"] for answer in answers(config)}
    assert arms == {"zero", "one"}
    shutil.rmtree(folder / "one")
    caplog.clear()
    for answer in answers(config):
        assert set(answer["actions"].values()) == {0}
        assert answer["arm"] == "zero"
    errors = [
        record.message for record in caplog.records if "arms.one" in record.message and record.levelname == "ERROR"
    ]
    assert len(errors) == 2  # as the config is read, and as the replica begins to serve


def test_a_deployment_whose_control_is_gone_is_refused_by_name(folder):
    config = config_of(folder, experiment(folder))
    answers(config, 1)
    shutil.rmtree(folder / "zero")
    stores = open_stores(config.database)
    with pytest.raises(MarlRayError, match=r"^experiments\.exp\.arms\.zero: the control's bundle"):
        check_configured(config, stores.experiments)
    stores.close()


def test_a_new_experiment_without_a_bundle_is_refused_by_name(folder):
    shutil.rmtree(folder / "one")
    with pytest.raises(MarlRayError, match=r"^experiments\.exp\.arms\.one: bundle"):
        answers(config_of(folder, experiment(folder)), 1)


async def test_a_content_is_loaded_once_whatever_names_it(folder):
    shutil.copytree(folder / "zero", folder / "copy")
    both = [experiment(folder, "a"), experiment(folder, "b", ("copy", "one"))]

    async with serving(config_of(folder, *both)) as (_, app):
        message = [arm.bundle for router in app.service.endpoints.routers.values() for arm in router.arms.values()]
    assert len(message) == 4
    assert len({id(bundle) for bundle in message}) == 2


def old_ones(folder: Path, count: int) -> list[dict[str, Any]]:
    """Experiments of one endpoint, of which all but the last are over, some hours ago."""
    made = [experiment(folder, f"old{k}", endpoint="game") for k in range(count)]
    stores = open_stores(f"sqlite:///{folder}/experiments.db")
    for part in made:
        loaded = loaded_bundles.load_all_arms(
            parse_config(GatewayConfig, {"experiments": [part]}).experiments[0], loaded_bundles.BundleCache()
        )
        stores.experiments.open(part["name"], loaded.stored_config())
        stores.experiments.change(part["name"], Action.STOP, epoch=None, actor="ops", reason="done")
    engine = sa.create_engine(f"sqlite:///{folder}/experiments.db")
    with engine.begin() as connection:
        for k, part in enumerate(made):
            at = time.time() - 2 * DRAIN_S + k
            connection.execute(
                sa.text("UPDATE experiments SET created = :at WHERE name = :n"), {"at": at, "n": part["name"]}
            )
    engine.dispose()
    stores.close()
    return made


def test_experiments_that_are_over_cost_no_bundle_and_no_query(folder):
    def cost(count: int) -> tuple[int, int]:
        config = config_of(folder, *old_ones(folder, count), experiment(folder, "now", endpoint="game"))

        async def body() -> tuple[int, int]:
            async with serving(config) as (_, app):
                app.service.follower.close()
                app.service.follower.poll()
                app.service.follower.decide()
                with noted_statements() as statements:
                    app.service.follower.poll()
                    app.service.follower.decide()
                return sum(len(router.arms) for router in app.service.endpoints.routers.values()), len(statements)

        return asyncio.run(body())

    few = cost(1)
    (folder / "experiments.db").unlink()
    assert cost(12) == few
    assert few[0] == 4  # with those of the last one that is over, whose sessions may finish


async def test_what_is_over_is_looked_at_when_a_window_ends_and_an_outcome_comes(folder, monkeypatch):
    config = config_of(folder, experiment(folder, outcome_window_s=20.0))
    looks: list[float] = []
    look = EvidenceStore.look

    def look_and_count(evidence: EvidenceStore, record: Any, *more: Any, **named: Any) -> Any:
        looks.extend([now] if record.name == "exp" else [])
        return look(evidence, record, *more, **named)

    async with serving(config) as (client, app):
        follower, stores = app.service.follower, app.service.stores
        follower.close()
        now = time.time()
        stores.database.clock = lambda: now
        await act(client, "early", experiment="exp")
        app.service.exposures.flush()
        now += 5.0
        await act(client, "later", experiment="exp")
        app.service.exposures.flush()
        end(folder, "exp", Action.PROMOTE, "one")
        follower.poll()
        monkeypatch.setattr(EvidenceStore, "look", look_and_count)
        monkeypatch.setattr(follower.evidence, "winners_at", math.inf)
        started = now
        for _ in range(30):
            follower.decide()
            now += 1.0
        assert [round(at - started) for at in looks] == [0, 16, 21]
        sent = {"session_id": "later", "value": 1.0, "experiment": "exp"}
        assert not (await client.post("/v1/outcomes", json=sent)).json()["counts"]
        for _ in range(3):
            follower.decide()
        assert len(looks) == 4


def test_late_outcomes_of_what_is_over_are_taken_and_prove_harm(folder):
    old = experiment(folder, "old", endpoint="game", margin=0.1)
    config = config_of(folder, old)

    async def play() -> dict[str, str]:
        async with serving(config) as (client, _):
            return {f"s{k}": (await act(client, f"s{k}"))["arm"] for k in range(160)}

    met = asyncio.run(play())
    end(folder, "old", Action.PROMOTE, "one")
    with_successor = config_of(folder, old, experiment(folder, "new", ("zero", "two"), endpoint="game"))

    async def later() -> None:
        async with serving(with_successor) as (client, app):
            for number, (session, arm) in enumerate(met.items()):
                sent = {"session_id": session, "value": number % 3 - 5.0 * (arm == "one")}
                answer = await client.post("/v1/outcomes", json=sent)
                assert (answer.status_code, answer.json()["experiment"]) == (200, "old")
            windows_end(app)
            await until_async(
                lambda: "one" in app.service.endpoints.routers["old"].rules.state.rolled_back, "the rollback"
            )

    asyncio.run(later())


def test_a_late_rollback_of_the_winner_is_answered_by_the_control(folder):
    config = config_of(folder, experiment(folder))
    answers(config)
    end(folder, "exp", Action.PROMOTE, "one")

    async def body() -> tuple[set[str], set[str]]:
        async with serving(config) as (client, app):
            before = {(await act(client, f"t{k}"))["arm"] for k in range(10)}
            end(folder, "exp", Action.ROLLBACK, "one")
            app.service.follower.poll()
            return before, {(await act(client, f"u{k}"))["arm"] for k in range(10)}

    assert asyncio.run(body()) == ({"one"}, {"zero"})


def test_states_are_read_again_only_after_a_change(folder):
    config = config_of(folder, experiment(folder))
    answers(config, 1)
    stores = open_stores(config.database)
    first = stores.experiments.states()
    assert stores.experiments.states() is first
    end(folder, "exp", Action.PAUSE)
    second = stores.experiments.states()
    assert second is not first and second["exp"].status is ExperimentStatus.PAUSED
    stores.close()


def state(
    name: str, status: ExperimentStatus, created: float, weights: dict[str, float], **more: Any
) -> AssignmentState:
    fields: dict[str, Any] = {"experiment": name, "epoch": 1, "status": status, "stage": 0, "weights": weights}
    fields |= {"control": "a", "salt": name, "shadows": (), "rolled_back": frozenset(), "on_rollback": "drain"}
    fields |= {
        "layer": None,
        "layer_share": (0.0, 1.0),
        "endpoint": "game",
        "randomize": "session",
        "block_s": 600.0,
        "created": created,
    }
    return AssignmentState(**(fields | more))


def test_what_is_needed_is_what_serves_and_what_may_still_have_sessions():
    now, day = 1e9, 86_400.0
    open_one = state("open", ExperimentStatus.RUNNING, now - day, {"a": 0.5, "b": 0.5})
    won = state("won", ExperimentStatus.PROMOTED, now - 2 * day, {"a": 0.0, "b": 1.0, "c": 0.0})
    stopped = state("stopped", ExperimentStatus.STOPPED, now - 3 * day, {"a": 1.0, "b": 0.0})
    assert needed_arms([open_one, won, stopped], now) == {"open": {"a", "b"}, "won": set(), "stopped": set()}
    assert needed_arms([won, stopped], now) == {"won": {"a", "b"}, "stopped": set()}
    assert needed_arms([won, stopped], now, {"won": now - 60}) == {"won": {"a", "b", "c"}, "stopped": set()}
    draft = state("draft", ExperimentStatus.DRAFT, now, {"a": 1.0, "d": 0.0})
    assert needed_arms([draft, won], now) == {
        "draft": {"a", "d"},
        "won": {"a", "b"},
    }  # which serves until the draft starts
    older = state("older", ExperimentStatus.STOPPED, now - 3 * day, {"a": 1.0, "e": 0.0})
    successor = state("successor", ExperimentStatus.RUNNING, now - 60, {"a": 1.0})
    needed = needed_arms([older, successor, won], now)  # sessions of the last one finish there
    assert (needed["won"], needed["older"]) == ({"a", "b", "c"}, set())
    ended = state(
        "gone", ExperimentStatus.RUNNING, now, {"a": 1.0, "b": 0.0}, rolled_back=frozenset("b"), on_rollback="cut"
    )
    assert needed_arms([ended], now) == {"gone": {"a"}}
