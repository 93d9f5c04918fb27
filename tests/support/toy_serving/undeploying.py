"""Stops the Serve of a cluster that tests share."""

import time

from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from marl_ray.ray_seams import dashboard_client


def undeploy(dashboard_url: str, timeout_s: float = 60.0) -> None:
    """Delete all applications, stop Serve and wait until it is gone."""
    deadline = time.monotonic() + timeout_s
    client = dashboard_client(ServeSubmissionClient, dashboard_url, timeout_s)
    client.delete_applications()
    while left := client.get_serve_details()["applications"]:
        assert time.monotonic() < deadline, f"after {timeout_s:g} s these applications still run: {', '.join(left)}"
        time.sleep(0.25)
