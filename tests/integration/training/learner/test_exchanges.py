"""The passes of a gradient step exchange as little as the memory allows."""

from processes.two_workers import workers
from toys.exchanges import counted

GATHERS, SCATTERS, REDUCTIONS = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"


def of_passes(count: int, replicate: int = 1, *overrides: str) -> tuple[dict[str, int], dict[str, int]]:
    """The exchanges of an update in two passes, and those of an update in four."""
    rows = 8 // count
    sizes = [f"train.micro_batch={rows // passes}" for passes in (2, 4)]
    two, four = (workers(count, counted, replicate, size, *overrides) for size in sizes)
    return two, four


def test_weights_stay_gathered_over_the_passes_of_a_step_if_that_is_asked_for():
    two, four = of_passes(2)
    assert four[GATHERS] > two[GATHERS]
    kept_two, kept_four = of_passes(2, 1, "team.speaker.model.keep_gathered=true")
    assert kept_four[GATHERS] == kept_two[GATHERS] < two[GATHERS]
    assert kept_four[SCATTERS] == four[SCATTERS] == 2 * two[SCATTERS]  # gradients stay spread


def test_groups_of_workers_add_their_gradients_up_once():
    two, four = of_passes(2, 2)
    assert four[REDUCTIONS] == two[REDUCTIONS] > 0
