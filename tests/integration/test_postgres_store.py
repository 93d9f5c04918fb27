"""The experiment store on PostgreSQL: a server of the tests' own, in a temporary folder, on a socket in that folder."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import sqlalchemy as sa
from state_cases import *  # noqa: F403
from store_cases import *  # noqa: F403
from store_cases import config, exposure, look

from marl_ray.experiments.statistics import Summary
from marl_ray.experiments.store import ExperimentStore

START_S = 60


def _binaries() -> Path:
    """Where initdb and pg_ctl are, or a skipped test."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not folders or not (folders[-1] / "initdb").exists():
        pytest.skip("no PostgreSQL server here: on Debian, as root, tests/need_servers.sh installs it")
    return folders[-1]


def _user() -> str | None:
    """PostgreSQL refuses to run as root: then it runs as another user, else as this one."""
    if os.getuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"


@pytest.fixture(scope="module")
def server() -> Iterator[Path]:
    """The folder with the socket of a running server."""
    binaries, user = _binaries(), _user()
    # Not pytest's own folder, which other users cannot enter.
    folder = Path(tempfile.mkdtemp(prefix="marl-ray-pg-"))

    def run(*command: str) -> None:
        extra = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []} if user else {}
        with (folder / "commands.log").open("a") as log:
            done = subprocess.run(command, cwd=folder, stdout=log, stderr=log, timeout=START_S, **extra)
        assert done.returncode == 0, (folder / "commands.log").read_text()

    try:
        if user:
            shutil.chown(folder, user, pwd.getpwnam(user).pw_gid)
        data, control = str(folder / "data"), str(binaries / "pg_ctl")
        run(str(binaries / "initdb"), "-D", data, "-U", "marl", "-A", "trust", "-E", "UTF8", "--no-sync")
        # No TCP port, hence none that could be taken; and nothing here has to survive a power cut.
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        run(control, "-D", data, "-l", str(folder / "server.log"), "-w", "-t", str(START_S), "-o", options, "start")
        try:
            yield folder
        finally:
            run(control, "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def make_url(server: Path) -> Iterator[Callable[[], str]]:
    admin = sa.create_engine(f"postgresql+psycopg://marl@/postgres?host={server}", isolation_level="AUTOCOMMIT")
    number = count()

    def make() -> str:
        name = f"test{next(number)}"
        with admin.connect() as connection:
            connection.execute(sa.text(f"CREATE DATABASE {name}"))
        return f"postgresql://marl@/{name}?host={server}"

    yield make
    admin.dispose()


def test_a_look_misses_nothing_of_transactions_that_end_in_another_order(url):
    store = ExperimentStore(url)
    store.open_experiment("exp", config(a=1, b=1))
    slow = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    columns = "experiment, unit, arm, epoch, propensity, first_at"
    insert = f"INSERT INTO exposures ({columns}) VALUES ('exp', 'slow', 'a', 1, 0.5, 0)"
    with slow.connect() as connection:
        begun = connection.begin()
        connection.execute(sa.text(insert))
        for k in range(3):
            store.record_exposures([exposure(f"u{k}", "a")])
            store.record_outcome("exp", f"u{k}", float(k))
            # What comes after the oldest open transaction is there, and not counted twice.
            assert look(store).exposed == {1: {"a": k + 1}}
            assert look(store).values["outcome"]["a"].n == k + 1
        begun.commit()
    slow.dispose()
    assert look(store).exposed == {1: {"a": 4}}
    store.record_outcome("exp", "slow", 4.0)
    assert look(store).values["outcome"]["a"] == Summary(4, 1.75, pytest.approx(35 / 12))
    store.close()
