"""What every rank needs, loaded once: a new rank is a fork of the process that has imported this."""

from tierstore.garbage import loading

with loading():  # a collection in a fork would look at all of this, and thereby copy it
    import reducing  # noqa: F401  # what most ranks run
    import sharing  # noqa: F401
    import torch._dynamo  # noqa: F401  # every optimizer imports it, which takes two seconds
    import zero_models  # noqa: F401
    from transformers import GPT2LMHeadModel  # noqa: F401  # the model of `tierstore train`, which takes as long

    import tierstore.apps.train  # and the engine
    import tierstore.cli.commands  # noqa: F401
    from tierstore.kernels import warm_up

    warm_up({"fp32", "bf16"})
