"""Stops the Serve of a cluster that tests share."""

from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from waiting import until

from marl_ray.ray_seams import dashboard_client


def undeploy(dashboard_url: str, timeout_s: float = 60.0) -> None:
    """Delete all applications, stop Serve and wait until it is gone."""
    client = dashboard_client(ServeSubmissionClient, dashboard_url, timeout_s)
    client.delete_applications()

    def running() -> list[str]:
        """Return what still runs. Without applications a controller that ends still takes configs, and forgets them."""
        details = client.get_serve_details()
        controller = ["the controller"] if details.get("controller_info", {}).get("actor_id") else []
        return [*details["applications"], *controller]

    until(lambda: not running(), "the end of Serve", timeout_s, running, look_s=0.25)
