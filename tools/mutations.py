"""The safeguards of the package, the code that replaces each, and the test that then fails.

Not here: taking them out and running the tests (`mutate.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """One safeguard less.

    Attributes:
        place: a file below `tierstore/`, and the function.
        text: the safeguard, which stands there exactly once.
        test: below `tests/`; fails without the safeguard.
        becomes: the text that replaces it.
    """

    name: str
    place: str
    text: str
    test: str
    becomes: str = "pass"

    @property
    def path(self) -> Path:
        return Path("tierstore", self.place.split()[0])

    def of(self, source: str) -> str:
        """The mutated source.

        Raises:
            ValueError: the text is not there exactly once, or nothing that compiles is left.
        """
        lines = source.splitlines(keepends=True)
        first, last = _lines_of(ast.parse(source), self.place.split()[1])
        function = "".join(lines[first:last])
        if (count := function.count(self.text)) != 1:
            raise ValueError(f"{self.name}: {count} times in {self.place}, not once: {self.text!r}")
        mutated = "".join([*lines[:first], function.replace(self.text, self.becomes), *lines[last:]])
        try:
            compile(mutated, self.path, "exec")
        except SyntaxError as error:
            raise ValueError(f"{self.name}: {self.path} does not compile any more: {error}") from None
        return mutated


def _lines_of(tree: ast.AST, name: str) -> tuple[int, int]:
    """First and last line of a function or class, counted from 0, the last one not included."""
    lines = (0, 0)
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = next((node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == part), None)
        if found is None:
            raise ValueError(f"there is no {name} any more")
        tree, lines = found, (found.lineno - 1, found.end_lineno or found.lineno)
    return lines


def never(name: str, place: str, condition: str, test: str) -> Mutation:
    """A mutation under which the code below a condition does not run."""
    return Mutation(name, place, condition, test, "if False:")


ON_GPU = "train/test_state_on_gpu.py"
VIEWED = "train/test_zero.py::test_a_view_that_somebody_holds_of_weights_shows_them"
HANGS = "store/test_bounded_time.py::test_any_hang_of_a_tensor_store_is_told_and_nothing_is_lost"
POWER_CUT = "store/test_power_cut.py"
OVERWRITTEN = "store/test_power_cut.py::test_no_chunk_that_the_last_generation_needs_is_written"
ARCHIVE_CUT = "archive/test_power_cut.py"
AROUND = "train/test_around_the_loop.py"
BROKEN_OFF = "train/test_clean.py::TestAnExceptionInTheMiddleOfAStep"
TENSORS_CUT = "store/test_tensors_faults.py::test_killed_anywhere_the_last_generation_and_the_one_before_are_whole"

MUTATIONS: Sequence[Mutation] = (
    # Files, small and large.
    Mutation(
        "fdatasync of a file", "io/block_file.py BlockFile.datasync",
        "self._backend._call_fdatasync(descriptor, self.path)", POWER_CUT,
    ),
    Mutation(
        "a failed fdatasync is remembered", "io/block_file.py BlockFile.datasync", "self._sync_failure is not None",
        "io/test_backend.py::test_a_failed_datasync_is_never_retried", "False",
    ),
    Mutation("fsync of a file", "io/backend.py Backend.fsync_file", "self._call_fsync(descriptor, path)", POWER_CUT),
    Mutation(
        "fsync of a directory", "io/backend.py Backend.sync_directory", "self.fsync_file(descriptor, path)",
        POWER_CUT,
    ),
    Mutation(
        "a short transfer goes on", "io/block_file.py BlockFile._transfer", "if done + moved >= required:",
        "io/test_backend.py::test_each_fault_at_each_transfer", "if moved:",
    ),
    Mutation(
        "a new file is nobody's yet", "io/backend.py Backend.create", " | os.O_EXCL",
        "io/test_backend.py::TestDirect", "",
    ),
    Mutation(
        "space is allocated first", "io/backend.py Backend._allocate",
        "self._call_allocate(descriptor, begin, offset - begin, path)", "io/test_backend.py::TestDirect",
    ),
    Mutation(
        "a file that failed is removed", "io/backend.py Backend.create", "self._call_unlink(path)",
        "io/test_backend.py::test_each_fault_while_creating_leaves_nothing",
    ),
    Mutation(
        "close waits for transfers", "io/block_file.py BlockFile.close", " and self._users == 0",
        "io/test_backend.py::test_close_waits_for_the_transfer_in_flight", "",
    ),
    Mutation(
        "fsync before a rename", "io/backend.py Backend.write_file", "self.fsync_file(descriptor, path)", POWER_CUT,
    ),
    Mutation(
        "fsync of the directory after a rename", "io/files.py replace_file", "backend.sync_directory(path.parent)",
        POWER_CUT,
    ),
    Mutation(
        "small files are replaced by a rename", "io/files.py temporary", 'path.with_name(path.name + ".tmp")',
        POWER_CUT, "path",
    ),
    Mutation(
        "a link is not followed", "io/backend.py Backend.write_file", " | os.O_NOFOLLOW",
        "io/test_files.py::test_a_link_is_not_followed", "",
    ),
    Mutation(
        "small files are private", "io/backend.py Backend.write_file", "os.fchmod(descriptor, mode)",
        "io/test_files.py::test_round_trip_and_mode",
    ),
    Mutation(
        "a cancelled write goes to its end", "store/manifest_files.py Manifests._in_thread", "to_the_end",
        "store/test_manifest_files.py::TestManifests::test_a_cancellation_waits_for_the_end_of_the_write", "",
    ),
    # Memory and threads.
    Mutation("a lease ends once", "io/memory.py Lease.free", "self._array = None", "io/test_memory.py"),
    Mutation(
        "a cancelled waiter's lease goes on", "io/memory.py Pool._wait", "waiter.future.result().free()",
        "io/test_memory.py::test_what_was_granted_to_a_cancelled_waiter_goes_to_the_next",
    ),
    Mutation(
        "leased memory stays mapped", "io/memory.py Arena.close", "not leaked and ",
        "io/test_memory.py::test_close_names_leaks_fails_waiters_and_keeps_leased_memory", "",
    ),
    Mutation(
        "a job cannot be cancelled", "io/workers.py Job.cancel", "return False",
        "io/test_workers.py::test_awaiting_a_job_holds_cancellation_back", "return super().cancel(msg)",
    ),
    Mutation(
        "lease of a codec's scratch", "store/slots.py ChunkIO.run", "scratch.free()",
        "store/test_tensors.py::test_every_dtype_and_shape_on_every_tier_and_after_reopening",
    ),
    Mutation("lease of an update", "store/trip_leases.py TripLeases.give_back", "trip.lease.free()", POWER_CUT),
    Mutation(
        "places of gradients come back", "store/trip_leases.py TripLeases.recall", "self._recall(self._in_places)",
        "train/test_out_of_turn.py::test_places_of_gradients_come_back_in_whatever_order_they_are_needed",
    ),
    Mutation(
        "places are moved to the order of backward", "store/gradient_memory.py GradientMemory.arrange",
        "self._places = self._make_places()",
        "train/test_out_of_turn.py::test_places_of_gradients_come_back_in_whatever_order_they_are_needed",
    ),
    Mutation(
        "an update waits for no load of the next step's backward", "store/updates.py UpdatePipeline._apply",
        "one.number >= round_.number",
        "store/test_trips_out_of_order.py::"
        "test_an_update_does_not_wait_for_a_load_behind_updates_of_the_next_step", "one is round_",
    ),
    Mutation(
        "who waited on a trip that gives way is looked after", "store/trip_leases.py TripLeases.give_back",
        "self.recall()",
        "store/test_trips_out_of_order.py::test_a_trip_whose_gradient_came_after_it_was_recalled_goes_on",
    ),
    Mutation(
        "what backward has left is updated as forward needs it", "store/updates.py UpdatePipeline.decide",
        "self._leases.rearrange(round_)",
        "store/test_trips_out_of_order.py::test_what_backward_has_left_is_updated_as_the_next_forward_needs_it",
    ),
    Mutation(
        "a speculative step tells the order of the next forward", "train/rounds.py RoundDriver.begin",
        "then=tuple(dict.fromkeys(visits)) if self.is_speculating else (),",
        "train/test_out_of_turn.py::test_what_backward_leaves_is_left_in_the_order_of_the_next_forward", "",
    ),
    Mutation(
        "an update comes after a load that is on its way", "store/updates.py UpdatePipeline._apply",
        "await self._weights.arrived(group, chunk)",
        "store/test_trips_out_of_order.py::test_an_update_comes_after_a_load_that_is_on_its_way",
    ),
    Mutation(
        "a step gives way to the one before", "store/trip_leases.py TripLeases.will_go",
        " and not self.is_owed(round_)",
        "store/test_trips_out_of_order.py::test_a_trip_gives_way_to_one_of_the_step_before", "",
    ),
    Mutation(
        "a place that was granted goes back", "store/trip_leases.py TripLeases.reserve", "is_in_the_way or ",
        "store/test_updates.py::test_a_place_that_was_granted_goes_back_to_the_gradient_that_waits_for_it", "",
    ),
    Mutation("lease of a used gradient", "store/gradients.py Gradients.drop", "state.lease.free()", POWER_CUT),
    Mutation(
        "the norm of what an update uses up", "store/updates.py UpdatePipeline._apply",
        "await round_.gradients.measure(group, chunk, gradient)",
        "train/test_out_of_turn.py::test_what_only_an_earlier_micro_batch_has_brought_counts_in_the_norm",
    ),
    Mutation(
        "an update waits while its gradient is measured", "store/gradients.py Gradients._measure", "state.measuring",
        "store/test_gradients.py::test_it_is_measured_once_by_the_update_or_the_step", "asyncio.Lock()",
    ),
    Mutation("lease of a spilled gradient", "store/gradients.py Gradients._deliver_spilled", "lease.free()", POWER_CUT),
    Mutation(
        "lease of a load and of a copy", "io/memory.py Pool.lent", "lease.free()",
        "store/test_tensors_faults.py::test_a_cancelled_put_leaves_the_old_entry",
    ),
    Mutation(
        "acquired copies are not evicted", "store/copies.py DeviceTier.pin", "self._idle.pop(copy, None)",
        "store/test_tensors.py",
    ),
    Mutation(
        "weights in memory do not come from the disk", "train/depth.py DepthChooser._rate", "own * self._disk_share",
        "train/test_depth.py::test_weights_in_memory_do_not", "own",
    ),
    # The order of streams.
    Mutation(
        "memory goes after the kernels that use it", "train/access.py DeviceAccess._move",
        "self.device.record() if dropped else Reached()", "train/test_stream_order.py", "Reached()",
    ),
    Mutation(
        "a gradient is reduced when it is computed", "train/reduction.py Reductions._reduce", "after.synchronize()",
        "train/test_zero_models.py::test_stages_are_one",
    ),
    Mutation(
        "the first reductions follow forward", "train/backward.py GradientCollector.begin",
        "self._reductions.guess_order(needed)", "train/test_zero_memory.py",
    ),
    Mutation(
        "late gradients are reduced", "train/backward.py GradientCollector.finish", "self._take_late(self._reductions)",
        "train/test_zero_models.py::test_gradients_that_come_late_at_one_rank_are_added",
    ),
    Mutation(
        "what recomputation adds is forgotten by no step", "train/backward.py GradientCollector.finish",
        "max(added, self._recomputed[index] or 0)",
        "train/test_right.py::test_reentrant_checkpoints_may_leave_layers_out", "added",
    ),
    Mutation(
        "what is recomputed may differ", "train/backward.py GradientCollector._expect",
        "self._collected[hidden.index].missing.update(trained)",
        "train/test_must_work.py::test_losses_are_those_of_plain_torch",
    ),
    # The generations of training.
    Mutation(
        "a change is committed with the step before it", "train/generations.py Generations.commit_change",
        "self.publish()", "train/test_changed_weights.py::test_a_change_is_committed_with_the_step_before_it",
    ),
    never(
        "checksum of a chunk", "store/slots.py SlotPack.check_digest", "if found != record.checksum:",
        "store/test_recovery.py::TestDamage",
    ),
    Mutation(
        "ranks divide one memory alike", "train/sizing.py cut_groups", "min(parts)",
        "train/test_one_memory.py::test_ranks_with_unequal_memory_have_equal_gpu_tiers", "divided(asked).gpu_bytes",
    ),
    Mutation(
        "what Adam has read is checked", "store/updates.py UpdatePipeline._apply", "self._bytes.check(trip, found)",
        "store/test_recovery.py::TestDamage",
    ),
    Mutation(
        "what a failed update has left on the device", "store/changing.py Changing.group",
        "self.on_spoilt(group)", "store/test_recovery.py::TestDamage",
    ),
    Mutation(
        "the gradient of a failed update", "store/updates.py UpdatePipeline._guarded",
        "round_.gradients.drop(*trip.key)", "store/test_recovery.py::TestDamage",
    ),
    Mutation(
        "a NaN is one when it is rounded", "kernels/compiled.py _bits",
        'b.select(b.fcmp_unordered("uno", value, value), _filled(bits, 0x7FC00000), bits)', "kernels/test_adam.py",
        "bits",
    ),
    Mutation(
        "a residual that another weight has left", "kernels/compiled.py _join",
        'b.select(b.fcmp_unordered("uno", value, value), alone, value)', "kernels/test_adam.py", "value",
    ),
    Mutation(
        "decay in the gradient, of vectors", "kernels/compiled.py adam", "adam_lanes(_AT_ONCE, True,",
        "kernels/test_adam.py", "adam_lanes(_AT_ONCE, False,",
    ),
    Mutation(
        "leaves that change later", "kernels/compiled.py adam_with_digests",
        "_digest_sections(stored[1], leaf, sections[1], end, 1, was_1, before[1], sums)", "kernels/test_digests.py",
    ),
    Mutation(
        "digests that a wrong guess has left", "store/updates.py UpdatePipeline._travel",
        "self.forget_digests(*trip.key)",
        "store/test_recovery.py::test_what_a_skipped_step_has_undone_in_memory_is_what_is_committed",
    ),
    Mutation(
        "digests of what is set from outside", "store/at_rest.py ChunksAtRest.put", "self._on_change(group, chunk)",
        "store/test_recovery.py::test_what_is_set_after_a_step_whose_commit_an_error_prevented_is_what_is_committed",
    ),
    Mutation(
        "digest of what is encoded", "store/slots.py SlotPack._write_chunk",
        "source, stored, known = scratch, encoded, None", "store/test_updates.py", "source, stored = scratch, encoded",
    ),
    Mutation(
        "leaves between two sections", "kernels/compiled.py adam_with_digests",
        "_digest_rest(stored[1], leaf, is_1, after[1], sums)", "kernels/test_digests.py",
    ),
    Mutation(
        "packs are synced for a commit", "store/commits.py Commits._chunks_at_rest",
        "await together(asyncio.to_thread(pack.datasync) for pack in self._files.committed_packs)", POWER_CUT,
    ),
    Mutation("every file of a pack is synced", "store/slots.py SlotPack.datasync", "file.datasync()", POWER_CUT),
    Mutation(
        "what was written since is synced", "io/block_file.py BlockFile.write_from", "self._is_dirty = True", POWER_CUT,
    ),
    Mutation(
        "what is captured is abandoned with its generation", "store/commits.py Commits._publish",
        "await self._manifests.abandon(commit.number)", "store/test_commits.py",
    ),
    Mutation(
        "a commit waits for what is called before it", "store/commits.py Commits._make_durable", ", *others))",
        "store/test_commits.py", "))",
    ),
    Mutation(
        "a generation that is being copied is not overwritten", "train/steps.py Steps._forward", "self._make_way()",
        "store/test_snapshots.py::test_a_generation_is_not_overwritten_while_it_is_copied",
    ),
    Mutation(
        "a store keeps the shares of its disks", "train/assembly.py _shares", "if generation is not None:",
        "store/test_stripes.py::test_a_store_keeps_its_shares", "if generation is not None and shares_of(tiers) == ():",
    ),
    Mutation(
        "ranks tell of a snapshot behind a commit", "store/commits.py Commits.snapshot_moves",
        "await self._commit_ended()", "store/test_commits.py",
    ),
    Mutation(
        "files of a snapshot are synced", "store/snapshots.py Snapshot._sync", "file.datasync()",
        "store/test_power_cut.py::test_of_a_snapshot",
    ),
    Mutation(
        "names of a snapshot are synced", "store/snapshots.py Snapshot._copy",
        "self._backend.sync_directory(directory)", "store/test_power_cut.py::test_of_a_snapshot",
    ),
    Mutation(
        "a snapshot of the same name stays", "store/snapshots.py Snapshot.abandon", "only_unfinished=not self._is_ours",
        "store/test_snapshots.py::test_a_name_is_taken_once", "only_unfinished=False",
    ),
    Mutation(
        "only an unfinished snapshot goes", "store/removal.py _refuse_finished", "if only_unfinished and",
        "store/test_snapshots.py::test_what_a_kill_has_left_goes_with_the_next_one", "if False and",
    ),
    Mutation(
        "a run in a snapshot has its room", "store/slots.py SlotPack._fill", "self._io.backend.allocate(",
        "store/test_snapshots.py::test_a_run_in_one_has_all_its_room_when_it_is_opened", "(lambda *_: None)(",
    ),
    Mutation(
        "the other slot is written", "store/slots.py SlotPack.write", "1 - committed.slot", OVERWRITTEN,
        "committed.slot",
    ),
    Mutation(
        "barrier of pending gradients", "store/gradients.py Gradients._deliver_spilled",
        "await asyncio.shield(self.kept_by)",
        "train/test_delayed.py::test_pending_gradients_stay_until_the_commit_that_names_them_is_published",
    ),
    Mutation(
        "gradients on their way when pending ones are applied", "train/steps.py Steps.apply_pending",
        "self._generations.take_pending()",
        "train/test_delayed.py::test_pending_gradients_are_applied_without_a_step", "self._generations.turn_over(None)",
    ),
    Mutation(
        "a turn to queue a copy and its mark", "device/transfers.py CudaDevice._finished", "queue.turn, ",
        "device/test_cuda_device.py::test_the_mark_of_a_copy_comes_right_behind_it", "",
    ),
    Mutation(
        "barrier of an update", "store/updates.py UpdatePipeline._write", "await asyncio.shield(round_.barrier)",
        OVERWRITTEN,
    ),
    Mutation(
        "barrier of what is in memory", "store/commits.py Commits._commit_resident",
        "await asyncio.shield(previous)", OVERWRITTEN,
    ),
    Mutation(
        "a commit waits for its updates", "store/commits.py Commits._chunks_at_rest",
        "await self._updates.round_ended(commit.round_)", POWER_CUT,
    ),
    Mutation(
        "a commit waits for what is in memory", "store/commits.py Commits._chunks_at_rest",
        "await asyncio.shield(write)", POWER_CUT,
    ),
    Mutation(
        "commits follow one another", "store/commits.py Commits._capture", "await asyncio.shield(commit.previous)",
        "store/test_commits.py",
    ),
    Mutation(
        "a line of the log is on the disk before its commit", "apps/train.py _Run.run",
        "self._engine.before_commit(partial(self._unless_full, self._log.sync))", "apps/test_train.py",
    ),
    Mutation(
        "what is not used is told", "train/given.py Given._what_is_left",
        "unused := self._optimizer.unused(self._made_with or ())", "train/test_resumed_state.py",
        "unused := []",
    ),
    Mutation(
        "another schedule takes no state over", "train/optimizer.py ended_schedule", "return str(kind)",
        "train/test_resumed_state.py", "return None",
    ),
    Mutation(
        "a registered scheduler goes on from its rates", "train/given.py Given._restore_registered",
        "_schedules(value, self._optimizer)", "train/test_resumed_state.py", "False",
    ),
    Mutation(
        "what callbacks change is committed with their step", "train/engine.py Engine._commit_change",
        "not self._order.is_telling",
        "train/test_out_of_turn.py::test_a_change_that_a_callback_makes_is_committed_with_its_step_and_not_before",
        "True",
    ),
    Mutation(
        "a callback closes the engine after its step", "train/engine.py Engine._close", "if self._order.is_telling:",
        "train/test_out_of_turn.py::test_who_hears_of_a_step_may_close_the_engine_and_the_step_is_committed",
        "if False:",
    ),
    Mutation(
        "ranks of a machine share its memory", "io/machine.py refuse_impossible", "name in claim.limits",
        "train/test_zero.py::test_what_ranks_of_a_machine_take_together_is_refused_at_all_of_them",
        "claim is claims[0]",
    ),
    Mutation(
        "what the machine has not free is told before it is taken", "train/assembly.py _check_machine",
        "warn_caller(short, MachineWarning)", "train/test_bad_input.py",
    ),
    Mutation(
        "ranks change weights alike", "train/whole.py keep_changes", "parts.partition.as_first(there)",
        "train/test_zero.py::test_weights_that_ranks_change_differently_are_those_of_the_first", "there.cpu()",
    ),
    Mutation(
        "a registered name is one object's", "train/given.py Given.register",
        "self._registered.get(name, value) is not value", "train/test_capture.py", "False",
    ),
    Mutation(
        "a state that was refused stays for the next object", "train/given.py Given._restore_registered",
        "value.load_state_dict(capture.with_tensors(self._unregistered[name]))",
        "train/test_capture.py", "value.load_state_dict(capture.with_tensors(self._unregistered.pop(name))); return",
    ),
    Mutation(
        "a whole step that broke off guesses nothing", "train/steps.py Steps._give_up",
        "driver.guess_nothing()", "train/test_auto.py",
    ),
    Mutation(
        "a callback's step is no whole one", "train/rounds.py RoundDriver.decide", "self._is_whole_step = False",
        "train/test_auto.py",
    ),
    Mutation(
        "no guess on what is not committed", "train/rounds.py RoundDriver.begin", " and self.can_redo",
        "train/test_auto.py::test_a_wrong_guess_goes_back_to_what_is_there_and_not_further", "",
    ),
    Mutation(
        "weights that are set are not committed yet", "train/whole.py keep_changes", "parts.driver.can_redo = False",
        "train/test_auto.py::test_a_wrong_guess_goes_back_to_what_is_there_and_not_further",
    ),
    Mutation(
        "nor are all that are loaded", "train/whole.py load_state_dict", "parts.driver.can_redo = False",
        "train/test_auto.py::test_a_wrong_guess_goes_back_to_what_is_there_and_not_further",
    ),
    Mutation(
        "weights that are set by half are not trained", "train/engine.py Engine.load_state_dict",
        'self._order.unbroken("a change of weights")',
        "train/test_changed_weights.py::test_weights_that_were_set_by_half_are_not_trained",
        "contextlib.nullcontext()",
    ),
    Mutation(
        "what was changed in place is no saved tensor any more", "train/hooks.py ModelHooks._unpack",
        "same._version != moment",
        "train/test_bad_input.py::test_what_backward_needs_is_not_changed_in_place", "False",
    ),
    Mutation(
        "weights that changed are no saved ones any more", "train/hooks.py ModelHooks._unpack",
        "moment != same._version + self._step * group.spec.trainable",
        "train/test_out_of_turn.py::test_a_graph_from_before_a_change_of_weights_is_refused",
        "False",
    ),
    Mutation(
        "what a loss saves is watched, too", "train/micro_batches.py losses_side_by_side",
        "with hooks.watching(others)", "train/test_vertical.py::test_a_loss_may_read_weights_and_call_modules",
        "if True",
    ),
    Mutation(
        "a forward in a pass is a part of it", "train/steps.py Steps._forward", "if parts.access.is_inside",
        "train/test_out_of_turn.py::test_a_forward_in_a_pass_leaves_that_pass_as_it_is", "if False",
    ),
    Mutation(
        "gradients are of the parameter's dtype", "train/backward.py GradientCollector._arrived",
        "if gradient.dtype is not (own := TORCH_DTYPES[group.spec.dtype])",
        "train/test_out_of_turn.py::test_gradients_of_another_dtype_are_refused_by_name", "if (own := None)",
    ),
    Mutation(
        "what is unpacked keeps its group", "train/hooks.py ModelHooks._unpack", "return same.detach()",
        f"{AROUND}::test_what_is_unpacked_keeps_its_group_and_what_is_saved_does_not", "return same",
    ),
    Mutation(
        "a backward of somebody else leaves the weights guarded", "train/hooks.py ModelHooks._unpack",
        "if access.is_inside", "train/test_out_of_turn.py::test_a_gradient_of_an_input_leaves_the_weights_guarded",
        "if True",
    ),
    Mutation(
        "frozen weights that a recomputation saves keep their group", "train/hooks.py _pack_detached",
        "tensor.detach()", "train/test_out_of_turn.py::test_frozen_weights_stay_for_a_recomputation_of_several_blocks",
        "tensor",
    ),
    Mutation(
        "hooks of others get what is no weight", "train/hooks.py ModelHooks._before",
        "others is None or others[0] == self._pack",
        "train/test_out_of_turn.py::test_hooks_on_saved_tensors_get_all_but_weights", "True",
    ),
    Mutation(
        "what is saved does not", "train/groups.py Group._other_uses", " - self.saved_views()",
        f"{AROUND}::test_what_is_unpacked_keeps_its_group_and_what_is_saved_does_not", "",
    ),
    Mutation(
        "ranks that are elsewhere are told", "train/ranks.py Ranks.exchange", "if told != first",
        "train/test_zero_models.py::test_ranks_that_are_not_as_one_are_told", "if False",
    ),
    Mutation(
        "and those with other rates", "train/partition.py Partition.square_sum",
        "refuse_different([options for _, _, options in told])",
        "train/test_zero_models.py::test_ranks_that_are_not_as_one_are_told",
    ),
    Mutation(
        "random states of another rank are seeded anew", "train/generations.py Generations._restore",
        "capture.reseed(number)",
        "train/test_which_store.py::test_the_ranks_of_a_copied_store_draw_numbers_of_their_own",
    ),
    Mutation(
        "weights of a chunk that is updated in part are copied", "store/updates.py UpdatePipeline._apply",
        "if storage is not None and is_whole", "train/test_must_work.py", "if storage is not None",
    ),
    Mutation(
        "sums of squares are of all that has come", "store/pieces.py Filling.__call__", "if self.is_new else None",
        "train/test_must_work.py", "if True else None",
    ),
    Mutation(
        "a chunk is on one trip at a time", "store/updates.py UpdatePipeline._read_ahead",
        "if previous is not None and not await self._unless_recalled(round_, trip, previous):",
        "store/test_updates.py", "if False:",
    ),
    Mutation(
        "what is written for a commit stays as it is", "store/updates.py UpdatePipeline._read_ahead",
        "if write is not None and not await self._unless_recalled(round_, trip, write):",
        "store/test_updates.py", "if False:",
    ),
    Mutation(
        "names of new packs are synced", "store/store_files.py StoreFiles._create",
        "self.backend.sync_directory(directory)", POWER_CUT,
    ),
    Mutation(
        "names of packs made anew are synced", "store/store_files.py StoreFiles._open",
        "self.backend.sync_directory(directory)",
        "store/test_power_cut.py::test_a_pack_made_anew_is_there_after_a_cut",
    ),
    Mutation(
        "names of new directories are synced", "io/backend.py Backend.make_directories",
        "self.sync_directory(directory.parent)", POWER_CUT,
    ),
    Mutation(
        "the mark of an unfinished store comes first", "store/directories.py mark_unfinished",
        "backend.sync_directory(directory)", "store/test_power_cut.py::test_of_a_store_that_is_made",
    ),
    Mutation(
        "an adopted manifest is synced", "store/manifest_files.py Manifests._adopt",
        "self._backend.sync_directory(self.directory)", OVERWRITTEN,
    ),
    Mutation(
        "an abandoned manifest is removed", "store/manifest_files.py Manifests.publish",
        "await self.abandon(generation.number)",
        "store/test_manifest_files.py::TestManifests",
    ),
    Mutation(
        "two generations are kept", "store/manifest_files.py Manifests._remove_all_but_two", "[:2]",
        "store/test_recovery.py::TestPrevious", "[:1]",
    ),
    never(
        "checksum of a manifest", "store/manifest.py read_manifest", "if digest(data).encode() != found:",
        "store/test_recovery.py::TestDamage",
    ),
    Mutation(
        "checksum of the captured state", "store/manifest.py read_generation",
        ' or digest(captured) != body["captured_checksum"]', "store/test_recovery.py::TestPrevious", "",
    ),
    # Who may use a store.
    Mutation(
        "lock of a store", "io/files.py takes_lock", "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "store/test_recovery.py::TestLock",
    ),
    Mutation(
        "a lock that was removed meanwhile", "io/files.py locked_file", "if is_at(path, descriptor):",
        "store/test_lock.py", "if True:",
    ),
    Mutation(
        "a store that was moved", "store/manifest_files.py Manifests._capture", "self._check_in_place()",
        "store/test_recovery.py::TestMovedAway",
    ),
    Mutation(
        "a store that is moved during a commit", "store/manifest_files.py Manifests._publish",
        "self._check_in_place()", "store/test_recovery.py::TestMovedAway",
    ),
    Mutation(
        "a last generation that is not seen", "store/manifest_files.py Manifests._remove_all_but_two",
        "if last not in kept:", "store/test_manifest_files.py", "if False:",
    ),
    Mutation(
        "what a full disk is written over", "store/manifest_files.py Manifests._makes_room", "[-1]",
        "store/test_power_cut.py::test_so_it_does_where_the_disk_is_full", "[0]",
    ),
    Mutation(
        "the room that a file has", "io/backend.py Backend.write_file", "os.O_CREAT |",
        "store/test_each_fault.py::test_a_disk_that_is_full_ends_no_run", "os.O_CREAT | os.O_TRUNC |",
    ),
    Mutation(
        "no copy on write", "io/backend.py Backend._overwrite_in_place", " | _NOCOW", "io/test_backend.py", "",
    ),
    Mutation(
        "what a longer file held", "io/backend.py Backend.write_file", "self.truncate(path, len(data))",
        "io/test_files.py",
    ),
    Mutation(
        "a store that is away for a moment", "store/manifest_files.py Manifests.numbers", "missing_ok and",
        "store/test_recovery.py::TestMovedAway", "",
    ),
    Mutation(
        "another fault in a store that was moved", "store/manifest_files.py Manifests._tells_moves",
        "if _is_gone(error):", "store/test_recovery.py::TestMovedAway", "if True:",
    ),
    Mutation(
        "generations of another store", "store/manifest_files.py Manifests._remove", "self._check_in_place()",
        "store/test_recovery.py::TestMovedAway",
    ),
    Mutation(
        "ranks that outlive their leader", "store/lock.py StoreLock.add", "self._refuse_members(directory)",
        "store/test_lock.py",
    ),
    Mutation(
        "a child lets go of the lock", "io/fork.py _mark_inherited", "item.let_go()",
        "store/test_lock.py",
    ),
    Mutation(
        "a child unmaps nothing of its parent", "io/fork.py _mark_inherited",
        "ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))", "io/test_fork.py",
    ),
    never(
        "directories of others are refused", "store/directories.py claim_directory", "if strangers:",
        "train/test_bad_input.py",
    ),
    # Stores of tensors.
    Mutation(
        "packs of tensors are synced", "store/shelf.py Shelf.sync", "await self._sync([pack], pack.slots.datasync)",
        TENSORS_CUT,
    ),
    Mutation(
        "names of packs of tensors are synced", "store/shelf.py Shelf.publish",
        "await self._sync(unnamed, self._directories.sync)", TENSORS_CUT,
    ),
    Mutation(
        "a failed sync is final", "store/shelf.py Shelf._sync", "pack.is_synced, pack.sync_failure = False, error",
        "store/test_tensors_faults.py::test_a_failed_sync_is_final",
    ),
    Mutation(
        "few packs are open at once", "store/shelf.py Shelf.__init__", "asyncio.Semaphore(most_packs)",
        "store/test_tensors.py::test_a_store_may_have_more_packs_than_descriptors", "asyncio.Semaphore(10**6)",
    ),
    Mutation(
        "a change on the device while it moves", "store/entries.py Homes._fill_host", "entry.changes == changes",
        "store/test_tensors_faults.py::test_what_changes_on_the_device_while_it_moves_is_moved_again", "True",
    ),
    Mutation(
        "what is in memory is written anew after a failed sync", "store/entries.py Homes._fill_pack",
        "self._drop_pack(entry)",
        "store/test_tensors_faults.py::test_what_is_in_memory_is_written_anew_after_a_failed_sync",
    ),
    never(
        "a pack that is needed is kept", "store/shelf.py Shelf.discard", "if self._is_needed(pack.kind):",
        TENSORS_CUT,
    ),
    Mutation(
        "packs of the generation before are kept", "store/shelf.py Shelf.recover",
        "before is None or kind in before", TENSORS_CUT, "False",
    ),
    Mutation(
        "a manifest that cannot be read now may name packs", "store/shelf.py Shelf.recover",
        "before is None or kind in before", "store/test_tensors.py", "before and kind in before",
    ),
    Mutation(
        "a tensor that is put into the mapping is refused", "store/tensors.py TensorStore.acquire",
        "acquired.check_same()", "store/test_tensors.py",
    ),
    # Weights that a new engine would lack, or lose.
    Mutation(
        "parameters that share memory are refused where they are put off, too", "train/materialize.py _requests",
        "refuse_overlap(places)", "train/test_built.py",
    ),
    Mutation(
        "a source writes over nothing that somebody has set", "train/assembly.py assemble",
        "check_source(model, source)", "train/test_built.py", "None",
    ),
    Mutation(
        "a seed that was set stays", "train/materialize.py DeferredSource.stream",
        "if not (is_moved or self._has_streamed):", "train/test_built.py", "if True:",
    ),
    Mutation(
        "memory past a parameter is told", "train/materialize.py _finished", "_tell_aliases(recorder, parameters)",
        "train/test_built.py",
    ),
    Mutation(
        "what a model holds beside its source is kept", "train/filling.py weights_of",
        "own[:] = [(name, tensor) for name, tensor in own if name not in known]", "train/test_built.py", "own.clear()",
    ),
    Mutation(
        "no engine, no stand-ins", "train/assembly.py assemble", "put_back(model, replaced)", "train/test_built.py",
    ),
    Mutation(
        "a swap that cannot be undone ends the model", "train/stand_ins.py put_back",
        "parameter.__dict__[TAKEN] = None", "train/test_built.py",
    ),
    Mutation(
        "a block of a closed engine ends as what it is", "train/whole.py gathered",
        "if not parts.runtime.is_open:", "train/test_clean.py::TestClose", "if False:",
    ),
    Mutation(
        "a move while a commit is written is told", "store/manifest_files.py Manifests._tells_moves",
        "self._check_in_place()", "store/test_recovery.py::TestMovedAway",
    ),
    Mutation(
        "a pass that another one ends", "train/loading.py _Pass.__next__", "if self._gave_way:",
        "train/test_loading.py", "if False:",
    ),
    Mutation(
        "a directory that begins another store", "store/directories.py refuse_mixed", "if _begins_a_store(directory)",
        "store/test_tensors.py", "if False",
    ),
    Mutation(
        "gradients of a conjugate", "train/backward.py GradientCollector._arrived", "gradient = gradient.resolve_neg()",
        "train/test_must_work.py",
    ),
    Mutation(
        "views of weights in attributes", "train/steps.py Steps._forward",
        "parts.groups.check_kept_views(is_resumed=parts.is_resumed)", "train/test_built.py",
    ),
    Mutation(
        "a view of what is frozen", "train/groups.py ModelGroups.check_kept_views", " if view.is_trained or is_resumed",
        "train/test_built.py", "",
    ),
    Mutation(
        "a view that is made anew", "train/overlaps.py tell_kept_views", "if view.is_there()", "train/test_built.py",
        "",
    ),
    Mutation(
        "disks of the machine that was measured", "apps/plan.py _as_measured", "len(rates.directories) or 1",
        "apps/test_plan.py", "node.disks",
    ),
    Mutation(
        "what a CPU multiplies is fp32", "apps/plan.py _flop_per_s", "and not rates.layers", "apps/test_plan.py", "",
    ),
    Mutation(
        "the memory that is advised fits", "config.py enough", "math.ceil(size_bytes / unit)", "apps/test_plan.py",
        "int(size_bytes / unit)",
    ),
    Mutation(
        "what lies below a key has all its names", "archive/sources.py Source.below",
        "(*self.tensors, *self.aliases)", "archive/test_torch_files.py", "(*self.tensors,)",
    ),
    Mutation(
        "no values, no engine", "train/filling.py check_source", "parameter.numel() and name not in known",
        "train/test_built.py", "False",
    ),
    # Gradients that would be divided twice, or lost.
    Mutation(
        "a module has one reducer", "train/data_parallel/reducer.py GradientReducer._begin_alike",
        "close_reducers_of(module)", "train/test_reducer_hooks.py::test_a_module_has_one_reducer_at_a_time",
    ),
    Mutation(
        "what is reduced has no engine", "train/owners.py refuse_taken", "refuse_reduced(model.named_parameters())",
        "train/test_reducer_hooks.py::test_a_module_has_one_reducer_at_a_time",
    ),
    Mutation(
        "buckets that are made anew know what is shown", "train/data_parallel/places.py Places.allocate",
        "if not self._has_shown:",
        "train/test_reducer_hooks.py::test_a_delayed_reducer_loses_nothing_in_its_first_steps", "if True:",
    ),
    Mutation(
        "flush loses nothing", "train/data_parallel/reducer.py GradientReducer.flush",
        "self._places.refuse_to_lose()",
        "train/test_reducer_hooks.py::test_a_delayed_reducer_loses_nothing_in_its_first_steps", "pass",
    ),
    Mutation(
        "newcomers are refused where no graph is searched", "train/data_parallel/reducer.py GradientReducer.backward",
        "self._readiness.refuse_newcomers()", "train/test_reducer_hooks.py",
    ),
    # Parameters and changes that would be computed with, but neither trained nor kept.
    Mutation(
        "newcomers are refused", "train/steps.py Steps._forward", "parts.groups.refuse_newcomers(parts.model)",
        "train/test_changed_weights.py",
    ),
    Mutation(
        "newcomers are refused when changes are kept", "train/whole.py take_back",
        "parts.groups.refuse_newcomers(parts.model)", "train/test_changed_weights.py",
    ),
    Mutation(
        "changes that are not kept are told", "train/engine.py Engine.gathered",
        "whole.refuse_changes(parts, [group for group in groups if group not in kept])",
        "train/test_changed_weights.py",
    ),
    Mutation(
        "reading weights commits nothing", "train/engine.py Engine.gathered", "self._generations.settle()",
        f"{AROUND}::test_gathered_that_only_reads_commits_nothing", "self._generations.flush()",
    ),
    Mutation(
        "a module of DDP is refused", "train/owners.py refuse_taken", "refuse_ddp(model)", "train/test_other_models.py",
    ),
    Mutation(
        "options are checked before gradients are applied", "train/steps.py Steps.backward",
        "self._applied_with = parts.stepper.options()", "train/test_out_of_turn.py",
    ),
    Mutation(
        "options are checked before a step is decided", "train/steps.py Steps.step",
        "options = parts.stepper.options()", "train/test_out_of_turn.py", "options = self._applied_with",
    ),
    Mutation(
        "what was applied with other options is refused", "train/steps.py Steps.step",
        "parts.driver.refuse_late(late[0])", "train/test_late_options.py",
    ),
    Mutation(
        "what was guessed with other options is redone", "train/steps.py Steps._apply", " and not late",
        "train/test_late_options.py", "",
    ),
    Mutation(
        "where options come late nothing is applied before", "train/rounds.py RoundDriver.begin",
        " and not self._waits_for_step", "train/test_late_options.py", "",
    ),
    Mutation(
        "who reads weights after their gradients is told", "train/assembly.py _hook_up",
        "access.withdraw(index)", "train/test_out_of_turn.py", "pass",
    ),
    Mutation(
        "a new schedule goes on from the store's rates", "train/assembly.py assemble",
        'optimizer.restore(generation.captured["optimizer"])', "train/test_resumed_state.py", "pass",
    ),
    Mutation(
        "nodes go on from one commit", "train/opening.py _read",
        "len(set(names)) == 1", "train/test_which_store.py", "True",
    ),
    never(
        "a gradient has its parameter's size", "train/cpu_adam.py CPUAdam._check",
        "if gradient.shape != parameter.shape:", "train/test_cpu_adam.py",
    ),
    # Packs and archives.
    never(
        "seal of a header", "pack/validate.py _checked",
        "if seal is not None and seal != header_seal(entries, metadata):", "pack/test_validate.py",
    ),
    never(
        "limit of a header", "pack/validate.py _header_length", "if length > MAX_HEADER_BYTES:",
        "pack/test_validate.py",
    ),
    never(
        "data ends in the file", "pack/validate.py _checked", "if data_start + data_bytes > file_bytes:",
        "pack/test_validate.py",
    ),
    never(
        "spelling of a header", "archive/opening.py check_header", "if found != expected:", "archive/test_verify.py",
    ),
    never(
        "checksum of an archive's chunk", "archive/reading.py read_stored", "if found != chunk.checksum:",
        "archive/test_verify.py",
    ),
    Mutation(
        "checksums of a pack that is trained on", "train/checkpoint_files.py stored_tensors", "is_pack(directory)",
        "train/test_checkpoints.py::test_no_damaged_byte_of_a_pack_becomes_a_weight", "False",
    ),
    Mutation(
        "seal of an index", "archive/index.py check_index", ' or seal != f"{checksum_bytes(_text(body)):016x}"',
        "archive/test_verify.py", "",
    ),
    never(
        "a path that is not read is refused", "archive/opening.py refuse_idle",
        "if idle := [path for path in paths if os.path.realpath(path) not in known]:",
        "apps/test_pack_commands.py::test_a_path_that_is_no_part_of_a_pack_is_refused",
    ),
    never(
        "a file that another pack may need is not taken", "archive/publish.py Publication._commit",
        "if final.exists() and final not in old:",
        "archive/test_killed.py::test_a_file_that_a_pack_elsewhere_names_is_not_taken_from_it",
    ),
    never(
        "a file without tensors belongs to its pack", "archive/sources.py weight_files",
        'if isinstance(metadata, dict) and "files" in metadata:',
        "archive/test_killed.py::test_a_file_without_tensors_belongs_to_its_pack",
    ),
    Mutation(
        "a file that cannot be opened is no damage", "archive/reading.py verify", "opened(placed.file.path)",
        "archive/test_verify.py::test_a_file_that_cannot_be_opened_is_no_damage",
    ),
    Mutation(
        "dtype of a part of a checkpoint", "archive/distributed.py _Parts.read",
        "(found_dtype, shape) != (dtype, sizes)",
        "archive/test_torch_files.py::test_a_part_of_another_dtype_than_its_checkpoint_says_is_refused",
        "shape != sizes",
    ),
    Mutation("sync of a packed file", "archive/packing.py _Writer.finish", "file.datasync()", ARCHIVE_CUT),
    Mutation(
        "sync of an unpacked file", "archive/unpacking.py _Unpacking._fill", "opened(path).datasync()", ARCHIVE_CUT,
    ),
    Mutation(
        "sync of an index", "archive/publish.py Publication._commit",
        "self._backend.write_file(new_index, index)", ARCHIVE_CUT, "new_index.write_bytes(index)",
    ),
    Mutation(
        "names before their index", "archive/publish.py Publication._commit",
        "self._backend.sync_directory(directory)", ARCHIVE_CUT,
    ),
    Mutation(
        "the index before the end", "archive/publish.py Publication._commit",
        "self._backend.sync_directory(first)\n            self._retire", ARCHIVE_CUT, "self._retire",
    ),
    Mutation(
        "the name of a single file", "archive/publish.py Publication._commit_one",
        "self._backend.sync_directory(single.parent)", ARCHIVE_CUT,
    ),
    Mutation(
        "work that was given up stops", "io/backend.py Backend._noted", "self._refusal is not None",
        "apps/test_stuck_disk.py", "False",
    ),
    Mutation(
        "what was given up is waited for", "store/owner.py LoopOwner.in_time", "self._own(task)",
        "store/test_bounded_time.py::test_a_call_of_a_tensor_store_that_came_too_late_can_be_repeated",
    ),
    Mutation(
        "a store that hangs stays locked", "store/tensors.py TensorStore._give_back",
        "self._workers.close(threading.TIMEOUT_MAX)", HANGS,
    ),
    Mutation(
        "an update waits for who reads the weights", "train/rounds.py RoundDriver.decide",
        "round_.used = used or Reached()", "train/test_stream_order.py::test_weights_that_are_read_after_backward",
    ),
    Mutation(
        "the GPU updates when the norm is known", "train/rounds.py RoundDriver.decide_group",
        " or group in self._store.on_gpu", ON_GPU, "",
    ),
    Mutation(
        "a gradient on the GPU goes before the next one comes", "store/gpu_updates.py GpuUpdates._update",
        "round_.gradients.drop(*key)", ON_GPU,
    ),
    Mutation(
        "who waits while a job fails is not forgotten", "io/batches.py Batches._end", "if self._waiting:",
        "io/test_batches.py", "if self._waiting and error is None:",
    ),
    Mutation(
        "chunks that begin and chunks that are added to are no neighbours", "store/gradients.py Gradients._neighbours",
        "and last.state.is_filled == one.state.is_filled", "store/test_on_gpu.py", "",
    ),
    Mutation(
        "runs with a gap between them stay two", "store/on_gpu.py _both", "runs[-1][1] == before + start and ",
        "store/test_on_gpu.py", "",
    ),
    Mutation(
        "a round that could not begin loses no update", "train/rounds.py RoundDriver._begin",
        "self._failed = (round_, error)", "train/test_clean.py::TestAnExceptionInTheMiddleOfAStep",
    ),
    Mutation(
        "an update on the GPU waits for a load", "store/gpu_updates.py GpuUpdates.apply",
        "await self._weights.arrived(*trip.key)", ON_GPU,
    ),
    Mutation(
        "weights that have left the GPU are updated, too", "store/gpu_updates.py GpuUpdates._update",
        "await self._on_gpu.workers.submit(Priority.UPDATE, self._device.copy_in, storage, offset, here)", ON_GPU,
    ),
    Mutation(
        "what comes too late makes no group ready", "train/moves.py GroupMoves._make_ready",
        "if self._changes[group] != changes:",
        "train/test_out_of_turn.py::test_a_step_without_a_block_is_no_short_way_to_the_next", "if False:",
    ),
    Mutation(
        "a gradient that is kept has memory of its own", "train/backward.py GradientCollector._add",
        "gradients[position] = gradients[position] + gradient",
        "train/test_kept.py::test_gradients_that_share_their_memory_are_not_added_to_each_other",
        "gradients[position].add_(gradient)",
    ),
    Mutation(
        "gradients that are kept count against the room", "train/backward.py GradientCollector._make_room",
        "self._kept_bytes + ", "train/test_kept.py::test_there_is_room_for_some", "",
    ),
    Mutation(
        "gradients that are kept are of the step", "train/steps.py Steps._apply", "parts.collector.settle()",
        "train/test_kept.py::test_a_step_without_a_last_backward_has_all",
    ),
    Mutation(
        "weights that are set are on the device, too", "train/whole.py _reload",
        "parts.runtime.call(parts.store.weights.reload, group, parts.access.device.record())", ON_GPU,
    ),
    Mutation(
        "changes that nobody keeps are undone", "train/whole.py _undo_changes", "_reload(parts, index)", ON_GPU,
    ),
    Mutation(
        "a block inside another one undoes no changes", "train/whole.py gathered",
        "for group in groups if group not in kept]",
        "train/test_changed_weights.py", "for group in groups]",
    ),
    Mutation(
        "data that is refused is undone where it was taken over", "train/groups.py Group.take_back", "= _NO_VERSION",
        "train/test_changed_weights.py::test_new_data_that_does_not_fit_is_refused",
        "= self.parameters[position]._version + 1",
    ),
    Mutation(
        "weights that change places are taken back", "train/groups.py Group._elsewhere",
        "parameter.storage_offset() == spec.start",
        "train/test_changed_weights.py::test_a_parameter_may_be_given_data_of_the_model", "True",
    ),
    Mutation(
        "weights of all groups are copied before one is taken back", "train/whole.py take_back",
        "[group.displaced(storages) for group in groups]",
        "train/test_changed_weights.py::test_a_parameter_may_be_given_data_of_the_model",
        "(group.displaced(storages) for group in groups)",
    ),
    Mutation(
        "what a thread of the model saves is refused", "train/hooks.py ModelHooks._hooks_of",
        "not self._here.watchers and torch.is_grad_enabled()",
        "train/test_out_of_turn.py::test_a_module_called_in_a_thread_of_the_model_is_refused_with_gradients", "False",
    ),
    Mutation(
        "cached code is of the same types", "kernels/compile_cache.py _Cache.load_overload",
        "None if is_of_others else found",
        "kernels/test_compile_cache.py::test_code_of_another_process_for_other_types_is_not_run", "found",
    ),
    Mutation(
        "a backward that is closed has moved past the last commit", "train/steps.py Steps.backward",
        ", self._order.last_backward(is_final)",
        "train/test_clean.py::TestClose::test_in_the_middle_of_backward_leaves_a_whole_step", "",
    ),
    Mutation(
        "so has a thread that is in a step at exit", "train/engine.py Engine._close", "self._order.is_busy_elsewhere",
        "train/test_clean.py::TestClose::test_at_exit_of_a_thread_that_trains_publishes_no_step_that_it_moves_past",
        "False",
    ),
    Mutation(
        "a zero_grad that fails ends the step", "train/steps.py Steps.zero_grad",
        "self._order.unbroken(keeps_weights=True)",
        "train/test_out_of_turn.py::test_a_zero_grad_that_fails_breaks_the_step_off", "self._meters.outside()",
    ),
    Mutation(
        "what one rank is refused is undone at all", "train/whole.py take_back",
        "_restore(parts, [group.index for group in refused])",
        "train/test_zero.py::test_a_change_that_one_rank_makes_otherwise_is_refused_at_all_of_them",
    ),
    Mutation(
        "a change of one rank alone is trained by none", "train/whole.py gathered", "break_off(error)",
        "train/test_zero.py::test_a_change_that_is_broken_off_is_undone_or_nothing_is_trained",
    ),
    Mutation(
        "changes of a forward are undone", "train/steps.py Steps._refuse_changes",
        "not whole.undo_changes(self._parts, sorted({group for group, _ in changed}))",
        "train/test_out_of_turn.py::test_a_forward_that_changes_weights_is_refused_alone", "False",
    ),
    Mutation(
        "changes of a forward that cannot be undone are trained by none", "train/steps.py Steps._refuse_changes",
        'self._order.break_off(error, "a change of weights", keeps_weights=True)',
        "train/test_zero.py::test_a_change_that_is_broken_off_is_undone_or_nothing_is_trained",
    ),
    Mutation(
        "what a backward calls is guarded", "train/guard.py OffloadedParameter.__torch_function__",
        "func is torch.autograd.grad",
        "train/test_out_of_turn.py::test_gradients_of_weights_that_are_not_on_the_device", "False",
    ),
    Mutation(
        "weights of one call do not make way for each other", "train/guard.py OffloadedParameter.__torch_function__",
        "values * 2", "train/test_bad_input.py::TestBudgets", "values",
    ),
    Mutation(
        "weights that are set are gathered again", "train/whole.py _restore",
        "parts.access.weights_changed(groups)", VIEWED,
    ),
    Mutation(
        "what is given back is ready at each rank", "train/access.py DeviceAccess.release", "self._await_ready(groups)",
        "train/test_zero.py::test_a_step_inside_of_gathered_is_the_same_at_each_rank",
    ),
    Mutation(
        "what is viewed stays until it is ready again", "train/access.py DeviceAccess._is_viewed",
        "group in self._kept or ", VIEWED, "",
    ),
    Mutation(
        "an update on the GPU is at rest later", "store/updates.py UpdatePipeline.settle", " or group in self._on_gpu",
        ON_GPU, "",
    ),
    Mutation(
        "memory of the GPU goes with the store", "store/on_gpu.py StateOnGpu.release",
        "self._device.release(storage, Reached())", ON_GPU,
    ),
    Mutation(
        "state on the GPU is committed", "store/updates.py UpdatePipeline.write_resident",
        "[self._on_gpu.save(group, chunk, self._packs[1], index)]", ON_GPU, "[]",
    ),
    Mutation(
        "an error takes back what has its name already", "archive/publish.py Publication._commit",
        "self._discard(path)",
        "train/test_checkpoints.py::test_what_ends_a_write_leaves_the_old_checkpoint_or_the_new_one", "pass",
    ),
    Mutation(
        "a write removes what a killed one has left", "archive/publish.py Publication.begin",
        "self._clear_leftovers()",
        "train/test_checkpoints.py::test_what_ends_a_write_leaves_the_old_checkpoint_or_the_new_one", "pass",
    ),
    Mutation(
        "a new checkpoint is durable before the old one goes", "archive/publish.py Publication._commit",
        "self._backend.sync_directory(first)\n            self._retire",
        "train/test_checkpoints.py::test_a_power_cut_leaves_the_old_checkpoint_or_the_new_one", "self._retire",
    ),
    Mutation(
        "an old checkpoint does not come back", "archive/publish.py Publication._retire",
        "self._backend.sync_directory(directory)",
        "train/test_checkpoints.py::test_a_power_cut_leaves_the_old_checkpoint_or_the_new_one",
    ),
    Mutation(
        "sync of an exported file", "train/checkpoints.py _write_shard", "file.datasync()",
        "train/test_checkpoints.py::test_a_power_cut_leaves_the_old_checkpoint_or_the_new_one",
    ),
    Mutation(
        "only shards are leftovers", "archive/publish.py _was_renamed", "match is not None and ",
        "train/test_checkpoints.py::test_what_is_no_shard_of_ours_is_not_taken_for_a_leftover", "match is None or ",
    ),
    Mutation(
        "only what a killed writer has renamed is a leftover", "archive/publish.py _was_renamed",
        ' and not path.with_name(_temporary(match["number"])).exists()',
        "train/test_checkpoints.py::test_what_is_no_shard_of_ours_is_not_taken_for_a_leftover", "",
    ),
    Mutation(
        "who may replace is not begun beside another writer", "archive/publish.py Publication._is_abandoned",
        "descriptor is None and self._overwrite",
        "train/test_checkpoints.py::test_of_two_writers_the_second_is_refused", "False",
    ),
    never(
        "who has lost its file publishes nothing", "archive/publish.py Publication.commit",
        "if not all(map(is_at, self.temporaries, self._locks)):",
        "train/test_checkpoints.py::test_where_nothing_can_be_locked_the_second_writer_is_the_one_that_counts",
    ),
    Mutation(
        "who copies beside weights does so alone", "apps/outputs.py _whole", "turn(directory, Backend())",
        "apps/test_pack_commands.py::test_two_packs_into_one_directory_copy_what_is_beside_them_one_after_the_other",
        "contextlib.nullcontext()",
    ),
    Mutation(
        "weights that are there are not lost", "apps/train.py _Run._export", " or isinstance(error, DoneButFor)",
        "apps/test_train.py::test_an_export_that_fails_says_what_is_left", "",
    ),
    # Work that an exception interrupts.
    Mutation(
        "a round that nobody knows of is taken back", "train/rounds.py RoundDriver._begin_round", "self._round = None",
        f"{BROKEN_OFF}::test_is_no_matter_while_the_round_begins",
    ),
    Mutation(
        "a round taken back leaves gradients", "store/updates.py UpdatePipeline._travel", "elif not round_.is_void:",
        f"{BROKEN_OFF}::test_is_no_matter_while_the_round_begins", "else:",
    ),
    never(
        "a move begins once", "train/moves.py GroupMoves.start", "if move.has_begun:",
        f"{BROKEN_OFF}::test_is_no_matter_between_the_books_and_the_loop",
    ),
    Mutation(
        "close goes on where it was broken off", "train/engine.py Engine._close",
        "self._order.is_closed and not self._parts.runtime.is_open", "train/test_clean.py::TestClose",
        "self._order.is_closed",
    ),
    never(
        "files are the parent's", "store/store_files.py StoreFiles.release", "if self._lock.is_inherited:",
        "train/test_clean.py::TestFork",
    ),
    Mutation(
        "nothing ahead where ranks go different ways", "train/access.py DeviceAccess._depth_from",
        " or self._holds_all",
        "train/test_zero_models.py::test_ranks_that_go_different_ways_may_look_between_steps", "",
    ),
    Mutation(
        "weights of others wait for who reads here", "train/moves.py GroupMoves._refresh",
        "await self._store.updates.unread(group)",
        "train/test_zero_models.py::test_what_looks_before_the_step_reads_no_weights_of_after_it",
    ),
    Mutation(
        "a store that is refused leaves nothing pinned", "store/training.py TrainingStore.__init__",
        "self._release_memory()", ON_GPU, becomes="self.arena.close()",
    ),
    Mutation(
        "room for what is needed together", "train/groups.py _together",
        "held.union(",
        "train/test_bad_input.py::TestBudgets::test_of_groups_that_are_needed_together",
        "frozenset(",
    ),
    Mutation(
        "lock of a file being written", "archive/publish.py Publication._lock", "locked_file(path, 0o666)",
        "archive/test_killed.py", "os.open(path, os.O_RDWR | os.O_CREAT)",
    ),
    Mutation(
        "a pack that fails leaves nothing", "archive/publish.py Publication.begin",
        "self.callback(self._discard_ours, path, self._locks[-1])", "archive/test_killed.py",
    ),
    Mutation(
        "micro-batches that are given again", "train/steps.py Steps._give_up", "engine.zero_grad()",
        "train/test_out_of_turn.py", becomes="pass",
    ),
    Mutation(
        "a generation is one step", "store/commits.py Commits._publish",
        "self._refuse_several_steps(commit.everywhere)", "train/test_zero_models.py",
    ),
    Mutation(
        "half changed weights", "train/steps.py Steps.backward", "keeps_weights=not is_streaming",
        "train/test_out_of_turn.py", becomes="keeps_weights=True",
    ),
    Mutation(
        "a gradient set after backward", "train/steps.py Steps.step", "parts.groups.refuse_gradients()",
        "train/test_out_of_turn.py",
    ),
    Mutation(
        "no thread reads what another one changes", "train/engine.py Engine.gathered",
        'block.enter_context(self._order.alone("gathered()"))', "train/test_out_of_turn.py",
    ),
)  # fmt: skip
