"""What every rank needs, loaded once: a new rank is a fork of the process that has imported this."""

import torch._dynamo  # noqa: F401  # every optimizer imports it, for two seconds

import tierstore.train.engine  # noqa: F401
from tierstore.kernels import warm_up

warm_up({"fp32", "bf16"})
