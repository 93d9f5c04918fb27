"""Stops the Serve of a cluster that tests share."""

import time

from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from marl_ray.ray_seams import dashboard_client


def undeploy(dashboard_url: str, timeout_s: float = 60.0) -> None:
    """Delete all applications, stop Serve and wait until it is gone."""
    deadline = time.monotonic() + timeout_s
    client = dashboard_client(ServeSubmissionClient, dashboard_url, timeout_s)
    client.delete_applications()
    while True:
        details = client.get_serve_details()
        # Without applications a controller that ends still takes configs, and forgets them.
        if not details["applications"] and not details.get("controller_info", {}).get("actor_id"):
            return
        running = ", ".join(details["applications"]) or "the controller"
        assert time.monotonic() < deadline, f"after {timeout_s:g} s Serve still runs: {running}"
        time.sleep(0.25)
