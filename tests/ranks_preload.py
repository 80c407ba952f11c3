"""What every rank needs, loaded once: a new rank is a fork of the process that has imported this."""

import torch.distributed  # noqa: F401

import tierstore.train.engine  # noqa: F401
from tierstore.kernels import warm_up

warm_up({"fp32", "bf16"})
