"""Decisions as plain functions on plain data.

Scope: the modules, by what they decide or predict:
    where       `tiers`, on the records of `placement`; `working_set`, `gpu_room`, `one_memory`; `schedules`
    when        `residency` and `prefetch`; `order`, for a checkpoint
    a step      `step_model`, the engine on paper: `step_store`, `step_machine`, `step_record`, `events`; `tuning`
    a run       `strategies` and `advice`: `step_time`, `memory`, `model_size`, `layers`, `machine`
    reductions  `buckets`, `cost_model`, `diagnosis`
    codecs      `codec_choice`, `archive_codec`
    formulas    `costs`, `simulate`; `bandwidth`, the measured rates that the other modules take as input
Not here: torch, threads, clocks, files; the code that carries out a decision.
Owner: the running engine and the simulator both call the policies of this package.
"""
