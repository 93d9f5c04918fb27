"""A replica closes though its database hangs."""

import threading

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
