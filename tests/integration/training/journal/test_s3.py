"""The journal of a run in an object store."""

from collections.abc import Iterable, Mapping

from servers.object_store import object_store
from toy_runs.runs import config

from marl_ray.stored_files import appended_file as files
from marl_ray.stored_files.appended_file import parts_of
from marl_ray.training.journal.deliveries import Deliveries
from marl_ray.training.journal.delivery import Mark, read_mark
from marl_ray.training.journal.follower import Follower
from marl_ray.training.journal.writer import Journal, write_failure
from marl_ray.training.run_folder.metrics_file import METRICS_FILE, iteration_of, read_metrics
from marl_ray.training.run_folder.record import filesystem_of
from marl_ray.training.run_folder.run_log import RunLog


def test_a_run_on_an_object_store_is_followed_and_delivered_while_its_workers_start_again(monkeypatch, capsys):
    class Taker:
        """Keeps the iterations that it gets."""

        def __init__(self) -> None:
            self.iterations: list[int] = []

        def log(self, rows: Iterable[Mapping[str, float]]) -> None:
            self.iterations += map(iteration_of, rows)

        def end(self, status: str) -> None: ...

    monkeypatch.setattr(files, "PART_BYTES", 2000)
    monkeypatch.setattr(files, "UPLOAD_S", 0.2)
    with object_store() as bucket:
        run = config(f"storage={bucket}/runs", "tracking.uri=sqlite:///none.db")
        filesystem, folder = filesystem_of(run)
        taker, console = Taker(), RunLog(run)
        deliveries = Deliveries(run, "id", filesystem, folder, console.say, {"taker": taker}, names=["taker"])
        follower = Follower(run, filesystem, folder, console)
        for after, last in ((None, 60), (40, 90), (90, 120)):
            journal = Journal(filesystem, folder)
            journal.begin(after)
            journal.say(f"a line after {after}")
            for iteration in range(0 if after is None else after + 1, last + 1):
                journal.write_row({"iteration": iteration, "steps": 32 * iteration, "return": iteration / 2})
            journal.close()
            write_failure(filesystem, folder, {1: ConnectionError(f"lost at {last}")})
        assert [iteration_of(row) for row in read_metrics(filesystem, folder)] == list(range(121))
        follower.close()
        deliveries.close("FINISHED", wait_s=20)
        assert taker.iterations == list(range(121))
        assert read_mark(filesystem, folder, "taker") == Mark(121, ended="FINISHED", iteration=120)
        sizes = [info.size for info in parts_of(filesystem, f"{folder}/{METRICS_FILE}")]
        assert len(sizes) > 3 and max(sizes) <= 2000
    printed = capsys.readouterr().err
    assert "toy: a line after 90" in printed and "121 rows" not in printed
