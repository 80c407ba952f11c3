"""Codecs tried on what a new store will hold, before it is made, and the choice for each kind of chunks.

Scope: a sample of the weights on their way into the store, state and gradients like those to come, the rates.
Not here: the decision (`plan/codec_choice.py`); the codecs (`pack/codecs.py`).
Owner: the thread that makes the engine.

[Note: what is tried] Weights are the user's own, rounded as they are stored. The state of a new store is zeros, as
biases are, and its gradients are not there yet: neither shows what will be stored later. So the trial takes what the
Adam kernel makes of these weights in a few steps with normally distributed gradients: mantissas are noise and exponents
lie close together, as in training; frozen weights stay as they are. Measured ratios of LZ4 and Zstandard with
bitshuffle, first in the trial, then for GPT-2 (25 million parameters) after 45 steps: bf16 weights 1.32, 1.34 and 1.32,
1.34; bf16 state 1.11, 1.14 and 1.13, 1.14; fp32 state 1.15, 1.19 and 1.17, 1.19.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.config import Codec, TierConfig
from tierstore.cores import available_cores
from tierstore.io.backend import Backend
from tierstore.io.runtime import Runtime
from tierstore.kernels.adam import AdamCoefficients, init_state, state_bytes_per_element, update
from tierstore.kernels.elements import ELEMENT
from tierstore.measure.disk import Verb, disk_file, incompressible
from tierstore.measure.loads import at_once
from tierstore.pack.codec_rates import COMPRESSING, measure_codec
from tierstore.plan.bandwidth import BandwidthTable
from tierstore.plan.codec_choice import CodecChoice, Conditions, choose_codec
from tierstore.plan.placement import Kind
from tierstore.store.layout import Codecs, GroupSpec, chunk_specs, recorded_codecs
from tierstore.store.manifest import Generation
from tierstore.train.filling import Piece
from tierstore.train.partition import Partition

_SAMPLE_ELEMENTS = 2**20
_CHUNK_ELEMENTS = 2**18
_BLOCK_BYTES, _FILE_BYTES, _LOOK_S = 2**22, 2**26, 0.1
_STEPS = 4
_GRADIENT_SCALE = 1e-3

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def codecs_of(
    tiers: TierConfig,
    generation: Generation | None,
    pieces: Iterable[Piece],
    specs: Sequence[GroupSpec],
    partition: Partition,
    runtime: Runtime,
    clock: Callable[[], float],
) -> tuple[Codecs, Iterable[Piece]]:
    """The codec of each kind: the one that the store names, that was asked for, or that pays; and all the pieces.

    Of several ranks rank 0 decides: all share the packs, and the weights come from rank 0.
    """
    if generation is not None:
        return recorded_codecs(generation.layout), pieces
    if tiers.codec is not Codec.AUTO or not tiers.nvme:
        codec, why = (tiers.codec, "as asked for") if tiers.nvme else (Codec.NONE, "nothing is stored")
        return dict.fromkeys(Kind, CodecChoice(codec, why)), pieces
    taken: deque[Piece] = deque()
    coming = iter(pieces)

    def choose() -> Codecs:
        if not partition.is_first:
            return {}
        return _choose(_sample(coming, taken), specs, tiers, _disk_rates(tiers, runtime), clock)

    chosen = partition.all_succeed("the codecs", choose)[0]
    return chosen, _again(taken, coming)


def _sample(coming: Iterator[Piece], taken: deque[Piece]) -> Floats:
    """Some of the first weights; the pieces that they come from go to `taken`."""
    found = [np.zeros(0, np.float32)]
    while sum(part.size for part in found) < _SAMPLE_ELEMENTS and (piece := next(coming, None)) is not None:
        taken.append(piece)
        part = piece.values.detach().reshape(-1)[: _SAMPLE_ELEMENTS // 4]
        found.append(part.float().cpu().resolve_neg().numpy())
    return np.concatenate(found)[:_SAMPLE_ELEMENTS]


def _again(taken: deque[Piece], coming: Iterator[Piece]) -> Iterator[Piece]:
    while taken:
        yield taken.popleft()
    yield from coming


def _disk_rates(tiers: TierConfig, runtime: Runtime) -> tuple[float, float]:
    """Bytes per second read and written, of all directories at once: from the table, or measured briefly.

    A directory that is not there yet is assumed to be on the disk of the nearest existing one above it.
    """
    if isinstance(tiers.bandwidth, BandwidthTable):
        return tiers.bandwidth.read_bytes_per_s, tiers.bandwidth.write_bytes_per_s
    with contextlib.ExitStack() as stack:
        memory = np.frombuffer(mmap.mmap(-1, tiers.io_threads * _BLOCK_BYTES), np.uint8)
        incompressible(memory)
        there = [next(p for p in (d, *d.absolute().parents) if p.is_dir()) for d in tiers.nvme]
        files = [stack.enter_context(disk_file(path, _FILE_BYTES, memory, Backend())) for path in there]

        def rate(verb: Verb) -> float:
            loads = [file.load(verb, _BLOCK_BYTES, tiers.io_threads) for file in files]
            return sum(runtime.call(at_once, loads, _LOOK_S))

        return rate("read"), rate("write")


def _choose(
    master: Floats,
    specs: Sequence[GroupSpec],
    tiers: TierConfig,
    disk_bytes_per_s: tuple[float, float],
    clock: Callable[[], float],
) -> Codecs:
    cores = min(tiers.io_threads * len(tiers.nvme), available_cores())
    conditions = Conditions(*disk_bytes_per_s, cores, is_overlapped=tiers.device != "cpu")
    largest = max(specs, key=lambda spec: spec.size)
    trained = max((spec for spec in specs if spec.trainable), key=lambda spec: spec.size, default=largest)
    chosen = {}
    for kind in Kind:
        spec = largest if kind is Kind.WEIGHTS else trained
        item_bytes = chunk_specs(kind, [spec], _CHUNK_ELEMENTS)[0].item_bytes
        samples = [
            like_trained(kind, spec.dtype, master[start : start + _CHUNK_ELEMENTS], is_frozen=not spec.trainable)
            for start in range(0, master.size, _CHUNK_ELEMENTS)
        ]
        measured = [measure_codec(codec, item_bytes, samples, spec.dtype, clock) for codec in COMPRESSING]
        chosen[kind] = choose_codec(kind, measured, conditions)
    return chosen


def like_trained(kind: Kind, dtype: str, master: Floats, *, is_frozen: bool = False) -> Bytes:
    """The bytes of a chunk with these weights, as training would leave it. See [Note: what is tried]."""
    noise = np.random.default_rng(0)
    weights, state = _encoded(dtype, master)
    gradient = weights
    for step in range(1, 1 if is_frozen else _STEPS + 1):
        gradient, _ = _encoded(dtype, noise.normal(0, _GRADIENT_SCALE, master.size).astype(np.float32))
        update(dtype, weights, state, gradient, 0, master.size, AdamCoefficients(1e-3, 0.9, 0.999, 1e-8, 0.0, step))
    return {Kind.WEIGHTS: weights, Kind.STATE: state, Kind.GRADIENTS: gradient}[kind].view(np.uint8)


def _encoded(dtype: str, values: Floats) -> tuple[np.ndarray[Any, Any], Bytes]:
    """Values as weights of a dtype, and their state before the first step."""
    weights = np.empty(values.size, ELEMENT[dtype])
    state = np.empty(values.size * state_bytes_per_element(dtype), np.uint8)
    init_state(dtype, values, weights, state)
    return weights, state
