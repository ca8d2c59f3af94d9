"""The seeded defects: small, plausible, each one line of the product changed."""

from __future__ import annotations

from dataclasses import dataclass

STAGE = (
    "backends/test_stages.py::test_products_are_those_of_the_dense_hessian_and_coefficients_those_"
    "of_zero3[{}]"
)
SAME = "backends/test_stages.py::test_training_is_bitwise_the_same[{}]"
ZERO3 = "backends/test_zero3.py::test_{}"
FP64 = (
    "megatron/test_layouts.py::test_fp64_gradients_and_products_are_those_of_a_double_backward[{}]"
)
FP32 = "megatron/test_layouts.py::test_fp32_spectra_are_those_of_one_process[{}]"
TRAP = "megatron/test_traps.py::test_{}"


@dataclass(frozen=True)
class Defect:
    """A change of one place in the product.

    Attributes:
        old: Text that stands in exactly one file of the product, once.
        new: What stands there instead.
        story: What is wrong then.
        tests: Below tests/, as pytest takes them: those that should see it, the cheapest first.
    """

    old: str
    new: str
    story: str
    tests: tuple[str, ...]


CONFIG = (
    Defect(
        "SECTION).ratio() > 0.85",
        "SECTION).ratio() > 1.85",
        'a misspelt "hessian" section is taken for no section',
        ("config",),
    ),
    Defect(
        'extra="forbid", strict=True, frozen=True',
        'extra="forbid", strict=False, frozen=True',
        'the text "30" is taken for the number 30',
        ("config",),
    ),
    Defect(
        "for p in touched if p in given]",
        "for p in touched if p not in section]",
        "a setting overridden twice is not refused",
        ("config",),
    ),
    Defect(
        'value for name, value in self.intervals.items() if name != "steps"',
        'value for name, value in self.intervals.items() if name == "interval"',
        "start_step is refused where only sharpness has an interval",
        ("config",),
    ),
    Defect(
        "nested.update(value)",
        "section[name] = value",
        "an override of a subsection drops its other keys",
        ("config",),
    ),
    Defect(
        "if keys.count(key) > 1})",
        "if keys.count(key) > 2})",
        "a key that stands twice in the configuration is not refused",
        ("config",),
    ),
)

OPS = (
    Defect(
        "if self._addresses != self._find():",
        "if not self._addresses:",
        "shards are written where they were when they were checked",
        ("ops/test_streaming.py::test_shards_are_written_where_they_are_now",),
    ),
    Defect(
        "reach = max(reach, (end, name))",
        "reach = (end, name)",
        "an output within another tensor, after a shorter one, is not seen to overlap",
        ("ops/test_misuse.py",),
    ),
    Defect(
        "(rows > 1 and tensor.stride(0) < width)",
        "(rows > 1 and tensor.stride(0) < 0)",
        "a basis whose rows overlap is accepted",
        ("ops/test_misuse.py",),
    ),
    Defect(
        "for _ in range(10):\n        high0",
        "for _ in range(9):\n        high0",
        "the twin's generator has a round less",
        ("ops/test_probes.py",),
    ),
    Defect(
        "if h != 0 and v is not None:",
        "if v is not None:",
        "the twin restores weights by adding 0 * v, which is not 0 where v is not finite",
        ("ops/test_streaming.py",),
    ),
    Defect(
        "second = (index & 2) != 0",
        "second = (index & 1) != 0",
        "the twin's Gaussian pairs are taken from the wrong words",
        ("ops/test_probes.py",),
    ),
    Defect(
        "if not tensor.is_inference():",
        "if tensor.is_inference():",
        "autograd does not learn of a native write",
        ("ops/test_misuse.py",),
    ),
)

CSRC = (
    Defect(
        "C::factor(-coefficients[r])",
        "C::factor(coefficients[r])",
        "the projection is added instead of subtracted",
        ("ops/test_basis.py",),
    ),
    Defect(
        "tile(i, stop, i < owned ? sums.data() : unused.data());",
        "tile(i, stop, sums.data());",
        "replicas count in the sums of a projection",
        ("ops/test_basis.py",),
    ),
    Defect(
        "kept_ = kCopy ? copies_.data() : tile;",
        "kept_ = kCopy ? copies_.data() + stride_ : tile;",
        "the products of copied rows are those of their neighbours",
        ("ops/test_basis.py",),
    ),
    Defect(
        "kRuns[j + 2 <= k]",
        "kRuns[j + 2 < k]",
        "the last of an even number of combinations is not formed",
        ("ops/test_basis.py",),
    ),
    Defect(
        "constexpr int64_t kWhole = kChain * lanes::kLanes;",
        "constexpr int64_t kWhole = 2 * kChain * lanes::kLanes;",
        "chains of products in fp32 are twice as long as their bound has room for",
        ("ops/test_basis.py",),
    ),
    Defect(
        "static_cast<uint64_t>((start + i - inside) / Kind::kPerBlock)",
        "static_cast<uint64_t>((i - inside) / Kind::kPerBlock)",
        "a probe begins at 0 wherever the shard begins",
        ("ops/test_probes.py",),
    ),
    Defect(
        "const uint64_t y_sign = static_cast<uint64_t>(quarter >> 1) << 63;",
        "const uint64_t y_sign = static_cast<uint64_t>(quarter & 1u) << 63;",
        "the sine has the sign of another quarter",
        ("ops/test_probes.py",),
    ),
    Defect(
        "+ std::min<int64_t>(range, tasks_ % threads_);",
        ";",
        "the tasks that do not divide by the threads are left out",
        ("ops/test_determinism.py",),
    ),
    Defect(
        "const D8 z = io.wide(zero + i);\n                          const D8 d = a - b,"
        " s = a + b - (z + z);",
        "const D8 z = io.wide(zero + i);\n                          const D8 d = a - b,"
        " s = a + b - z;",
        "the nonlinearity ratio of a trial has the gradient at w once instead of twice",
        ("ops/test_streaming.py",),
    ),
    Defect(
        "if (i >= owned) continue;",
        "if (i > owned) continue;",
        "the first tile of replicas counts in the sums",
        ("ops/test_streaming.py",),
    ),
    Defect(
        "if (v) add_product(sums[0], change, direction[j]);",
        "add_product(sums[0], change, direction[j]);",
        "CUDA: a change that is not finite has a product with a direction that is not there",
        ("ops/test_streaming.py",),
    ),
    Defect(
        "constexpr int kChainLength = 512;",
        "constexpr int kChainLength = 1 << 30;",
        "CUDA: a thread adds up all its elements without compensation",
        ("ops/test_determinism.py",),
    ),
    Defect(
        "return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(wanted, kMaxBlocks)));",
        "int sms = 0; cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);\n"
        "  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(wanted, sms)));",
        "CUDA: a grid, and so the bits of a sum, depends on the device",
        ("ops/test_basis.py",),
    ),
    Defect(
        "(blockIdx.x + gridDim.x - piece.blocks % gridDim.x) % gridDim.x;",
        "blockIdx.x;",
        "CUDA: every shard begins with the first block",
        ("ops/test_launches.py",),
    ),
    Defect(
        "return std::make_pair(a.first.weight_dtype, a.first.master_dtype) <",
        "return false && std::make_pair(a.first.weight_dtype, a.first.master_dtype) <",
        "CUDA: shards of two dtypes in turn take a launch each",
        ("ops/test_launches.py",),
    ),
)

VECTORS = (
    Defect(
        "key=lambda i: not fragments[i].owned",
        "key=lambda i: fragments[i].owned",
        "replicas come first in a vector",
        ("vectors",),
    ),
    Defect(
        "index = index * whole + offset + rest // inner",
        "index = index * whole + rest // inner",
        "a tensor-parallel block begins at the parameter's first element",
        (
            "resume/test_resume.py::test_fragments_of_boxes_and_of_whole_parameters_find_each_other",
            "vectors",
            FP64.format("TP sequence parallel"),
        ),
    ),
    Defect(
        "first = box.offset[0] * shape[1:].numel() if shape else 0",
        "first = box.offset[0] if shape else 0",
        "a block of rows begins at the number of its row",
        (
            "resume/test_resume.py::test_fragments_of_boxes_and_of_whole_parameters_find_each_other",
            "vectors",
            FP64.format("TP sequence parallel"),
        ),
    ),
    Defect(
        "stream = _hash64(fragment.name, probe)",
        "stream = _hash64(fragment.name)",
        "all probes of a seed are the same",
        ("vectors",),
    ),
    Defect(
        "index = fragment.index(start, stop, space.device)",
        "index = fragment.index(0, stop - start, space.device)",
        "every chunk of a large block repeats the first one",
        ("vectors",),
    ),
    Defect(
        "counts[block] += (part.stop - part.start) * owned",
        "counts[block] += part.stop - part.start",
        "replicas count in the sizes of blocks",
        ("krylov/test_blocks.py", "vectors"),
    ),
    Defect(
        "mine = figures if self.rank == 0 else [0.0] * len(figures)",
        "mine = figures",
        "a figure of rank 0 becomes the sum over the ranks",
        (ZERO3.format("figures_of_rank_0_are_those_of_all_ranks"),),
    ),
    Defect(
        'name.rpartition(".")[0] or name',
        "name",
        "every parameter without a number is a layer of its own",
        ("krylov/test_blocks.py",),
    ),
)

ZERO = (
    Defect(
        "max(start, run.start), min(start + numel, run.start + run.numel)",
        "max(start, run.start), start + numel",
        "ZeRO-3's padding is in the vectors",
        (ZERO3.format("a_product_is_the_dense_hessian_times_the_vector"),),
    ),
    Defect(
        "return 1.0 if averaged else 1.0 / data_parallel(engine)[1]",
        "return 1.0",
        "summed gradients are taken for averages",
        (STAGE.format("2 summed gradients"),),
    ),
    Defect(
        "optimizer.micro_step_id = micro_step - bool(ready)",
        "optimizer.micro_step_id = -1",
        "an accumulation window of an offloaded ZeRO-2 begins anew",
        (SAME.format("2 optimizer offload"),),
    ),
    Defect(
        "optimizer.grad_partitions_flat_buffer.copy_(buffer)",
        "pass",
        "gradients that ZeRO-3 has accumulated are lost",
        (SAME.format("3 hpZ"),),
    ),
    Defect(
        '1 - beta**step if settings.get("bias_correction", True) else 1.0',
        "1.0",
        "Adam's moments are not corrected for their bias",
        (
            "backends/test_sharpness.py::"
            "test_adams_divisor_and_step_are_those_of_the_training[stage 2 offload]",
            "backends/test_sharpness.py",
        ),
    ),
    Defect(
        "low, high = total * rank // ranks, total * (rank + 1) // ranks",
        "low, high = 0, total",
        "every rank of stage 0 owns all coordinates",
        (STAGE.format("0"),),
    ),
    Defect(
        "self._guard.random.set(self._states[index])\n        for buffers in self._guard.buffers:",
        "for buffers in self._guard.buffers:",
        "a micro-batch has other dropout masks in each evaluation",
        (
            ZERO3.format("training_with_spectra_in_between_is_bitwise_the_same[default]"),
            "resume/test_engines.py::test_after_an_error_in_the_loss_it_goes_on_to_the_same_bits",
            "backends/test_analyses.py",
        ),
    ),
    Defect(
        "if master is None or not torch.equal(weight, master.to(weight.device, weight.dtype)):",
        "if master is None:",
        "weights that somebody has edited come back as rounded masters",
        ("backends/test_sharded.py",),
    ),
    Defect(
        "offset[dim] = (k * ranks + rank) * block[dim]",
        "offset[dim] = (rank * stride + k) * block[dim]",
        "the halves of a gated layer change places between tensor-parallel ranks",
        (
            "megatron/test_deepspeed.py::"
            "test_attributes_of_layers_say_what_their_sharded_state_dict_says",
        ),
    ),
    Defect(
        "self.optimizer.invalidate_secondary_tensor()",
        "pass",
        "forwards under hpZ read the secondary shards of before",
        (STAGE.format("3 hpZ"),),
    ),
    Defect(
        "return space.world_size / count, loss / count",
        "return space.world_size / count, loss / terms",
        "the loss of token-weighted micro-batches is the sum over the number of micro-batches",
        (ZERO3.format("counts_weight_micro_batches_by_their_tokens"),),
    ),
    Defect(
        'getattr(m, "sparse", False) is True for',
        'getattr(m, "sparse", False) is None for',
        "sparse gradients are measured instead of refused",
        (
            "backends/test_stages.py::"
            "test_what_is_not_supported_is_refused_by_name_on_all_ranks[sparse gradients]",
        ),
    ),
    Defect(
        "return master, before + piece.start, group",
        "return master, piece.start, group",
        "Adam's moments of stage 0 in fp16 are those of the group's first parameter",
        (
            "backends/test_sharpness.py::"
            "test_adams_divisor_and_step_are_those_of_the_training[stage 0 fp16 fused]",
        ),
    ),
    Defect(
        "offset = [source // stride % size for",
        "offset = [0 for",
        "every rank is taken to have the first block of a layer that AutoTP has split",
        ("backends/test_auto_tp.py",),
    ),
    Defect(
        "return self._share * host.averaging_factor(engine) / (scale * factor)",
        "return host.averaging_factor(engine) / (scale * factor)",
        "gradients of ranks that share a sequence are added up as if they did not",
        ("backends/test_sequence.py",),
    ),
)

MEGATRON = (
    Defect(
        "return not any(numbers[:-1] if sharded else numbers)",
        "return not any(numbers[:-1])",
        "data-parallel replicas all count",
        (FP64.format("DP"),),
    ),
    Defect(
        "terms = (1.0 if self._forward.per_token else float(len(micro_batches))) / factor",
        "terms = 1.0 / factor",
        "a run of several micro-batches counts as one",
        (FP64.format("DP"),),
    ),
    Defect(
        "first = buffer.data_parallel_group.rank() * size",
        "first = 0",
        "every rank has the first shard of the distributed optimizer",
        (FP64.format("DP distributed optimizer overlap"),),
    ),
    Defect(
        "chunk.start_param_sync(force_sync=True)",
        "pass",
        "displaced shards are not gathered",
        (FP64.format("DP distributed optimizer overlap"),),
    ),
    Defect(
        "if host.tensor_parallel_rank() == 0:",
        "if True:",
        "every tensor-parallel rank counts its tokens",
        (FP64.format("TP per token"),),
    ),
    Defect(
        "self.random.set(self._states[drawing])",
        "pass",
        "a micro-batch has other dropout masks in each evaluation",
        ("megatron/test_layouts.py::test_products_repeat_bit_for_bit_with_dropout",),
    ),
    Defect(
        "if latest.setdefault(layer.name, backward) != backward:",
        "if latest.setdefault(layer.name, backward) is None:",
        "factors of micro-batches are those of the groups that a schedule runs",
        ("megatron/test_kronecker.py::test_factors_are_those_of_one_process[PP interleaved]",),
    ),
    Defect(
        "tracker.update(entries)",
        "pass",
        "losses that training has logged are gone",
        (TRAP.format("what_training_sets_and_logs_neither_changes_a_product_nor_is_changed"),),
    ),
    Defect(
        '"timers", "grad_scale_func", "param_sync_func"',
        '"timers", "param_sync_func"',
        "the job's loss scale is in the gradients of a product",
        (TRAP.format("what_training_sets_and_logs_neither_changes_a_product_nor_is_changed"),),
    ),
    Defect(
        "chunk.disable_forward_pre_hook(param_sync=False)",
        "pass",
        "every forward of a measurement gathers once more",
        (TRAP.format("a_gather_in_flight_is_finished_before_weights_are_written"),),
    ),
    Defect(
        "low, high = max(first, offset), min(last, offset + tensor.data.numel())",
        "low, high = max(first, offset), last",
        "a piece runs over the end of its half of a gated layer",
        (FP64.format("DP"),),
    ),
)

GUARD = (
    Defect(
        "buffer.copy_(value)",
        "pass",
        "what passes write into buffers stays",
        ("backends/test_guard.py", SAME.format("1")),
    ),
    Defect(
        "m.training = flag",
        "m.training = flags[0][1]",
        "all submodules get the mode of the whole module",
        ("backends/test_guard.py", SAME.format("1")),
    ),
    Defect(
        "np.random.set_state(numpy)",
        "pass",
        "numpy's generator is not put back",
        ("backends/test_guard.py", SAME.format("1")),
    ),
    Defect(
        "for owner, name, value in reversed(self.undo):",
        "for owner, name, value in self.undo:",
        "an attribute that was set twice keeps the first of the values set",
        ("backends/test_guard.py", SAME.format("1")),
    ),
    Defect(
        "owner.__dict__.pop(name, None)",
        "pass",
        "an attribute that was not there stays",
        ("backends/test_guard.py", SAME.format("1")),
    ),
    Defect(
        '"fp32_precision", "ieee") for owner in owners',
        '"fp32_precision", "tf32") for owner in owners',
        "passes in fp32 run in TF32",
        ("backends/test_guard.py", "backends/test_stages.py"),
    ),
    Defect(
        "start.float() if self.wide and narrow else start.clone()",
        "start.float() if self.wide and narrow else start",
        "a pass writes into the buffers as they are kept",
        ("backends/test_guard.py", TRAP.format("expert_bias_and_logged_losses_are_as_they_were")),
    ),
    Defect(
        "guard.callback(guard.state.restore)",
        "guard.callback(lambda: None)",
        "training goes on from what passes have left in attributes and tensors",
        ("backends/test_state.py",),
    ),
    Defect(
        "        self.put_back()\n        inside",
        "        inside",
        "an evaluation begins with what the one before has changed",
        ("backends/test_state.py",),
    ),
    Defect(
        "                state.before(apply, args, {})",
        "                pass",
        "passes add to gradients of what only a written function reads",
        ("backends/test_state.py",),
    ),
)

RANKS = (
    Defect(
        "_all_reduce(flags, dist.ReduceOp.MAX, group)",
        "pass",
        "a rank does not hear of another one's failure",
        ("vectors/test_vectors.py::test_a_failure_on_one_rank_is_raised_on_all",),
    ),
    Defect(
        "first = min(failed)\n",
        "first = min(failed, key=lambda each: each.rank)\n",
        "the lowest of the failed ranks is named, not the one that failed first",
        (
            "backends/test_lockstep.py",
            ZERO3.format(
                "a_failing_spectrum_raises_everywhere_and_leaves_training_bitwise_alone[2]"
            ),
        ),
    ),
    Defect(
        "raise MeasurementError(text) from error",
        "raise MeasurementError(text) from None",
        "the cause of a failure is lost",
        ("vectors/test_vectors.py",),
    ),
    Defect(
        "known |= from_rank(mine - known, speaker, device)",
        "known |= from_rank(mine - known, speaker, device) if mine else mine",
        "a rank that has nothing takes no part in a broadcast",
        ("backends/test_exchange.py::test_a_union_is_told_once_by_each_rank_that_adds_to_it",),
    ),
    Defect(
        "total[i] += (ranks * first - 1) * number",
        "total[i] += (ranks * first - 1) * (number % 2)",
        "different things are taken to be alike",
        ("backends/test_exchange.py",),
    ),
    Defect(
        "            if self._asked:\n                self._node.take(self._name)",
        "            if self._asked:\n                pass",
        "the rank that looks tells nobody that another has asked",
        ("backends/test_watch.py",),
    ),
    Defect(
        "looks = self._node.take(FIRST)",
        "looks = self._node.ranks > 0",
        "every rank watches the store",
        ("backends/test_watch.py",),
    ),
    Defect(
        "inner._waiting += self._waiting[self._reported :]\n"
        "            del self._waiting[self._reported :]",
        "pass",
        "a signal that comes as ranks enter a measurement waits until its end",
        ("backends/test_lockstep.py",),
    ),
    Defect(
        "said = reduce(mine.to(device))",
        "said = mine.to(device)\n    dist.all_reduce(said)",
        "ranks do not meet before they enter a measurement",
        ("backends/test_lockstep.py",),
    ),
    Defect(
        "    if not balanced(said[2:4]):\n        _require_alike(call)",
        "    pass",
        "ranks that make different calls go on",
        ("backends/test_calls.py",),
    ),
    Defect(
        "self._next <= len(self._begun)",
        "self._next < 0",
        "a schedule that is run once more sends again what it has sent",
        ("backends/test_lockstep.py",),
    ),
    Defect(
        "tensor.copy_(integers)",
        "tensor.zero_()",
        "a schedule that is run once more has lost the shapes that it was told",
        ("backends/test_lockstep.py",),
    ),
    Defect(
        "* line.group.size] if number == root else []",
        "* line.group.size] if number == 0 else []",
        "a rank that failed is the root of every scatter if it is the first of its group",
        ("backends/test_lockstep.py",),
    ),
    Defect(
        "current.error = current.error or (error, (*where, current.segment.made))",
        "current.error = current.error or (error, where)",
        "failures are not ordered by the collectives before them",
        (
            "backends/test_lockstep.py",
            ZERO3.format(
                "a_failing_spectrum_raises_everywhere_and_leaves_training_bitwise_alone[2-split]"
            ),
        ),
    ),
)

OPERATORS = (
    Defect(
        "return off * (self.lacking or self.least) > error * product.size",
        "return False",
        "what steps lack of v is in no error",
        ("operators/test_attack.py",),
    ),
    Defect(
        "return usable and lacks and",
        "return usable and",
        "a trial that saturates is taken for one beyond the steps of rounding",
        ("operators/test_attack.py::test_a_saturated_trial_is_no_step_of_rounding",),
    ),
    Defect(
        "beside_outputs(f, REACH)",
        "beside_outputs(f)",
        "a cross entropy is verified at outputs no farther than small ones are",
        ("operators/test_gauss_newton.py",),
    ),
    Defect(
        "return bent and not self.rounded",
        "return False",
        "changes between saturated outputs are taken for a valley",
        ("operators/test_gauss_newton.py",),
    ),
    Defect(
        "            apart = (rows[some] - start[some, None]).sub_(means[some, None])",
        "            apart = rows[some] - (start + means)[some, None]",
        "of a sure token, rounding of the vector itself is left",
        ("operators/test_gauss_newton.py",),
    ),
    Defect(
        "            if apart > max(APART * bars, _noise(found, best, i)):",
        "            if apart > max(100 * APART * bars, _noise(found, best, i)):",
        "of two plateaus of forms the upper one is taken",
        ("operators/test_forms.py",),
    ),
    Defect(
        "chosen = int(torch.where(returned, table[:, ORDER], torch.inf).argmin())",
        "chosen = int(table[:, SEEN].gt(0).int().argmax())",
        "a part of a head is taken for the head",
        ("operators/test_gauss_newton.py",),
    ),
    Defect(
        "rough, over = session.space.reduce(mine).tolist()",
        "rough, over = mine.tolist()",
        "a rank knows of the kinks of its own micro-batches alone",
        ("backends/test_kinks.py",),
    ),
    Defect(
        "return replace(self, order=1, truncation=1.0, truncation_spread=KINKS_SPREAD)",
        "return self",
        "the error among kinks falls with the order of the formula",
        ("operators/test_step_control.py",),
    ),
    Defect(
        "scale = self.scale * len(self.all) / len(self.pilot)",
        "scale = self.scale",
        "the products of trials are those of the pilot's share of the loss",
        ("operators/test_finite_difference.py", "operators/test_step_control.py"),
    ),
    Defect(
        "half = (a - b) * h / (2 * part * self.scale * length)",
        "half = (a - b) * h / (2 * part * self.scale)",
        "a product ignores the length of its vector",
        ("operators/test_finite_difference.py",),
    ),
    Defect(
        "self.noise = Estimate(self.noise.mean + math.log(self.quiet), self.noise.spread)",
        "self.noise = Estimate(self.noise.mean - math.log(self.quiet), self.noise.spread)",
        "where runs are costly, all micro-batches are taken to have more noise than the pilot",
        ("operators/test_pilots.py",),
    ),
    Defect(
        "if self.session.costly_runs and taught and not kept:",
        "if taught and not kept:",
        "products are of all micro-batches where runs are cheap, too",
        ("test_timing.py",),
    ),
    Defect(
        "math.copysign(1.0, position - start)",
        "1.0",
        "the fidelity has the wrong sign where the step runs backwards",
        ("operators/test_schemes.py",),
    ),
    Defect(
        "(2, -2, -1 / 3)",
        "(2, -2, 1 / 3)",
        "the outer difference of the fourth-order formula has the wrong sign",
        ("operators/test_schemes.py",),
    ),
    Defect(
        "return np.asarray(len(self.all) * self.scale / (2 * h * length) * found)",
        "return np.asarray(len(self.all) * self.scale / (2 * h) * found)",
        "curvatures of micro-batches ignore the length of the vector",
        ("operators/test_sampling.py",),
    ),
    Defect(
        "return float(samples.std(ddof=1)) / math.sqrt(len(samples))",
        "return float(samples.std()) / math.sqrt(len(samples))",
        "the standard error of the micro-batches is too small",
        ("operators/test_sampling.py",),
    ),
    Defect(
        "curvature=along / length**2,",
        "curvature=along / length,",
        "a sweep's curvature depends on the length of the direction",
        ("operators/test_sweep.py",),
    ),
    Defect(
        "return np.sqrt(3 * np.minimum(noise / (h * size), 1.0) ** 2 + saturating**2)",
        "return np.sqrt(np.minimum(noise / (h * size), 1.0) ** 2 + saturating**2)",
        "noise is taken to be sqrt(3) times larger than it is",
        ("operators/test_step_control.py",),
    ),
    Defect(
        "if error > worth * best and self.fixed is None:",
        "if outlook.excess > WORTH:",
        "a product at a given displacement is made again at another one",
        ("operators/test_finite_difference.py::test_a_given_displacement_is_the_one_that_is_used",),
    ),
    Defect(
        "rounded = np.maximum(shared(around.quiet * noise, in_gradients), around.least)",
        "rounded = around.quiet * noise",
        "a product can have less noise than its gradients are rounded by",
        ("operators/test_honest_estimates.py",),
    ),
    Defect(
        "self._take_rounding(found if math.isfinite(found) else None)",
        "self._take_rounding(0.0)",
        "rounding that all tokens share is not known",
        ("operators/test_honest_estimates.py",),
    ),
    Defect(
        "if lost:  # nothing better: all that its step shows is rounding",
        "if False and lost:",
        "a product is repeated where its step is lost",
        ("operators/test_honest_estimates.py",),
    ),
    Defect(
        "bent = min(max(_bent(belief, product), bend * product.h), LARGEST[1])",
        "bent = min(bend * product.h, LARGEST[1])",
        "micro-batches that bend more than the pilot have no more truncation",
        (
            "operators/test_step_control.py::test_a_product_that_bends_more_than_its_pilot_has_as_"
            "much_more_truncation",
        ),
    ),
    Defect(
        "not self.kinked and self._unlike(product) > OTHER",
        "not self.kinked and False",
        "a pilot whose ratio is far smaller than the slice's is kept",
        ("operators/test_attack.py::test_a_pilot_whose_ratio_is_far_smaller_is_given_up",),
    ),
    Defect(
        "return doubted or (not told and self._possible(product) > COVERAGE * self.outlook.error)",
        "return False",
        "truncation that a slice may have is not looked for",
        (
            "operators/test_step_control.py::test_what_a_product_has_shown_is_not_asked_of_the_product_"
            "made_again",
        ),
    ),
    Defect(
        "return apart.add_(self.at_w, alpha=c * c - 1).sub_(self.at[-1], alpha=c * c)",
        "return apart.add_(self.at_w, alpha=c * c - 1).sub_(self.at[-1], alpha=c * c - 1)",
        "the third difference of a slice misses a gradient",
        ("operators/test_finite_difference.py",),
    ),
    Defect(
        "return outlook.h if self.wall == math.inf else min(outlook.h, product.h)",
        "return outlook.h",
        "a product is repeated nearer to a wall of the loss",
        (
            "operators/test_step_control.py::test_a_wall_that_no_model_expects_is_not_run_into_again",
        ),
    ),
    Defect(
        "return grid[: max(1, int(np.searchsorted(grid, self.wall)))]",
        "return grid",
        "displacements beyond a wall of the loss are tried again",
        (
            "operators/test_step_control.py::test_a_wall_that_no_model_expects_is_not_run_into_again",
        ),
    ),
    Defect(
        "known = np.hypot(rounding, around.roundoff)",
        "known = rounding",
        "the roundoff of the passes is no least error",
        ("operators/test_attack.py::test_rounding_that_is_opposite_on_both_sides_is_in_the_error",),
    ),
    Defect(
        "smooth = math.exp(kappa) * trial.nonlinearity**self.around.order",
        "smooth = math.exp(kappa) * trial.nonlinearity",
        "a smooth function is allowed the third difference of a kink",
        (
            "operators/test_step_control.py::test_a_third_difference_beyond_that_of_a_smooth_"
            "function_is_a_kink",
        ),
    ),
    Defect(
        "if self.fixed is None and strange and not self._often_rough:",
        "if False:",
        "a product that bends far more than its pilot is kept",
        (
            "operators/test_step_control.py::test_a_product_unlike_its_pilot_is_repeated_where_its_"
            "ratio_is_noise",
        ),
    ),
    Defect(
        "self.noise, self.bend = drifted(noise, bend)",
        "_, self.bend = drifted(noise, bend)",
        "a vector learns nothing of the noise of the one before",
        ("operators/test_step_control.py",),
    ),
    Defect(
        "w = scaled_in_place(w, self.scale)",
        "w = w if isinstance(self.scale, Tensor) else scaled_in_place(w, self.scale)",
        "a preconditioned product is scaled on one side only",
        ("krylov/test_solves.py",),
    ),
)

KRYLOV = (
    Defect(
        "errors = COVERAGE * np.hypot(run.product_errors, run.rounding_errors)",
        "errors = np.hypot(run.product_errors, run.rounding_errors)",
        "errors of products count once in the bars of Ritz values",
        ("krylov/test_lanczos.py", "records/test_spectrum.py"),
    ),
    Defect(
        "residual = abs(run.betas[-1] * vectors[-1])",
        "residual = abs(run.betas[-1] * vectors[0])",
        "residuals are made of the first components",
        ("krylov/test_lanczos.py",),
    ),
    Defect(
        "exhausted = beta <= BREAKDOWN * scale or norm <= again",
        "exhausted = beta <= BREAKDOWN * scale",
        "a residual of rounding is taken for a direction",
        ("krylov/test_lanczos.py", "krylov/test_eigenpairs.py"),
    ),
    Defect(
        "seed, probe + (k << 32), kind)",
        "seed, probe + k, kind)",
        "an exhausted space goes on with the next probe's vector",
        ("krylov/test_lanczos.py", "krylov/test_quadrature.py"),
    ),
    Defect(
        "couplings = self.betas[-1] * vectors[-1, keep]",
        "couplings = self.betas[-1] * vectors[0, keep]",
        "a thick restart has the wrong arrow",
        ("krylov/test_eigenpairs.py",),
    ),
    Defect(
        "displacements=displacements[order],",
        "displacements=displacements,",
        "the displacements of eigenpairs are in another order than their values",
        ("krylov/test_eigenpairs.py",),
    ),
    Defect(
        "for part in v[: self.n_owned].split(CHUNK):",
        "for part in v.split(CHUNK):",
        "copies of parameters count in the participation of eigenvectors",
        ("krylov/test_eigenpairs.py",),
    ),
    Defect(
        "vectors=found[order.tolist()],",
        "vectors=found,",
        "eigenvectors are in another order than their values",
        ("krylov/test_eigenpairs.py",),
    ),
    Defect(
        "max(float(second) - mean**2, 0.0) / len(runs))",
        "max(float(second) - mean**2, 0.0))",
        "the error of the trace does not fall with the number of probes",
        ("krylov/test_lanczos.py", "records/test_spectrum.py"),
    ),
    Defect(
        "np.hypot(inside.std(0, ddof=1) / math.sqrt(num_matvecs), of_blocks)",
        "np.hypot(inside.std(0, ddof=1), of_blocks)",
        "errors of blocks' traces are those of a single probe",
        ("krylov/test_traces.py",),
    ),
    Defect(
        "outside = along - 2 * u @ own + u @ inner @ u",
        "outside = along - 2 * u @ own",
        "XTrace forgets the part of the projected matrix",
        ("krylov/test_traces.py",),
    ),
    Defect(
        "error = _jackknife(without.sum(0) / (m - 1))",
        "error = None",
        "XTrace takes its estimates for independent",
        ("krylov/test_traces.py",),
    ),
    Defect(
        "np.where(relative < 1, known,",
        "np.where(relative < np.inf, known,",
        "a product that is all error tells a trace",
        ("krylov/test_traces.py",),
    ),
    Defect(
        "(abs(values + shift) - pairs.inexact).min()",
        "(abs(values - shift) - pairs.inexact).min()",
        "the error of a solution is divided by the distance to the wrong shift",
        ("krylov/test_solves.py",),
    ),
    Defect(
        "max(absolute_error(product), unexplained) * length",
        "max(absolute_error(product), unexplained)",
        "the doubt of a residual ignores the length of the solution",
        ("krylov/test_solves.py",),
    ),
    Defect(
        "math.sqrt(max(0.0, 1 - 2 * along + square))",
        "math.sqrt(max(0.0, 1 - along))",
        "what rounding changes in a row is wrong",
        ("krylov/test_storage.py", "krylov/test_lanczos.py"),
    ),
    Defect(
        "energies.append((r2 / 2, (a2 + b2) / 2))",
        "energies.append((r2, (a2 + b2) / 2))",
        "the off-block share is twice as large",
        ("krylov/test_blocks.py",),
    ),
    Defect(
        "r.sub_(x if metric is None else x * metric, alpha=value)",
        "r.sub_(x, alpha=value)",
        "the residual of the preconditioned problem is that of the other",
        ("krylov/test_sharpness.py",),
    ),
    Defect(
        "bounds.append((sums[left], min(float(sums[left + 1]), 1.0)))",
        "bounds.append((sums[left], min(float(sums[left]), 1.0)))",
        "the weight at x is left out of the upper bound",
        ("krylov/test_quadrature.py",),
    ),
    Defect(
        "self._stamp(part[:, columns.stop - columns.start :])",
        "pass",
        "a lost write of a rotated basis is not seen",
        ("krylov/test_storage.py",),
    ),
    Defect(
        "if row != self._held:",
        "if self._held < 0:",
        "the row read last is given for any other",
        ("krylov/test_storage.py",),
    ),
)

RECORDS = (
    Defect(
        "weights * (1 - count / n) / np.where(",
        "weights / np.where(",
        "the mass of the density is above 1 where there are outliers",
        ("records/test_density.py",),
    ),
    Defect(
        "if near and all(probe != other for _, _, other in last):",
        "if near:",
        "two outliers of one probe become one eigenvalue",
        (
            "records/test_density.py::"
            "test_outliers_of_one_probe_stay_apart_and_those_of_several_become_one",
        ),
    ),
    Defect(
        "lower = (fewest + rest * _wilson(low, trials, -z)) / n",
        "lower = (fewest + rest * _wilson(low, trials, 0 * z)) / n",
        "the lower bound holds in half of the cases",
        ("records/test_density.py",),
    ),
    Defect(
        "if found == digest:",
        "if found:",
        "damaged arrays are read",
        ("records/test_store.py",),
    ),
    Defect(
        "os.fsync(file.fileno())\n            os.rename(temporary, path)",
        "os.rename(temporary, path)",
        "a record is renamed before its content is on the disk",
        ("records/test_store.py",),
    ),
    Defect(
        "before = np.pad(betas[:, :-1], ((0, 0), (1, 0)))",
        "before = np.zeros_like(betas)",
        "the norm of a product lacks the beta before",
        ("records/test_advice.py",),
    ),
    Defect(
        "return Estimate(self.trace.value / self.n, self.trace.error / self.n)",
        "return Estimate(self.trace.value / self.n, self.trace.error)",
        "the mean eigenvalue has the error of the trace",
        ("records/test_spectrum.py",),
    ),
    Defect(
        "return 2 * np.cumsum(np.concatenate([start, pieces], axis=1), axis=1) / h**2",
        "return np.cumsum(np.concatenate([start, pieces], axis=1), axis=1) / h**2",
        "the triangular average is half of what it is",
        ("operators/test_sweep.py",),
    ),
    Defect(
        "offset = stop\n        text",
        "offset = stop + 4\n        text",
        "tensors of a file of vectors lie four bytes apart",
        (
            "backends/test_analyses.py::"
            "test_damaged_files_are_refused_and_failed_writes_leave_nothing",
        ),
    ),
    Defect(
        "decimals = max(0, 1 - math.floor(math.log10(error)))",
        "decimals = max(0, -math.floor(math.log10(error)))",
        "an estimate is shown to one digit of its error",
        ("records/test_spectrum.py",),
    ),
)

RESUME = (
    Defect(
        'f"state.{generation}.json"',
        '"state.0.json"',
        "the state before is overwritten",
        (
            "resume/test_resume.py::test_a_damaged_state_is_not_read_but_the_one_before",
            "resume/test_resume.py",
        ),
    ),
    Defect(
        'found.digest(v) == reader.metadata["blake2b"]',
        'bool(reader.metadata["blake2b"])',
        "a damaged vector is resumed",
        (
            "resume/test_resume.py::test_a_damaged_state_is_not_read_but_the_one_before",
            "resume/test_journal.py::test_a_damaged_product_is_made_again",
            "resume/test_resume.py",
        ),
    ),
    Defect(
        '"norm of the weights": session.weight_norm(),',
        '"norm of the weights": 0.0,',
        "the state of other weights is resumed",
        (
            "resume/test_resume.py::test_the_state_of_another_measurement_is_refused",
            "resume/test_resume.py",
            "resume/test_journal.py::test_a_foreign_state_is_refused",
        ),
    ),
    Defect(
        "distance = math.sqrt(self.space.n * square / SKETCHES) / there[-1]",
        "distance = math.sqrt(square / SKETCHES) / there[-1]",
        "a product of another vector is replayed",
        ("resume/test_journal.py",),
    ),
    Defect(
        "return replace(product, error=math.hypot(product.error or 0.0, distance))",
        "return product",
        "a replayed product of a vector that is off has no larger error",
        ("resume/test_journal.py",),
    ),
    Defect(
        "self.all_reduces + self.space.all_reduces - self._reduced,",
        "self.space.all_reduces - self._reduced,",
        "the cost of the interrupted part is forgotten",
        ("resume",),
    ),
    Defect(
        "self._random.set(here)",
        "pass",
        "the generators stay where a resumed measurement left them",
        ("resume/test_resume.py::test_random_states_are_those_of_the_beginning",),
    ),
    Defect(
        "for g in kept[-2:] for need",
        "for g in kept[-1:] for need",
        "vectors of the generation before are removed",
        (
            "resume/test_resume.py::test_a_damaged_state_is_not_read_but_the_one_before",
            "resume/test_resume.py",
        ),
    ),
    Defect(
        "a, b = part.start - fragment.start, offset - other.start",
        "a, b = part.start - fragment.start, offset",
        "another layout reads the wrong coordinates",
        (
            "resume/test_resume.py::test_another_number_of_ranks_goes_on_to_rounding",
            "resume/test_resume.py",
        ),
    ),
    Defect(
        "checkpoint(self._doing, device=self.space.device)",
        "pass",
        "a state is published though a rank could not write its vectors",
        ("resume",),
    ),
    Defect(
        'operator.load_state_dict(self._found["operator"])',
        "pass",
        "what step control has learnt is not resumed",
        (
            "resume/test_resume.py::test_every_basis_is_resumed_to_the_same_bits",
            "resume/test_resume.py",
        ),
    ),
)

SCHEDULE = (
    Defect(
        "started = step >= config.start_step",
        "started = step > config.start_step",
        "nothing is measured at the first step that may be",
        ("test_schedule.py",),
    ),
    Defect(
        "if self.model.training and not FixedFunction.is_evaluated():",
        "if not FixedFunction.is_evaluated():",
        "micro-batches of a validation are captured",
        ("test_schedule.py",),
    ),
    Defect(
        "self.calls.append(Call(copied(args), copied(kwargs)))",
        "self.calls.append(Call(args, kwargs))",
        "captured micro-batches change with the user's tensors",
        ("test_schedule.py",),
    ),
    Defect(
        "if engine.global_steps != before:",
        "if True:",
        "it is measured after every micro-batch of an accumulation window",
        (ZERO3.format("a_schedule_measures_once_for_a_step_of_several_micro_batches"),),
    ),
    Defect(
        'if k != "num_items_in_batch"',
        'if k != "num_items"',
        "the loss of a captured micro-batch is divided by the tokens of a whole step",
        ("launch/test_launch.py::test_a_captured_micro_batch_has_its_own_mean_loss", "launch"),
    ),
    Defect(
        "hessian.sharpness(preconditioned=None)",
        "hessian.sharpness(preconditioned=False)",
        "scheduled sharpness leaves Adam out",
        (ZERO3.format("spectra_and_sharpness_on_schedule"),),
    ),
)

CLI = (
    Defect(
        "return 0 if diagnosis.healthy else 1",
        "return 0",
        "the doctor finds something wrong and ends with 0",
        ("cli/test_cli.py",),
    ),
    Defect(
        '"B": 1e9,',
        '"B": 1e10,',
        "7B are 70 billion parameters",
        ("cli/test_plan.py",),
    ),
    Defect(
        "return dict(sorted(found.items(), key=lambda item: step_of(item[1])))",
        "return dict(sorted(found.items(), key=lambda item: -step_of(item[1])))",
        "the steps of a run are shown backwards",
        ("cli/test_cli.py",),
    ),
    Defect(
        "return 0 if found.missing is None else 1",
        "return 1 if found.missing is None else 0",
        "a plan that fits ends with 1",
        ("cli/test_plan.py",),
    ),
    Defect(
        "price = price_per_hour * job.world_size * time.total / 3600",
        "price = price_per_hour * time.total / 3600",
        "a job's price is that of one rank",
        ("cli/test_plan.py",),
    ),
    Defect(
        'r.node == mine.node or tier == "resume"',
        "r.node == mine.node",
        "ranks of other nodes are taken to have a resume folder of their own",
        ("test_memory.py",),
    ),
    Defect(
        "n_local = n if self.stage == 0 else math.ceil(n / self.world_size)",
        "n_local = math.ceil(n / self.world_size)",
        "the plan of stage 0 has the vectors of a shard",
        ("test_memory.py", "cli/test_plan.py"),
    ),
    Defect(
        "return 2 * mean + min(2, mean)",
        "return mean",
        "a step is taken to read the basis once",
        ("test_timing.py",),
    ),
    Defect(
        "return (self.pipeline - 1) / self.virtual",
        "return self.pipeline - 1.0",
        "virtual stages do not shorten the wait of a pipeline",
        ("test_timing.py",),
    ),
    Defect(
        "return Evaluations(whole + pilot * pilots, parts * whole + pilots)",
        "return Evaluations(whole + pilot * pilots, whole + pilots)",
        "the pilot and the rest are taken for one run",
        ("test_timing.py",),
    ),
    Defect(
        "return ranks // of_expert, ranks // (self.tensor * self.pipeline)",
        "return ranks // (self.tensor * self.pipeline), ranks // (self.tensor * self.pipeline)",
        "experts are shared out like other layers",
        ("test_jobs.py",),
    ),
    Defect(
        "if last and (self.pipeline > 1 or not shape.tied):",
        "if last and not shape.tied:",
        "the last stage has no copy of a tied embedding",
        ("test_jobs.py",),
    ),
)

FUNCTION = (
    Defect(
        "choice = self._next(recorded, now)",
        "choice = now",
        "choices are made anew in each evaluation",
        ("routing/test_choices.py", "megatron/test_routes.py"),
    ),
    Defect(
        "if here in known:\n            return known[here]",
        "if here in known:\n            return next(iter(known.values()), None)",
        "recomputed activations make the choices of the first layer",
        ("routing/test_choices.py",),
    ),
    Defect(
        "elif func in COMPOSED or is_composed(func, types):",
        "elif is_composed(func, types):",
        "no choice is seen in a backward",
        ("routing/test_choices.py",),
    ),
    Defect(
        "if dropping and isinstance(value, float) and 0 < value <= 1:",
        "if False:",
        "kernels of other libraries drop",
        ("routing/test_function.py",),
    ),
    Defect(
        "if not module.training:\n        module.train()",
        "module.eval()",
        "losses that only training has are left out",
        ("routing/test_function.py", "megatron/test_routes.py"),
    ),
    Defect(
        "equal = max(map(abs, own[:2])) <= EQUAL * own[4]",
        "equal = False",
        "a gradient that is multiplied by a sum over replicas is measured",
        (
            "megatron/test_routes.py::test_a_gradient_that_megatron_multiplies_is_refused_by_its_name",
        ),
    ),
    Defect(
        "return torch.where(padded.unsqueeze(-1), row, read)",
        "return read",
        "the row for padding moves with the weights",
        ("routing/test_choices.py",),
    ),
    Defect(
        "self._derives.add(self.decisions.key)",
        "pass",
        "forwards alone have no graph for the derivatives that they take",
        ("operators/test_derivatives.py",),
    ),
)

PARTS: dict[str, tuple[Defect, ...]] = {
    "config": CONFIG,
    "ops": OPS,
    "csrc": CSRC,
    "vectors": VECTORS,
    "zero": ZERO,
    "megatron": MEGATRON,
    "guard": GUARD,
    "function": FUNCTION,
    "ranks": RANKS,
    "operators": OPERATORS,
    "krylov": KRYLOV,
    "records": RECORDS,
    "resume": RESUME,
    "schedule": SCHEDULE,
    "cli": CLI,
}
