"""The experiment store on SQLite: its files, and the plans of its queries."""

import pytest
import sqlalchemy as sa
from stores.statements import noted_statements
from stores.units import exposure, look, over

from marl_ray.errors import MarlRayError
from marl_ray.experiments.store.facade import open_stores


def test_folders_of_the_file_are_made(tmp_path):
    open_stores(f"sqlite:///{tmp_path}/deep/er/experiments.db").close()
    assert (tmp_path / "deep/er/experiments.db").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "expected an SQLAlchemy URL"),
        ("sqlite://", "SQLite needs a file"),
        ("mysql://localhost/x", "expected sqlite or postgresql, got 'mysql'"),
        ("sqlite:////proc/nothing/here.db", "cannot be opened"),
    ],
)
def test_unusable_databases_are_one_line(url, message):
    with pytest.raises(MarlRayError, match=message):
        open_stores(url)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True, scope="module")
def test_a_look_that_goes_on_reads_its_units_by_an_index(stores, url):
    stores.units.record_exposures([exposure(f"u{k}", "ab"[k % 2]) for k in range(50)])
    over(stores)
    look(stores)
    with noted_statements() as statements:
        stores.units.record_exposures([exposure("new", "a")])
        over(stores)
        look(stores)
    plans, planner = [], sa.create_engine(url)
    with planner.connect() as connection:
        for statement, parameters in statements:
            if "first_at" in statement or "exposures" not in statement or statement.startswith("INSERT"):
                continue
            steps = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
            plans.append("; ".join(step[-1] for step in steps))
    planner.dispose()
    assert len(plans) == 4
    for plan in plans[1:]:
        assert "SCAN exposures" not in plan and "SCAN outcomes" not in plan and "SCAN unit_metrics" not in plan, plan
    for plan in plans[2:]:
        assert "exposures_as_stored (experiment=? AND stored_at>? AND stored_at<?)" in plan, plan
        assert "(experiment=? AND rowid>?)" in plan and "(experiment=? AND unit=?" in plan, plan
