"""The experiment store that is only read: it makes nothing, changes nothing, and refuses what it cannot read."""

import re

import pytest
import sqlalchemy as sa
from stores.units import config, exposure, look, over

from marl_ray.errors import MarlRayError
from marl_ray.experiments.database.connections import StoreError
from marl_ray.experiments.database.migrations import VERSION_TABLE
from marl_ray.experiments.store.facade import open_stores


def tables_of(url: str) -> list[str]:
    engine = sa.create_engine(url)
    try:
        return sa.inspect(engine).get_table_names()
    finally:
        engine.dispose()


def test_it_reads_what_others_write_and_refuses_to_write(stores, url):
    stores.units.record_exposures([exposure(f"u{k}", "ab"[k % 2]) for k in range(4)])
    reader = open_stores(url, stores.database.clock, is_read_only=True)
    over(stores)
    assert look(reader).exposed == look(stores).exposed == {1: {"a": 2, "b": 2}}
    assert reader.experiments.names() == ["exp"] and reader.database.settled_at() == stores.database.settled_at()
    with pytest.raises(StoreError, match=r"read-?only"):
        reader.experiments.open("other", config(a=1, b=1))
    assert stores.experiments.names() == ["exp"]
    reader.close()


def test_a_database_without_a_schema_is_refused_and_left_alone(empty_url):
    open_engine = sa.create_engine(empty_url)
    with open_engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE other (name VARCHAR(9))"))
    open_engine.dispose()
    with pytest.raises(MarlRayError, match=r"^database: it has no experiments; expected \d+, which a gateway of this"):
        open_stores(empty_url, is_read_only=True)
    assert tables_of(empty_url) == ["other"]


def test_an_older_database_is_refused_and_not_migrated(url):
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '0007'"))
    with pytest.raises(
        MarlRayError, match=r"^database: its revision 0007 is of an older marl-ray; expected 0008, which"
    ):
        open_stores(url, is_read_only=True)
    with engine.begin() as connection:
        assert connection.execute(sa.text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one() == "0007"
        connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(MarlRayError, match=r"^database: revision 9999 is of a newer marl-ray; expected 0008$"):
        open_stores(url, is_read_only=True)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True, scope="module")
def test_a_file_that_is_not_there_is_not_made(tmp_path, database):
    url = f"{database}:///{tmp_path}/typo/experiments.db"
    with pytest.raises(MarlRayError, match=f"^database '{re.escape(url)}' is not there; a gateway makes its database"):
        open_stores(url, is_read_only=True)
    assert list(tmp_path.iterdir()) == []
