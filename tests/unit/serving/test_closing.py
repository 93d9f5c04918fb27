"""A replica closes whole, though its database hangs or a part fails, and one that cannot be made leaves nothing open."""

import os
import threading
from pathlib import Path

import pytest
from stores.migrated import migrate
from toy_serving.gateways import acts_of, gateway_config, serving

from marl_ray.errors import MarlRayError
from marl_ray.serving import service as service_module
from marl_ray.serving.asgi import Gateway


def test_closing_does_not_wait_for_a_write_and_a_change_that_hang(config, monkeypatch, caplog):
    service = Gateway(config, seed=0).service
    begun, gate = threading.Event(), threading.Event()

    def hang(*_, **__):
        begun.set()
        assert gate.wait(60)

    monkeypatch.setattr(service_module, "CLOSE_S", 0.05)
    monkeypatch.setattr(service.unit_reports, "write", hang)
    monkeypatch.setattr(service.stores.experiments, "change", hang)
    service.roll_back(service.endpoints.routers["exp"], "four", "a test")
    assert begun.wait(60)
    closing = threading.Thread(target=service.close, daemon=True)
    closing.start()
    closing.join(30)
    is_closed = not closing.is_alive()
    gate.set()
    assert is_closed
    assert caplog.messages == [
        "failures or costs of sessions are lost: their write has not ended within 0.05 s",
        "a change of an experiment has not ended within 0.05 s",
    ]


def open_files(folder: Path) -> list[str]:
    """The files below a folder that this process has open."""
    targets = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            targets.append(os.readlink(descriptor))
        except FileNotFoundError:  # that of the listing itself
            continue
    return [target for target in targets if target.startswith(str(folder))]


async def test_closing_writes_exposures_and_closes_all_parts_though_one_fails(config, tmp_path, monkeypatch):
    def fail() -> None:
        raise ZeroDivisionError("a defect")

    gateways = []

    async def serve() -> None:
        async with serving(config) as (client, gateway):
            gateways.append(gateway)
            await acts_of(client, ["s0", "s1"])
            monkeypatch.setattr(gateway.service.unit_reports, "write", fail)

    with pytest.raises(ZeroDivisionError, match=r"^a defect$"):
        await serve()
    assert gateways[0].service.exposures.waiting == 0
    assert open_files(tmp_path) == []


def test_a_gateway_that_cannot_be_made_leaves_nothing_open(bundles, tmp_path):
    config = gateway_config(bundles, tmp_path / "x.db", names=("first", "second"))
    hosted = config.experiments[1].model_copy(update={"placement": "deployment"})
    config = config.model_copy(update={"experiments": [config.experiments[0], hosted]})
    migrate(config.database)
    with pytest.raises(MarlRayError) as refusal:  # whose traceback keeps the unfinished service alive
        Gateway(config, seed=0)
    assert str(refusal.value).startswith("experiments.second.placement: deployment needs Ray Serve")
    assert open_files(tmp_path) == []
