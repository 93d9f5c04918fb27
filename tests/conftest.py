"""Fixtures that tests of several folders share, a local Ray above all, and the order in which tests run."""

import asyncio
import gc
import inspect
import os
import re
import sqlite3
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from processes.environment import NICENESS

from marl_ray.cluster.local_ray import LocalRay, local_ray

SUPPORT = Path(__file__).parent / "support"
"""Packages that tests import: pytest finds them by `pythonpath` in pyproject.toml, processes of the tests by PYTHONPATH."""

gc.set_threshold(1_000_000)  # the collection of tests imports a million objects, all of which stay
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests run side by side, and compute little
# Tests that wait for Ray's workers are the longest, and Ray lets all others go first.
os.environ[NICENESS] = "0"
PATHS = filter(None, [str(SUPPORT / "every_process"), os.environ.get("PYTHONPATH")])
os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)

if TYPE_CHECKING:
    import sqlalchemy as sa

    from marl_ray.config import GatewayConfig


def pytest_collection() -> None:
    """Only processes that collect tests import Hypothesis: the one that hands tests out to others does not."""
    import hypothesis

    # Speed is measured in benchmarks; a busy machine fails no test.
    examples = 400 if "THOROUGH" in os.environ else 40
    hypothesis.settings.register_profile("untimed", deadline=None, max_examples=examples)
    hypothesis.settings.load_profile("untimed")


SHARED_RAY = re.compile(r'^\s*(?:pytestmark = \[?)?pytest\.mark\.shared_ray\("(\w+)"', re.MULTILINE)
END_TO_END = (Path(__file__).parent / "e2e").resolve(strict=True)


@cache
def shared_ray(path: Path) -> str | None:
    """Return the name of the Ray that the tests of a file share, from its mark; None if they need none.

    The process that hands tests out imports no test, so it reads the text.
    """
    mark = SHARED_RAY.search(path.read_text())
    return mark and mark[1]


DESELECTED = re.compile(r"^pytestmark = (?:\[[^\]]*)?pytest\.mark\.(long|slow)\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file all of whose tests are long or slow where `-m` leaves those out."""
    if collection_path.suffix != ".py":
        return None
    mark = DESELECTED.search(collection_path.read_text())
    return True if mark and f"not {mark[1]}" in config.option.markexpr.split(" and ") else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the longest tests begin first: the tests of the shared Rays, then those that are end to end.

    Those that start further Rays come last of a shared Ray's: at the beginning three of them start at once.
    """
    marks = {item: item.get_closest_marker("shared_ray") for item in items}
    for item, mark in marks.items():
        name = mark.args[0] if mark else None
        if name != shared_ray(item.path) or (mark is None and "ray_cluster" in getattr(item, "fixturenames", ())):
            raise pytest.UsageError(
                f'{item.nodeid}: expected pytestmark = pytest.mark.shared_ray("one" or "two") at the top of a file '
                "whose tests use ray_cluster"
            )

    def turn(item: pytest.Item) -> tuple[bool, bool, bool]:
        mark = marks[item]
        return mark is None, bool(mark and mark.kwargs.get("last")), END_TO_END not in item.path.parents

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    """Freeze the million objects loaded by now: no collection looks through them again, and collections are rarer."""
    gc.freeze()
    gc.set_threshold(100_000)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, the files that share a Ray run in one process, and every other file in any.

    xdist's own groups (`--dist loadgroup`) do not work with this release of pytest, which has other ids of tests.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return shared_ray(config.rootpath / file) or file

    config.option.loadscopereorder = False  # in the order of collection
    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which servers were missing for how many tests."""
    from servers.installed import missing_servers

    skipped = terminalreporter.getreports("skipped")
    lines = missing_servers(report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple))
    if lines:
        terminalreporter.section("missing servers")
        for line in lines:
            terminalreporter.line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is an `async def` in its own event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[LocalRay]:
    """A local Ray with four logical CPUs, a dashboard and token authentication; its workers can import the toys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
        with local_ray(num_cpus=4) as ray:
            yield ray


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process alone, for all tests of a module."""
    from marl_ray.training.single_process import process_group

    with process_group():
        yield


@pytest.fixture(scope="session")
def text_bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two bundles of small random language models, by the arm that they are for."""
    from toy_serving.text_gateways import make_text_bundle

    folder = tmp_path_factory.mktemp("text_bundles")
    return {"one": make_text_bundle(folder, 1), "four": make_text_bundle(folder, 4)}


@pytest.fixture
def text_gateway(text_bundles: dict[str, str], tmp_path: Path) -> "GatewayConfig":
    """A gateway with one A/B test of them."""
    from toy_serving.text_gateways import text_config

    return text_config(text_bundles, tmp_path)


@pytest.fixture(scope="session", autouse=True)
def mlflow_tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make the tables of MLflow's databases once in this process, and copy them for each test.

    MLflow makes a database in forty migrations, a second of work for each of hundreds of tests.

    Processes that tests start are as MLflow made them. Those of `test_mlflow_database.py` make databases by its
    migrations, at once and until they are killed; so do the commands and the servers of other tests.
    """
    if "mlflow" not in sys.modules:  # no test that was collected has a registry
        yield
        return
    import sqlalchemy as sa
    from mlflow.store.db import utils

    assert hasattr(utils, "_initialize_tables"), (
        "MLflow has renamed its private function that makes the tables of a database, which the fixture mlflow_tables "
        "replaces: look for its new name in mlflow/store/db/utils.py"
    )
    template, make = tmp_path_factory.mktemp("mlflow") / "empty.db", utils._initialize_tables  # noqa: SLF001  MLflow's

    def initialize(engine: "sa.Engine") -> None:
        if engine.dialect.name != "sqlite":
            make(engine)
            return
        if not template.exists():
            new = sa.create_engine(f"sqlite:///{template}")
            make(new)
            new.dispose()
        filled = sqlite3.connect(template)
        with engine.connect() as connection:
            filled.backup(connection.connection.driver_connection)
        filled.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "_initialize_tables", initialize)
        yield
