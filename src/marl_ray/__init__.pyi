from marl_ray.api.client import ActResult as ActResult
from marl_ray.api.client import Client as Client
from marl_ray.api.comparing import RunComparison as RunComparison
from marl_ray.api.comparing import compare as compare
from marl_ray.api.evaluating.benchmarks import BenchmarkResult as BenchmarkResult
from marl_ray.api.evaluating.call import evaluate as evaluate
from marl_ray.api.evaluating.episodes import EpisodeScores as EpisodeScores
from marl_ray.api.sweeping import sweep as sweep
from marl_ray.api.teams import LoadedTeam as LoadedTeam
from marl_ray.api.teams import load as load
from marl_ray.api.training import TrainedRun as TrainedRun
from marl_ray.api.training import train as train
from marl_ray.errors import MarlRayError as MarlRayError

__version__: str
