"""The passes of a gradient step exchange as little as the memory allows."""

from processes.two_workers import workers
from toy_runs.exchanges import count_exchanges

from marl_ray.policies.language.sharding.shard import MAX_GATHERED_ONCE_BYTES

GATHERS, SCATTERS, REDUCTIONS = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"


def of_passes(count: int, replicate: int = 1, gathered_once: int = 0) -> tuple[dict[str, int], dict[str, int]]:
    """The exchanges of an update in two passes, and those of an update in four."""
    rows = 8 // count
    sizes = [f"train.micro_batch={rows // passes}" for passes in (2, 4)]
    two, four = (workers(count, count_exchanges, replicate, gathered_once, size) for size in sizes)
    return two, four


def test_the_weights_of_a_small_model_stay_gathered_over_the_passes_of_a_step():
    two, four = of_passes(2)
    assert four[GATHERS] > two[GATHERS]
    kept_two, kept_four = of_passes(2, 1, MAX_GATHERED_ONCE_BYTES)
    assert kept_four[GATHERS] == kept_two[GATHERS] < two[GATHERS]
    assert kept_four[SCATTERS] == four[SCATTERS] == 2 * two[SCATTERS]  # gradients stay sharded


def test_groups_of_workers_add_their_gradients_up_once():
    two, four = of_passes(2, 2)
    assert four[REDUCTIONS] == two[REDUCTIONS] > 0
