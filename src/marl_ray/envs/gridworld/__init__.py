"""The gridworlds of the `multigrid` package, compiled, one copy or many at once."""

import warnings

# Of pygame, which multigrid imports: else it is the first line that a newcomer reads.
warnings.filterwarnings("ignore", "pkg_resources is deprecated", module="pygame")
