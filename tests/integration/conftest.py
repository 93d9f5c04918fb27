"""Fixtures that the integration tests share."""

import torch

torch.set_num_threads(1)  # tests run side by side, and what they compute is small
