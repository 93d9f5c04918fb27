"""Multi-agent constrained policy optimisation (Gu et al. 2021, arXiv 2110.02793, alg. 1).

Every policy takes CPO's step (`cpo.py`), one after another, on A and C_k times M, the change of the joint action's
probability by the policies updated before it (`happo.py`), with central critics. All policies share
the team's budget. Each step may use what the earlier steps left of it: the violation is computed again with the cost
change that the earlier policies' steps are expected to make.
"""

from marl_ray.algorithms.advantages.batch_gae import gae_advantages
from marl_ray.algorithms.constrained.cpo import surrogate
from marl_ray.algorithms.definition import Algorithm
from marl_ray.config import SPECS

MACPO = Algorithm("macpo", SPECS["macpo"], gae_advantages, surrogate)
