"""Empty databases of the kinds that the experiment store runs on: every test here runs on SQLite and on PostgreSQL."""

import shutil
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import sqlalchemy as sa
from clocks import Clock
from processes.faults import postgres
from stores.units import NOW, config

from marl_ray.experiments.store.facade import Stores, open_stores


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    """The kind of database; a file whose tests are of one kind alone parametrizes it."""
    return str(request.param)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL server of the tests' own, in a temporary folder, on a socket in that folder."""
    with postgres() as server:
        yield server.url


@pytest.fixture(scope="module")
def make_database(
    database: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str | None], str]:
    """A function that makes a database, empty or a copy of the one at a URL, and returns its URL."""
    return (
        _on_sqlite(tmp_path_factory) if database == "sqlite" else _on_postgres(request.getfixturevalue("postgres_url"))
    )


def _on_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], str]:
    folder, number = tmp_path_factory.mktemp("databases"), count()

    def make(template: str | None) -> str:
        (folder / (name := f"deep{next(number)}")).mkdir()
        url = f"sqlite:///{folder}/{name}/experiments.db"
        if template is not None:
            shutil.copy(str(sa.make_url(template).database), str(sa.make_url(url).database))
        return url

    return make


NUMBERS = count()
"""The numbers of the server's databases, which several files make."""


def _on_postgres(server: str) -> Callable[[str | None], str]:
    url = sa.make_url(server)

    def make(template: str | None) -> str:
        name, source = f"test{next(NUMBERS)}", sa.make_url(template).database if template else "template1"
        admin = sa.create_engine(url.set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
        with admin.connect() as connection:
            connection.execute(sa.text(f"CREATE DATABASE {name} TEMPLATE {source}"))
        admin.dispose()
        return url.set(database=name).render_as_string()

    return make


@pytest.fixture(scope="module")
def make_url(make_database: Callable[[str | None], str]) -> Callable[[], str]:
    """A function that makes a database of the newest schema, with nothing in it, and returns its URL."""
    migrated = make_database(None)
    open_stores(migrated).close()  # once: migrations take up to half a second
    return lambda: make_database(migrated)


@pytest.fixture
def url(make_url: Callable[[], str]) -> str:
    """A database of the newest schema, with nothing in it."""
    return make_url()


@pytest.fixture
def empty_url(make_database: Callable[[str | None], str]) -> str:
    """A database without a schema."""
    return make_database(None)


@pytest.fixture
def stores(url: str) -> Iterator[Stores]:
    """A store with the experiment `exp` of two arms, whose clock a test moves."""
    stores = open_stores(url, Clock(NOW))
    stores.experiments.open("exp", config(a=1, b=1))
    yield stores
    stores.close()
