"""Parts that the short try and the demo share, from their folder to the deployment of their gateway."""

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console

from marl_ray.errors import MarlRayError, one_line_without

ENDPOINT = "gridworld"
"""Name that clients act on."""
KEYS_FILE = "keys.yaml"
"""Name of the file of API keys."""
DEPLOY_S = 120.0
"""Maximum seconds for the deployment of the gateway."""


def plain_console() -> Console:
    """Return a console for stdout that is 120 characters wide where there is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def new_folder(folder: Path) -> Path:
    """Make and return `folder`/TIME. Raises MarlRayError if the folder is a run's or a sweep's, or cannot be made."""
    from pyarrow import fs

    from marl_ray.stored_files.folder_kinds import is_of_driver

    dated_folder = (folder / time.strftime("%Y%m%d-%H%M%S")).resolve()
    try:
        if dated_folder.parent.is_dir() and is_of_driver(fs.LocalFileSystem(), str(dated_folder.parent)):
            raise MarlRayError(f"--folder: {str(folder)!r} is that of a run or a sweep; expected another")
        dated_folder.mkdir(parents=True)
    except OSError as error:
        reason = one_line_without(error, dated_folder)
        raise MarlRayError(f"--folder: {str(dated_folder)!r} cannot be made: {reason}") from error
    return dated_folder


@contextlib.contextmanager
def timed_step(console: Console, title: str) -> Iterator[None]:
    """Print the title of what the block does, and then the seconds that it took."""
    console.print(f"[bold]{title}[/bold] ...")
    start = time.perf_counter()
    yield
    console.print(f"  done in {time.perf_counter() - start:.1f} s")


def serve_until_interrupted() -> None:
    """Print that this process serves, and return at Ctrl-C."""
    print("serving until Ctrl-C", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


def deploy_endpoint(folder: Path, dashboard_url: str, experiment: Mapping[str, object]) -> str:
    """Deploy a gateway with one experiment, and return its URL.

    The gateway's data lie in `folder` beside the MLflow database and the file of keys.
    """
    from marl_ray.cluster.local_ray import free_port
    from marl_ray.serving.administration.deploy import deploy

    deployed = deploy(
        {
            "http_options": {"host": "127.0.0.1", "port": free_port()},
            "applications": [
                {
                    "name": "gateway",
                    "route_prefix": "/",
                    "import_path": "marl_ray.serving.app:build",
                    "args": {
                        "experiments": [{"name": ENDPOINT, **experiment}],
                        "database": f"sqlite:///{folder}/experiments.db",
                        "tracking_uri": f"sqlite:///{folder}/mlflow.db",
                        "api_keys": str(folder / KEYS_FILE),
                        "spool": str(folder / "spool"),
                    },
                }
            ],
        },
        dashboard_url,
        DEPLOY_S,
    )
    return deployed.urls["gateway"]
