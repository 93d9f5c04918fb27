"""An MLflow server in its own process, which may be killed and started again on the same data."""

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from waiting import until

from marl_ray.cluster.local_ray import free_port

START_S = 90.0
"""Deadline of the server's first answer, in seconds."""


class MlflowServer:
    """Its address stays the same."""

    def __init__(self, folder: Path):
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.settings = {
            "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{folder}/mlflow.db",
            "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(folder / "artifacts"),
            "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
            "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server's one process; `mlflow server` starts ten."""
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--log-level", "error"]
        command = [sys.executable, "-W", "ignore", "-m", "uvicorn", *place, "mlflow.server.fastapi_app:app"]
        process = self.process = subprocess.Popen(command, env=os.environ | self.settings)
        until(lambda: process.poll() is not None or self.answers(), "MLflow's server to answer", START_S)
        assert process.poll() is None, "MLflow's server has ended"

    def answers(self) -> bool:
        """True if it answers that it is well."""
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                return True
        except OSError:
            return False

    def kill(self) -> None:
        """End the process at once; nothing answers at its address then."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(60)
            self.process = None
