"""What tests across packages share."""

import sqlite3
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
import torch
from mlflow.store.db import utils

torch.set_num_threads(1)  # tests run side by side, and what they compute is small


@pytest.fixture(scope="session", autouse=True)
def mlflow_tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """MLflow makes a database in forty migrations, a second of work: in this process it makes one, and others are copies."""
    template, make = tmp_path_factory.mktemp("mlflow") / "empty.db", utils._initialize_tables

    def initialize(engine: sa.Engine) -> None:
        if engine.dialect.name != "sqlite":
            return make(engine)
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
