"""The synchronous floor that knows modules and ranks: the engine, and what can be used without it.

Scope: the engine, by what its modules do:
    calls       `engine`, its public face; `call_order`, what may be called when; `steps`, what happens then;
                `micro_batches` and `vertical`; `meters` and `report`; `whole`, the weights from outside
    making      `options`, `assembly`, `opening`, `budgets` and `sizing`, `codec_trial`, `filling`
    weights     `groups`, with `overlaps` and `stand_ins`; `access`, `moves`, `hooks`, `guard`, `depth`
    gradients   `backward`, `graph`, `handover`
    updates     `parameter_groups`, `optimizer`, `rounds`
    ranks       `ranks`, `partition`, `gathering`, `reduction`
    generations `generations`, `given`, `capture`
and beside the engine, each usable alone: models and their files (`materialize` with `deferred/`, `checkpoints` with
`checkpoint_files` and `conversion`), batches (`loading`), `cpu_adam`, and `data_parallel/`; shared by these and the
engine: `owners` of parameters, and `newcomers`.
Not here: anything that waits on the loop (`store/`); commands (`apps/`).
Owner: the thread that trains.
"""
