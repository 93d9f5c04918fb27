"""Fixtures that the integration tests share."""

import pytest
import torch

torch.set_num_threads(1)  # tests run side by side, and what they compute is small
pytest.register_assert_rewrite("processes.interrupted_runs")  # so its asserts show what they compare
