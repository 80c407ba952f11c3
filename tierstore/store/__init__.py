"""Names, tiers, leases and generations: the asyncio layer that owns all tier state.

Scope: the modules of a training store, which `training` assembles:
    weights     `weights`, on the device and at rest; `changing`, groups whose weights are updated in place
    gradients   `gradients`, `gradient_memory`, `pieces`
    updates     `updates`, each chunk's trip; `rounds`, `trip_bytes`, `trip_leases`; on the GPU `gpu_updates`, `on_gpu`
    generations `commits` and `manifest_files`; `manifest`, the content of manifests; `team`, the ranks of one store;
                `snapshots`, generations that are kept
    at rest     `store_files`, `slots`, `at_rest`; `layout`, the chunk grid; `stripes`, chunks on several disks
the modules of a store of named tensors, without a model, which `tensors` assembles:
    its bytes   `entries`, `extents`, `routes`, `copies`, `acquired`, `buffers`
    its files   `shelf`; `owner`, the one event loop that may use the store
and the modules that both use: `directories`, `lock`, `names`, `removal`, `verification`, `budget`, `marks`.
Not here: modules and autograd (`train/`), the bytes of pack files (`pack/`), what is placed where (`plan/`).
Owner: the loop thread.
"""
