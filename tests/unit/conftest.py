"""The unit tests run side by side, and what they compute is small: one thread each."""

import torch

torch.set_num_threads(1)
