"""One thread a test process: the models are tiny, and several test processes may run side by side."""

import torch

torch.set_num_threads(1)
