#!/usr/bin/env python3
"""A GPT-2 training step of DeepSpeed ZeRO-3 with state in CPU memory or on disk.

`mode`: `cpu`, `optimizer` (its state on disk) or `all` (weights too). A step ends when `engine.step()` has returned:
nothing is made durable, and there is no checkpoint in it.

[Note: its settings] Those of its fastest step with all state on disk and, among equally fast ones, the least memory.
Tried on GPT-2 124M, 1 x 64 tokens, 2 cores, DeepSpeed 0.19.8, 2026-11-22; seconds are medians of 3 rounds of 2 steps (2
rounds with `sub_group_size` 1e8). A has 64 buffers for parameters and no limit of live ones; B, used here, 24 and 5e7.
    in one run: A 4.05 s, 10.5 GB; B 3.99 s, 6.9 GB
    in one run: A 3.75 s, 10.4 GB; A with pinned memory 4.12 s, 10.8 GB
    A again 3.78 s, 10.1 GB; A with `sub_group_size` 1e8 3.78 s, 14.6 GB; A without the pipeline 4.06 s, 9.1 GB
    A with aio's `intra_op_parallelism` 4 3.88 s, 10.1 GB
    A with aio blocks of 8 MiB, `queue_depth` 8 and no `overlap_events` 3.83 s, 10.6 GB
    8 buffers, 2e7 live parameters and a prefetch bucket of 1e7 4.18 s, 5.6 GB
    ended in an AssertionError: A with 24 or 40 buffers; A with 5 buffers for the optimizer; A with `sub_group_size` 4e7
    and a prefetch bucket of 2e8; B with the aio of 8 MiB
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterator
from typing import Any

from serve import Round, serve


@contextlib.contextmanager
def contend(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    import torch  # before the options are read, so that a missing package is told first

    device, store, steps = options["device"], options["store"], options["steps"]
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()), RANK="0", LOCAL_RANK="0",
                      WORLD_SIZE="1", LOCAL_SIZE="1")  # fmt: skip
    import deepspeed
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, use_cache=False, **options["fields"])
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (options["batch"], options["sequence"]), generator=generator)
    tokens = tokens.to(device)
    os.makedirs(store)
    settings = _settings(options["mode"], store, options["batch"], options["dtype"], pinned=device != "cpu")
    try:
        deepspeed.init_distributed("gloo" if device == "cpu" else "nccl")
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = GPT2LMHeadModel(config)
        engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=model.parameters())

        def step() -> None:
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            loss.item()

        def run_round(number: int) -> tuple[float, dict[str, float]]:
            step()
            begun_s = time.perf_counter()
            for _ in range(steps):
                step()
            return (time.perf_counter() - begun_s) / steps, {}

        yield {"versions": {"torch": torch.__version__, "deepspeed": deepspeed.__version__}}, run_round
    finally:
        shutil.rmtree(store, ignore_errors=True)


def _settings(mode: str, store: str, batch: int, dtype: str, *, pinned: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": 3, "contiguous_gradients": True, "overlap_comm": True, "reduce_bucket_size": 5e7,
        "stage3_prefetch_bucket_size": 5e7, "sub_group_size": int(2e7), "stage3_param_persistence_threshold": 1e4,
    }  # fmt: skip
    disk = {"device": "nvme", "nvme_path": store, "pin_memory": pinned}
    if mode == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
    else:
        zero["offload_optimizer"] = disk | {"buffer_count": 16, "pipeline_read": True, "pipeline_write": True}
    if mode == "all":
        zero["offload_param"] = disk | {"buffer_count": 24, "buffer_size": int(4e7), "max_in_cpu": 0}
        zero |= {"stage3_max_live_parameters": 5e7, "stage3_max_reuse_distance": 5e7}
    return {
        "train_micro_batch_size_per_gpu": batch, "zero_optimization": zero, "bf16": {"enabled": dtype == "bf16"},
        "gradient_clipping": 1.0, "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True,
                "intra_op_parallelism": 1},
    }  # fmt: skip


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    serve(contend)
