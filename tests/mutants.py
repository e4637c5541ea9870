"""Check that the tests notice faults: ``python -m tests.mutants [WORD...] [--jobs N]``.

Each mutant is a copy of the package with one faulty line; the tests named with it must fail.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

_ROOT = Path(__file__).resolve().parent.parent
_COPIED = "cqs", "tests"
_TIMEOUT = 120.0
"""Seconds that the tests of one mutant may take."""
_LATE = 124
"""Status of tests that took longer, as of ``timeout``."""


class Fault(NamedTuple):
    """A text of one line of ``cqs/`` and its replacement, and the tests that must fail with it."""

    name: str
    path: str
    """Path within ``cqs/``."""
    old: str
    new: str
    tests: str
    """Test ids within ``tests/``, separated by semicolons."""
    number: int = 1
    """Number of places of ``old`` in the file, all of which are replaced."""
    gpu: bool = False
    """Whether the faulty line runs only on a GPU."""

    @property
    def ids(self) -> list[str]:
        """Return the test ids within the repository."""
        return [f"tests/{test}" for test in self.tests.split("; ")]

    def problem(self) -> str | None:
        """Return why the fault cannot be made, if it cannot."""
        path = _ROOT / "cqs" / self.path
        number = path.read_text().count(self.old) if path.is_file() else 0
        if number != self.number:
            return f"{self.old!r} must occur {self.number} times, got {number}"
        return "old and new text are equal" if self.old == self.new else None


FAULTS = (
    # Merges of partial outputs.
    Fault(
        "a running merge exchanges old and new weights",
        "partial/__init__.py",
        "_add_rows(total, [total, output], weights)",
        "_add_rows(total, [total, output], weights.flip(0))",
        "test_partial.py::test_a_running_merge_of_some_rows_is_that_of_all_at_once",
    ),
    Fault(
        "a running merge keeps the earlier sum without its weight",
        "partial/__init__.py",
        "sums.mul_(weights[0]).add_(weights[1])",
        "sums.add_(weights[1])",
        "test_partial.py::test_a_running_merge_of_some_rows_is_that_of_all_at_once",
    ),
    Fault(
        "rows of LSE -inf in all parts are subtracted from themselves",
        "partial/__init__.py",
        "shift = largest.masked_fill(largest == -torch.inf, 0)",
        "shift = largest",
        "test_partial.py::test_rows_are_empty_one_by_one[by PyTorch]",
    ),
    Fault(
        "weights are relative to the smallest LSE",
        "partial/__init__.py",
        "largest = weights.amax(0)",
        "largest = weights.amin(0)",
        "test_partial.py::test_the_larger_of_two_far_scores_wins",
    ),
    Fault(
        "weights of rows of LSE -inf are divided by a sum of 0",
        "partial/__init__.py",
        "weights.div_(sums.masked_fill(sums == 0, 1))",
        "weights.div_(sums)",
        "test_partial.py::test_rows_are_empty_one_by_one[by PyTorch]",
    ),
    Fault(
        "the log of the sum of weights is subtracted from the largest LSE",
        "partial/__init__.py",
        "answer.lse.copy_(largest + sums.log())",
        "answer.lse.copy_(largest - sums.log())",
        "test_partial.py::test_weights_and_rounding_are_those_of_the_formula_in_pytorch",
    ),
    Fault(
        "rows that a running merge never saw are divided by a sum of 0",
        "partial/__init__.py",
        "self._total.div_(self._sum.masked_fill(self._sum == 0, 1).unsqueeze(-1))",
        "self._total.div_(self._sum.unsqueeze(-1))",
        "test_partial.py::test_rows_that_no_partial_answers_are_empty[by PyTorch]",
    ),
    Fault(
        "a first copy gives no weight to rows of negative LSE",
        "partial/__init__.py",
        "sums.copy_(lse != -torch.inf)",
        "sums.copy_(lse > 0)",
        "test_partial.py::test_a_running_merge_writes_into_views_and_nowhere_else",
    ),
    Fault(
        "the log of the sum is subtracted from the LSE",
        "partial/__init__.py",
        "lse.add_(self._sum.log())",
        "lse.sub_(self._sum.log())",
        "test_partial.py::test_a_running_merge_writes_into_views_and_nowhere_else",
    ),
    Fault(
        "rows before the first part are not filled",
        "partial/__init__.py",
        "in pairwise(sorted({0, num_rows, *chain(*bounds)})):",
        "in pairwise(sorted({num_rows, *chain(*bounds)})):",
        "test_partial.py::test_rows_that_no_partial_answers_are_empty[in loops]",
    ),
    Fault(
        "blocks of 4096 keys replace each other's sum",
        "partial/__init__.py",
        "total += product",
        "total = product",
        "test_verify.py::test_a_million_equal_keys_are_not_accused",
    ),
    Fault(
        "gradients of the same rows replace each other",
        "partial/__init__.py",
        "sums[:, :, rows] += part",
        "sums[:, :, rows] = part",
        "test_partial.py::test_sums_of_gradients_are_those_of_their_accumulation_dtype",
    ),
    Fault(
        "compiled loops skip the last column",
        "partial/cpu_merge.py",
        "for column in range(num_columns):\n                        sums[column] +=",
        "for column in range(num_columns - 1):\n                        sums[column] +=",
        "test_partial.py::test_weights_and_rounding_are_those_of_the_formula_in_pytorch",
    ),
    Fault(
        "compiled loops round bfloat16 half up",
        "partial/cpu_merge.py",
        "np.uint32(0x7FFF)",
        "np.uint32(0x8000)",
        "test_partial.py::test_half_precision_is_read_and_rounded_as_pytorch_does"
        "[in loops-torch.bfloat16]",
    ),
    Fault(
        "compiled loops read float16 at half its size",
        "partial/cpu_merge.py",
        "2.0**112",
        "2.0**111",
        "test_partial.py::test_half_precision_is_read_and_rounded_as_pytorch_does"
        "[in loops-torch.float16]",
    ),
    Fault(
        "compiled loops read infinities of float16 as numbers",
        "partial/cpu_merge.py",
        "moved | np.uint32(0x7F800000)",
        "moved",
        "test_partial.py::test_half_precision_is_read_and_rounded_as_pytorch_does"
        "[in loops-torch.float16]",
    ),
    Fault(
        "compiled loops read head 0 for every head",
        "partial/cpu_merge.py",
        "step[1] * head",
        "step[1] * 0",
        "test_partial.py::test_empty_partials_are_ignored[in loops-torch.float32]",
    ),
    Fault(
        "a Triton merge subtracts -inf from -inf",
        "partial/fused_merge.py",
        'shift = tl.where(larger == float("-inf"), 0.0, larger)',
        "shift = larger",
        "test_fused_merge.py::test_rows_that_nothing_answers_are_empty[cpu]",
    ),
    Fault(
        "a Triton merge reads parts from the first row of the answer",
        "partial/fused_merge.py",
        "row = (rows - start).to(tl.int64)",
        "row = rows.to(tl.int64)",
        "test_fused_merge.py::test_one_kernel_merges_as_one_by_one[1-dtype0-cpu]",
    ),
    Fault(
        "a Triton merge loses the weight of earlier sums",
        "partial/fused_merge.py",
        "weights = weights * old_weight + new_weight",
        "weights = weights + new_weight",
        "test_fused_merge.py::test_one_kernel_merges_as_one_by_one[1-dtype0-cpu]",
    ),
    Fault(
        "a Triton merge ignores where an LSE starts in memory",
        "partial/fused_merge.py",
        " + _decode(shifts[i])",
        "",
        "test_fused_merge.py::test_parts_may_start_anywhere_in_memory[1-cpu]",
    ),
    Fault(
        "a Triton merge drops NaN",
        "partial/fused_merge.py",
        "tl.maximum(largest, new_lse, propagate_nan=tl.PropagateNan.ALL)",
        "tl.maximum(largest, new_lse)",
        "test_fused_merge.py::test_nan_stays_in_its_row",
        gpu=True,
    ),
    # The tiler.
    Fault(
        "a task is added twice",
        "tiler/tiler.py",
        "if index in self._added:",
        "if index in self._waiting:",
        "tiler/test_tiler.py::test_a_task_that_was_added_before_is_refused",
    ),
    Fault(
        "the last task is never missing",
        "tiler/tiler.py",
        "for w in range(self._plan.num_tasks) if w not in self._added",
        "for w in range(self._plan.num_tasks - 1) if w not in self._added",
        "tiler/test_tiler.py::test_finish_names_the_missing_tasks",
    ),
    Fault(
        "partial outputs are merged in the order of arrival",
        "tiler/tiler.py",
        "for turn, rows in turns.items()]",
        "for turn, rows in [(t, turns[t]) for t in [*self._waiting] if t in turns]]",
        "tiler/test_tiler.py::test_any_order_of_arrival_is_bitwise_identical",
    ),
    Fault(
        "rows of a step count from the sequence's start",
        "tiler/tiler.py",
        "slice(step.queries.start - start, step.queries.stop - start)",
        "slice(step.queries.start, step.queries.stop)",
        "tiler/test_tiler.py::test_the_answer_is_exact",
    ),
    # Patterns.
    Fault(
        "a window has one key too many on its left",
        "patterns/positions.py",
        "low = -FAR if left is None else -left",
        "low = -FAR if left is None else -left - 1",
        "patterns/test_tokens.py::test_patterns_are_what_their_definition_says",
    ),
    Fault(
        "a strided pattern has as many near keys as the stride and one",
        "patterns/positions.py",
        "*_window(lengths, stride - 1)",
        "*_window(lengths, stride)",
        "patterns/test_tokens.py::test_patterns_are_what_their_definition_says",
    ),
    Fault(
        "summary columns of the query's own block are seen",
        "patterns/positions.py",
        "pieces.append(Piece(queries, summary, -FAR, -1))",
        "pieces.append(Piece(queries, summary, -FAR, 0))",
        "patterns/test_tokens.py::test_patterns_are_what_their_definition_says",
    ),
    Fault(
        "causal documents are aligned at their starts",
        "patterns/bound_documents.py",
        "high = key_stop - stop if self.is_causal else FAR",
        "high = key_start - start if self.is_causal else FAR",
        "patterns/test_tokens.py::test_documents_of_unequal_lengths_are_problems_of_their_own",
    ),
    Fault(
        "counts of documents leave out the second one",
        "patterns/bound_documents.py",
        "self._cumulative[inner.stop] - self._cumulative[inner.start]",
        "self._cumulative[inner.stop] - self._cumulative[inner.start + 1]",
        "patterns/test_tokens.py::test_counts_of_documents_are_those_of_their_pieces",
    ),
    Fault(
        "documents in documents lose the boundaries of one side",
        "patterns/positions.py",
        "ends = tuple(sorted({*self.ends, *other.ends}))",
        "ends = self.ends",
        "patterns/test_tokens.py::test_documents_in_documents_are_documents",
    ),
    Fault(
        "bands are counted without their lowest diagonal",
        "patterns/piece.py",
        "return up_to_high - _count_below(a, a_stop, b, b_stop, low - 1)",
        "return up_to_high - _count_below(a, a_stop, b, b_stop, low)",
        "patterns/test_pieces.py::test_the_band_count_is_that_of_a_loop",
    ),
    Fault(
        "a difference keeps the first diagonal that it removes",
        "patterns/algebra.py",
        "yield piece._replace(low=piece.high + 1, high=FAR, inner_low=-FAR, inner_high=FAR)",
        "yield piece._replace(low=piece.high, high=FAR, inner_low=-FAR, inner_high=FAR)",
        "patterns/test_pieces.py::test_the_algebra_of_pieces_is_that_of_sets",
    ),
    Fault(
        "offsets of cells that differ in origin are not moved",
        "patterns/algebra.py",
        "return low + a - b, high + a - b, inner_low + u - v, inner_high + u - v",
        "return low + a - b, high + a - b, inner_low, inner_high",
        "patterns/test_pieces.py::test_the_algebra_of_pieces_is_that_of_sets",
    ),
    Fault(
        "views of residues begin one token late",
        "patterns/views.py",
        "ahead = (axis.origin + offset - axis.tokens.start) % axis.step",
        "ahead = (axis.origin + offset - axis.tokens.start - 1) % axis.step",
        "patterns/test_pieces.py::test_views_hold_every_pair_once",
    ),
    Fault(
        "block layouts take a column for a row",
        "patterns/masks.py",
        "lambda queries: layout[np.array(queries) // self.block]",
        "lambda queries: layout.T[np.array(queries) // self.block]",
        "patterns/test_masks.py::test_masks_are_values; "
        "patterns/test_masks.py::test_block_layouts_are_what_they_mark",
    ),
    Fault(
        "full blocks of a block mask are left out",
        "patterns/masks.py",
        "for layout in (full, partial)",
        "for layout in (partial, partial)",
        "patterns/test_masks.py::test_a_block_mask_of_flex_attention_is_read",
    ),
    Fault(
        "a mask function of the first head decides for all",
        "patterns/masks.py",
        "allowed = _evaluate(block_mask, batch, head, np.array(queries), keys)",
        "allowed = _evaluate(block_mask, batch, 0, np.array(queries), keys)",
        "patterns/test_masks.py::test_a_block_mask_of_flex_attention_is_read",
    ),
    Fault(
        "an additive mask of -10,000 in bfloat16 is a bias",
        "patterns/masks.py",
        "masked_out = mask <= MASKED_OUT",
        "masked_out = mask < -10_000",
        "patterns/test_masks.py::test_a_mask_that_is_added_to_the_scores_is_a_mask",
    ),
    Fault(
        "blocks of both patterns are dropped from a difference",
        "patterns/bound.py",
        "return replace(listed, blocks=_list(listed) - second)",
        "return listed",
        "patterns/test_masks.py::test_a_mask_per_head_is_a_pattern_per_head",
    ),
    Fault(
        "the pattern of another head is computed",
        "patterns/pattern.py",
        "self.patterns[batch if batches > 1 else 0][head if heads > 1 else 0]",
        "self.patterns[batch if batches > 1 else 0][-head if heads > 1 else 0]",
        "test_sparse.py::test_heads_may_have_patterns_of_their_own",
    ),
    Fault(
        "rows in progression of two steps are joined",
        "patterns/affine_rows.py",
        "is_alike = (np.diff(step) == 0) & has_keys[1:] & has_keys[:-1]",
        "is_alike = has_keys[1:] & has_keys[:-1]",
        "patterns/test_acsr.py::test_runs_of_rules_are_kept",
    ),
    Fault(
        "regular masks lose the band below the diagonal",
        "patterns/regular.py",
        "low, high = (first - offset) // step, (last - offset) // step",
        "low, high = (first - offset) // step + 1, (last - offset) // step",
        "patterns/test_regular.py::test_random_masks_take_no_more_pieces_than_the_pattern",
    ),
    Fault(
        "random blocks may lie in the window",
        "patterns/bigbird.py",
        "columns += np.where(columns >= start, stop - start, 0)",
        "columns += 0",
        "patterns/test_bigbird.py",
    ),
    # Tasks of plans.
    Fault(
        "two tasks own all of a pair at distance W / 2",
        "scheduler/quorum.py",
        "if 2 * distance == num_tasks:",
        "if 2 * distance == num_tasks - 1:",
        "scheduler/test_quorum.py::test_pairs_are_shared_exactly_when_the_number_of_tasks_is_even; "
        "scheduler/test_quorum.py::test_every_task_owns_equally_many_pairs_and_its_diagonal",
    ),
    Fault(
        "distances d and W - d are different classes",
        "scheduler/quorum.py",
        "offsets[distance], offsets[num_tasks - distance] = (b,), (a,)",
        "offsets[distance] = (b,)",
        "scheduler/test_quorum.py::test_every_task_owns_equally_many_pairs_and_its_diagonal",
    ),
    Fault(
        "both tasks of a shared pair compute its second half",
        "scheduler/kinds/quorums.py",
        "(rows[:middle], partners + [other] * (half == 0))",
        "(rows[:middle], partners)",
        "scheduler/test_exactly_once.py::test_every_single_pair_is_owned_once_for_short_sequences",
    ),
    Fault(
        "a shared pair of the prefix is left out",
        "scheduler/kinds/quorums.py",
        "or other < group or groups.num_prefix:",
        "or other < group:",
        "scheduler/test_exactly_once.py::test_every_single_pair_is_owned_once_when_lengths_differ",
    ),
    Fault(
        "causal squares of unequal lengths begin at the first key",
        "scheduler/token_groups.py",
        "first = queries.start + self.seqlen_kv - self.seqlen_q",
        "first = queries.start",
        "scheduler/test_exactly_once.py::test_every_single_pair_is_owned_once_when_lengths_differ",
    ),
    Fault(
        "live pairs of unequal lengths are counted from the first key",
        "scheduler/token_groups.py",
        "above = self.seqlen_kv - self.seqlen_q - keys.start",
        "above = -keys.start",
        "scheduler/test_validate.py::test_tasks_are_accepted_in_any_order",
    ),
    Fault(
        "queries that see no key are divided among tasks",
        "scheduler/token_groups.py",
        "first = max(self.seqlen_q - self.seqlen_kv, 0) if self.is_causal else 0",
        "first = 0",
        "scheduler/test_exactly_once.py::test_every_single_pair_is_owned_once_when_lengths_differ; "
        "scheduler/test_plan.py::test_responsibility_ratio_is_the_number_of_tasks",
    ),
    Fault(
        "adjacent key ranges stay apart",
        "scheduler/task.py",
        "if runs and piece.start <= runs[-1].stop:",
        "if runs and piece.start < runs[-1].stop:",
        "scheduler/test_exactly_once.py::test_blocks_steps_and_counts_of_a_task_agree; "
        "scheduler/test_kinds.py",
    ),
    Fault(
        "a row is lost where a strip is cut",
        "scheduler/token_groups.py",
        "Strip(group, range(middle, queries.stop), keys, live_pairs - first)",
        "Strip(group, range(middle + 1, queries.stop), keys, live_pairs - first)",
        "scheduler/test_pattern_plans.py::test_every_live_pair_is_computed_once",
    ),
    Fault(
        "tasks exceed the mean by a tenth",
        "scheduler/balancing.py",
        "TOLERANCE = 100",
        "TOLERANCE = 10",
        "scheduler/test_pattern_plans.py::test_the_busiest_task_has_hardly_more_than_the_mean",
    ),
    Fault(
        "work moves within quorums alone",
        "scheduler/quorum_balancing.py",
        "balancer.rebalance(max(tolerated // 2, 1), within_quorums=False)",
        "balancer.rebalance(max(tolerated // 2, 1), within_quorums=True)",
        "scheduler/test_pattern_plans.py::test_the_busiest_task_has_hardly_more_than_the_mean",
    ),
    Fault(
        "a strip goes to any holder before its plain owner",
        "scheduler/quorum_balancing.py",
        "(max(total - self._limit, 0), index != owner, new, total, index)",
        "(max(total - self._limit, 0), new, total, index)",
        "scheduler/test_pattern_plans.py::test_even_work_stays_with_its_plain_owners",
    ),
    Fault(
        "columns of a grid are not zigzag",
        "scheduler/kinds/grid.py",
        "for group, i in zip(ranked, sorted(range(width), key=loads.__getitem__), strict=True):",
        "for group, i in zip(ranked, range(width), strict=True):",
        "scheduler/test_kinds.py::test_causal_columns_are_zigzag_and_their_rows_balanced",
    ),
    Fault(
        "rows of a grid move to tasks that have the most",
        "scheduler/balancing.py",
        "order = sorted(range(len(live_pairs)), key=live_pairs.__getitem__)",
        "order = list(range(len(live_pairs)))",
        "scheduler/test_kinds.py::test_causal_work_is_balanced",
    ),
    Fault(
        "the first task of a host computes all rows",
        "scheduler/kinds/hosts.py",
        "strips[group % self.size].append(",
        "strips[0].append(",
        "scheduler/test_kinds.py::test_ranks_of_a_host_share_the_rows_of_its_task",
    ),
    Fault(
        "documents are divided by queries where keys differ",
        "scheduler/kinds/documents.py",
        "if not self.key_shards and lengths[0] == lengths[1]:",
        "if not self.key_shards:",
        "distributed/test_packed_documents.py::test_plans_of_documents_are_valid",
    ),
    Fault(
        "blocks that overlap by one key are valid",
        "scheduler/validate.py",
        "if keys.start < position:",
        "if keys.start < position - 1:",
        "scheduler/test_validate.py::test_the_message_says_which_pairs_are_wrong",
    ),
    Fault(
        "rows after the last block are not validated",
        "scheduler/validate.py",
        "ordered = sorted({0, seqlen_q, *edges})",
        "ordered = sorted({0, *edges})",
        "scheduler/test_validate.py::test_the_message_says_which_pairs_are_wrong",
    ),
    Fault(
        "causal squares anywhere are valid",
        "scheduler/validate.py",
        "if groups.pattern is None and number != block.num_pairs:",
        "if groups.pattern is None and number < block.num_pairs:",
        "scheduler/test_validate.py::test_a_full_block_computed_as_a_causal_square_is_refused",
    ),
    Fault(
        "rows with two tasks are final",
        "scheduler/validate.py",
        "if start < stop:",
        "if start < stop - 1:",
        "scheduler/test_kinds.py::test_a_row_with_two_tasks_is_noticed",
    ),
    Fault(
        "keys cost as many heads as queries",
        "scheduler/cost.py",
        "return self.batch * self.kv_heads * num_keys * columns * self.itemsize",
        "return self.batch * self.num_heads * num_keys * columns * self.itemsize",
        "scheduler/test_cost.py::test_bytes_in_are_those_of_the_groups_that_blocks_touch",
    ),
    Fault(
        "FLOPs count values as wide as queries",
        "scheduler/cost.py",
        "flops=2 * (shape.head_dim + shape.value_columns) * width * task.live_pairs",
        "flops=4 * shape.head_dim * width * task.live_pairs",
        "scheduler/test_cost.py::test_flops_count_two_products_per_live_pair",
    ),
    Fault(
        "results are returned without an LSE",
        "scheduler/cost.py",
        "row_bytes = self.value_columns * self.itemsize + self.sum_itemsize",
        "row_bytes = self.value_columns * self.itemsize",
        "scheduler/test_cost.py::test_bytes_out_are_an_output_and_an_lse_per_step_and_query",
    ),
    Fault(
        "a task's own group counts twice among its needs",
        "scheduler/group_needs.py",
        "[sum(map(len, ranges)) - in_own(ranges) for",
        "[sum(map(len, ranges)) for",
        "scheduler/test_group_needs.py::test_needs_are_those_of_tasks",
    ),
    Fault(
        "a plan's JSON is compared by its fields' names",
        "scheduler/plan.py",
        "json.loads(plan.to_json(list_tasks=is_listed)) != written:",
        "json.loads(plan.to_json(list_tasks=is_listed)).keys() != written.keys():",
        "scheduler/test_plan_json.py::test_a_falsified_plan_is_refused",
    ),
    Fault(
        "a plan is read with any pattern",
        "scheduler/plan.py",
        "if recorded != given:",
        "if recorded is not None and given is None:",
        "scheduler/test_pattern_plans.py::test_a_plan_is_not_read_with_another_pattern",
    ),
    Fault(
        "a grid that is not balanced is written as one that is",
        "scheduler/kinds/grid.py",
        'return {"grid": numbers if self.is_balanced else [*numbers, False]}',
        'return {"grid": numbers}',
        "scheduler/test_kinds.py::test_rows_that_are_not_balanced_stay_with_their_task",
    ),
    Fault(
        "the cost model divides causal work by no half",
        "scheduler/workload.py",
        "pairs = self.tokens * self._keys / (2 if self.is_causal else 1)",
        "pairs = self.tokens * self._keys",
        "test_simulation.py",
    ),
    # Options of the scores, and dropout.
    Fault(
        "a soft cap's derivative is that of another unit",
        "problem/score_terms.py",
        "slopes = 1 - (capped / terms.softcap) ** 2",
        "slopes = 1 - capped**2",
        "test_matrix.py::test_every_pair_in_streaming",
    ),
    Fault(
        "ALiBi ignores unequal lengths",
        "problem/score_terms.py",
        "return (queries.unsqueeze(-1) + (self.terms.distance - keys))",
        "return (queries.unsqueeze(-1) - keys)",
        "test_matrix.py::test_every_pair_in_streaming",
    ),
    Fault(
        "gradients of a bias of one row replace each other",
        "problem/score_terms.py",
        "terms.sums[0][:, :, rows[:, None], columns] += gradient.sum_to_size(self.bias.shape)",
        "terms.sums[0][:, :, rows[:, None], columns] = gradient.sum_to_size(self.bias.shape)",
        "test_matrix.py::test_every_pair_in_this_process",
    ),
    Fault(
        "gradients of a bias in chunks replace each other",
        "problem/score_terms.py",
        "self.cut(total, queries, keys).add_(chunk.sums[0].to(total.device))",
        "self.cut(total, queries, keys).copy_(chunk.sums[0].to(total.device))",
        "test_matrix.py::test_every_pair_in_streaming",
    ),
    Fault(
        "score functions count heads from those at hand",
        "problem/score_terms.py",
        "for first, number in ((terms.first_batch, batch), (terms.first_head, num_heads))",
        "for first, number in ((terms.first_batch, batch), (0, num_heads))",
        "test_matrix.py::test_every_pair_in_this_process",
    ),
    Fault(
        "a sink takes the complement of its share",
        "problem/scores.py",
        "share = torch.sigmoid(lse - row_sinks)",
        "share = torch.sigmoid(row_sinks - lse)",
        "test_scores.py::test_sinks_without_gradients_and_infinite_sinks",
    ),
    Fault(
        "reproducible ranks return the first rows of a part to every owner",
        "executors/distributed/rank_units.py",
        "first = common.start - tokens.start",
        "first = 0",
        "test_reproducible.py::test_ranks_compute_the_bits_of_one_process",
    ),
    Fault(
        "reproducible units of all heads have the dropout of the first",
        "worker/units.py",
        "worker.dropout.moved(place.batch, heads.start)",
        "worker.dropout",
        "test_reproducible.py::test_reproducible_calls_are_exact",
    ),
    Fault(
        "the gradient of sinks has the other sign",
        "problem/scores.py",
        "return -torch.stack(",
        "return torch.stack(",
        "test_matrix.py::test_every_pair_in_streaming",
    ),
    Fault(
        "a boolean attn_mask replaces the pattern",
        "problem/masks.py",
        "return pattern & visible, scores",
        "return visible, scores",
        "test_attn_mask.py::test_masks_are_intersected_with_patterns_and_added_to_scores",
    ),
    Fault(
        "patterns ignore is_causal",
        "problem/masks.py",
        "        pattern = pattern & causal()",
        "        pattern = pattern & pattern",
        "test_sparse.py::test_patterns_go_with_is_causal",
    ),
    Fault(
        "a part's dropout counts heads from its first",
        "problem/dropout.py",
        "heads = self.first_head + torch.arange(like.shape[1], device=device)",
        "heads = torch.arange(like.shape[1], device=device)",
        "test_sparse.py::test_dropout_of_a_head_does_not_depend_on_the_patterns_of_others",
    ),
    Fault(
        "all batch elements drop the pairs of the first",
        "problem/dropout.py",
        "batches = self.first_batch + torch.arange(like.shape[0], device=device)",
        "batches = self.first_batch + 0 * torch.arange(like.shape[0], device=device)",
        "test_dropout.py::test_masks_are_those_of_the_published_generator",
    ),
    Fault(
        "dropout of a step counts queries from its first",
        "worker/worker.py",
        "self.dropout.kept(self.dropout.random_bits(query, [queries], keys))",
        "self.dropout.kept(self.dropout.random_bits(query, [range(len(queries))], keys))",
        "test_dropout.py::test_every_cut_drops_the_same_pairs",
    ),
    Fault(
        "pairs that stay are not scaled up",
        "problem/dropout.py",
        "return 1 / (1 - self.probability)",
        "return 1.0",
        "test_dropout.py::test_few_pairs_kept_do_not_overflow; "
        "test_dropout.py::test_every_cut_drops_the_same_pairs",
    ),
    Fault(
        "every seed drops the same pairs",
        "problem/dropout.py",
        "streams = _draw(self.seed, torch.arange(3, device=device))",
        "streams = _draw(0, torch.arange(3, device=device))",
        "test_dropout.py::test_masks_are_those_of_the_published_generator",
    ),
    # Workers and kernels.
    Fault(
        "later query heads of a group are not computed",
        "worker/calls.py",
        "(slice(m, None, group_size) for m in range(group_size))",
        "(slice(m, None, group_size) for m in range(1))",
        "test_sparse.py::test_joined_calls_are_exact[few-queries]",
    ),
    Fault(
        "joined calls take the query heads of one group",
        "worker/calls.py",
        "(slice(m, None, group_size) for m in range(group_size))",
        "(slice(m * group_size, (m + 1) * group_size) for m in range(group_size))",
        "test_sparse.py::test_joined_calls_are_exact[few-queries]",
    ),
    Fault(
        "gradients of the keys of joined calls are one block off",
        "worker/calls.py",
        "tokens = call.view.moved(0, i * call.stride).keys",
        "tokens = call.view.moved(0, max(i - 1, 0) * call.stride).keys",
        "test_sparse.py::test_joined_calls_are_exact[few-queries]",
    ),
    Fault(
        "the second call of a row replaces the first",
        "worker/calls.py",
        "row_calls.append((call, not has_result[rows].any()))",
        "row_calls.append((call, True))",
        "test_sparse.py::test_joined_calls_are_exact[strided]",
    ),
    Fault(
        "causal squares begin one row early",
        "worker/calls.py",
        "for mark in (1 - low, len(keys) - high)",
        "for mark in (1 - low, len(keys) - high - 1)",
        "worker/test_calls.py::test_calls_have_every_pair_of_a_view_once[True]",
    ),
    Fault(
        "strips end before their last key",
        "worker/calls.py",
        "bisect_right(view.keys, last_key)",
        "bisect_left(view.keys, last_key)",
        "worker/test_calls.py::test_calls_have_every_pair_of_a_view_once[True]",
    ),
    Fault(
        "calls at unequal distances are joined",
        "worker/calls.py",
        "and starts[number] - starts[number - 1] == stride",
        "and starts[number] - starts[number - 1] >= stride",
        "worker/test_calls.py::test_equal_blocks_at_unequal_distances_are_computed_once",
    ),
    Fault(
        "rows of LSE -inf have infinite probabilities",
        "worker/calls.py",
        "posinf=torch.nan, neginf=torch.inf)",
        "posinf=torch.nan, neginf=-torch.inf)",
        "test_sparse.py::test_gradients_of_patterns_are_exact; "
        "test_sparse.py::test_a_query_that_sees_nothing_may_be_nan",
    ),
    Fault(
        "causal squares of the reference see one key too many",
        "worker/reference.py",
        "device=scores.device).triu(1)",
        "device=scores.device).triu(2)",
        "worker/test_backends.py::test_one_call_is_right",
    ),
    Fault(
        "gradients of the reference forget the sum of a row",
        "worker/reference.py",
        "p_BGRQK * (grad_p_BGRQK - delta_BGRQ1)",
        "p_BGRQK * grad_p_BGRQK",
        "test_dropout.py::test_gradcheck",
    ),
    Fault(
        "dropped pairs keep their gradient",
        "worker/reference.py",
        "grad_p_BGRQK = grad_p_BGRQK * factors_BGRQK",
        "grad_p_BGRQK = grad_p_BGRQK * keep_scale",
        "test_dropout.py::test_gradcheck",
    ),
    Fault(
        "gradients of keys of two steps replace each other",
        "worker/worker.py",
        "total[:, :, _held_rows(own, tokens)] += rows",
        "total[:, :, _held_rows(own, tokens)] = rows",
        "test_autograd.py::test_gradients_of_all_tasks_together_are_those_of_one_task; "
        "test_autograd.py::test_gradients_are_right",
    ),
    Fault(
        "a step's causal square is computed in full",
        "worker/worker.py",
        "[*calls, (step.queries, (square,), True)]",
        "[*calls, (step.queries, (square,), False)]",
        "test_api.py::test_every_case_is_exact",
    ),
    Fault(
        "views of causal squares count from row 0",
        "worker/work.py",
        "views.append(View(rows, columns, high=columns.start - rows.start))",
        "views.append(View(rows, columns, high=0))",
        "worker/test_tiles.py::test_every_pair_of_a_plan_is_visited_once",
    ),
    Fault(
        "rows that the CPU kernel loses have LSE 0",
        "worker/cpu.py",
        "is_sound = partial.lse.isfinite() & (partial.lse != 0)",
        "is_sound = partial.lse.isfinite()",
        "worker/test_not_finite.py::test_calls_of_the_cpu_kernel_on_any_number_of_keys; "
        "worker/test_not_finite.py::test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others",
    ),
    Fault(
        "gradients of a negative scale have the other sign",
        "worker/operands.py",
        "return grad_query if scale > 0 else -grad_query",
        "return grad_query",
        "test_autograd.py::test_gradients_with_scales_that_are_not_positive",
    ),
    Fault(
        "held tokens are read from their positions",
        "worker/held_tokens.py",
        "parts.append(tensor[:, :, start - held.start : stop - held.start])",
        "parts.append(tensor[:, :, start:stop])",
        "worker/test_held_tokens.py",
    ),
    Fault(
        "rows in a tensor of several ranges count from its first range",
        "ranges.py",
        "start = first + tokens.start - held.start",
        "start = tokens.start - held.start",
        "worker/test_terms_in_kernels.py::test_tasks_that_hold_several_ranges_are_right",
    ),
    Fault(
        "banded runs end before their last column",
        "worker/triton/tiles.py",
        "live_stop = np.minimum(stop, last_high // column_step + 1)",
        "live_stop = np.minimum(stop, last_high // column_step)",
        "worker/test_tiles.py::test_bands_are_visited_once",
    ),
    Fault(
        "blocks of mask bits count as full",
        "worker/triton/tiles.py",
        "num_full[bits_start != NO_BITS] = 0",
        "num_full[bits_start == NO_BITS] = 0",
        "worker/test_tiles.py::test_bits_are_visited_once",
    ),
    Fault(
        "Triton's query heads of one KV head are apart",
        "worker/triton/forward.py",
        "batch, kv_head = head // num_heads, head % num_heads // GROUP_SIZE",
        "batch, kv_head = head // num_heads, head % (num_heads // GROUP_SIZE)",
        "worker/test_terms_in_kernels.py::test_random_terms_are_right; "
        "worker/test_terms_in_kernels.py::test_tasks_that_hold_several_ranges_are_right",
    ),
    Fault(
        "Triton's LSE is of base 2",
        "worker/triton/forward.py",
        "(largest + tl.log2(total)) * _LN2",
        "(largest + tl.log2(total))",
        "worker/test_terms_in_kernels.py::test_random_terms_are_right",
    ),
    Fault(
        "Triton forgets earlier blocks when the maximum rises",
        "worker/triton/forward.py",
        "return p, larger, total * decay + tl.sum(p, 1), decay",
        "return p, larger, total + tl.sum(p, 1), decay",
        "worker/test_terms_in_kernels.py::test_random_terms_are_right",
    ),
    Fault(
        "bands of Triton's kernels end one key early",
        "worker/triton/pairs.py",
        "(distance <= band[1])",
        "(distance < band[1])",
        "worker/test_backends.py::test_one_call_is_right",
    ),
    Fault(
        "ALiBi of Triton's kernels rewards distance",
        "worker/triton/pairs.py",
        "scores = scores * unit - slope * tl.abs(",
        "scores = scores * unit + slope * tl.abs(",
        "worker/test_terms_in_kernels.py::test_random_terms_are_right",
    ),
    Fault(
        "Triton's key gradients have the first query head of a group alone",
        "worker/triton/backward.py",
        "head = kv_head % num_kv_heads * GROUP_SIZE + member",
        "head = kv_head % num_kv_heads * GROUP_SIZE",
        "worker/test_terms_in_kernels.py::test_random_terms_are_right",
    ),
    Fault(
        "Triton's gradients of dropped values stay",
        "worker/triton/backward.py",
        "kept_p = tl.where(kept, p, 0.0)",
        "kept_p = p",
        "worker/test_terms_in_kernels.py::test_terms_and_dropout_are_right",
    ),
    Fault(
        "Hopper's query heads of one KV head are apart",
        "worker/triton/hopper_forward.py",
        "batch, kv_head = head // num_heads, head % num_heads // GROUP_SIZE",
        "batch, kv_head = head // num_heads, head % (num_heads // GROUP_SIZE)",
        "worker/test_hopper_forward.py::test_results_are_those_of_float64",
        gpu=True,
    ),
    Fault(
        "Hopper's forward kernel forgets earlier blocks when the maximum rises",
        "worker/triton/hopper_forward.py",
        "return p, larger, total * decay + gl.sum(p, 1), decay",
        "return p, larger, total + gl.sum(p, 1), decay",
        "worker/test_hopper_forward.py::test_results_are_those_of_float64",
        gpu=True,
    ),
    Fault(
        "Hopper's key gradients have the first query head of a group alone",
        "worker/triton/hopper_backward.py",
        "other_head = head * GROUP_SIZE + member",
        "other_head = head * GROUP_SIZE",
        "test_autograd.py::test_gradients_are_right; "
        "worker/test_terms_in_kernels.py::test_random_terms_are_right",
        gpu=True,
    ),
    Fault(
        "Hopper's key gradients have the LSE of the first query head of a group",
        "worker/triton/hopper_key_gradients.py",
        "first_row = (kv_head * GROUP_SIZE + member).to(gl.int64) * num_queries",
        "first_row = (kv_head * GROUP_SIZE).to(gl.int64) * num_queries",
        "test_autograd.py::test_gradients_are_right; "
        "worker/test_terms_in_kernels.py::test_random_terms_are_right",
        gpu=True,
    ),
    Fault(
        "Hopper's rectangles have one masked pair for each causal row",
        "worker/triton/hopper_rectangle.py",
        "if distance < HALF - 1:",
        "if distance < HALF - 2:",
        "worker/test_hopper_gradients.py::test_gradients_of_rectangles_are_near_float64",
        number=2,
        gpu=True,
    ),
    # The check of sampled rows.
    Fault(
        "the first row is not verified",
        "executors/verify.py",
        "return sorted({0, seqlen_q - 1, *sample.tolist()} & set(range(seqlen_q)))",
        "return sorted({seqlen_q - 1, *sample.tolist()} & set(range(seqlen_q)))",
        "test_verify.py::test_the_first_row_is_always_among_the_sampled",
    ),
    Fault(
        "NaN is no error",
        "executors/verify.py",
        "wrong = ~is_same & ~(error <= limit)",
        "wrong = ~is_same & (error > limit)",
        "test_verify.py::test_values_that_are_no_numbers_are_found",
    ),
    Fault(
        "an LSE is verified without its mask",
        "executors/verify.py",
        "masked = scores.masked_fill(~visible, -torch.inf)",
        "masked = scores",
        "test_verify.py::test_right_answers_pass",
    ),
    # Streaming within a memory budget.
    Fault(
        "causal squares of chunks end one row early",
        "executors/streaming/plan.py",
        "first_seeing, first_full = keys.start - ahead, keys.stop - 1 - ahead",
        "first_seeing, first_full = keys.start - ahead, keys.stop - 2 - ahead",
        "streaming/test_stream_plan.py::test_every_live_pair_is_met_once",
    ),
    Fault(
        "causal blocks of unequal lengths stream too few keys",
        "executors/streaming/plan.py",
        "stop = min(max(held.stop + self._ahead, 0), stop)",
        "stop = min(max(held.stop, 0), stop)",
        "streaming/test_stream_plan.py::test_every_live_pair_is_met_once",
    ),
    Fault(
        "blocks have the query heads of the first KV heads",
        "executors/streaming/plan.py",
        "range(kv_heads.start * self.group_size, kv_heads.stop * self.group_size)",
        "range(kv_heads.start, kv_heads.start + len(kv_heads) * self.group_size)",
        "streaming/test_stream_plan.py::test_every_live_pair_is_met_once",
    ),
    Fault(
        "a resumed run streams chunks in another order",
        "executors/streaming/plan.py",
        "step = -1 if first // self.rows % 2 else 1",
        "step = -1 if (first - row) // self.rows % 2 else 1",
        "streaming/test_stream_plan.py::test_every_live_pair_is_met_once",
    ),
    Fault(
        "blocks are one tile larger than the budget",
        "executors/streaming/plan.py",
        "number = max(math.ceil(self.num_held / (most * _TILE)), 1)",
        "number = max(math.ceil(self.num_held / ((most + 1) * _TILE)), 1)",
        "streaming/test_stream_plan.py::test_plans_fit_and_the_larger_the_budget_the_less_is_moved",
    ),
    Fault(
        "MB are MiB",
        "executors/streaming/budget.py",
        "unit = (1024 if match[3] else 1000) ** exponent",
        "unit = 1024**exponent",
        "streaming/test_streaming.py::test_budgets_are_bytes_or_text",
    ),
    Fault(
        "dropout of blocks is that of batch element 0",
        "executors/streaming/engine.py",
        "Place(block.batch, block.kv_heads.start,",
        "Place(0, block.kv_heads.start,",
        "test_matrix.py::test_every_pair_in_streaming",
    ),
    Fault(
        "groups of heads have the first heads' sinks",
        "executors/streaming/engine.py",
        "add_sinks(answer, sinks[block.heads.start : block.heads.stop])",
        "add_sinks(answer, sinks[: len(block.heads)])",
        "test_matrix.py::test_every_pair_in_streaming",
    ),
    Fault(
        "buffers of another chunk are taken for this one",
        "executors/streaming/engine.py",
        "self._contents[self._current] = place",
        "self._contents[0] = place",
        "streaming/test_streaming.py::test_every_case_is_exact",
        gpu=True,
    ),
    Fault(
        "heads of a file are read in the order of batch elements",
        "executors/streaming/sources.py",
        "rows = (batch * self.shape[1] + head) * self.shape[2] + row",
        "rows = (head * self.shape[0] + batch) * self.shape[2] + row",
        "streaming/test_streaming.py::test_files_are_read_and_written_without_being_mapped",
    ),
    Fault(
        "a part of a file is that of its first heads",
        "executors/streaming/sources.py",
        "self.whole.read(self.batches[batch], self.heads[head], rows, into)",
        "self.whole.read(self.batches[batch], head, rows, into)",
        "streaming/test_stream_heads.py::test_unequal_heads_in_files_go_on_bitwise_identically[9]",
    ),
    Fault(
        "outputs in the file of an input are accepted",
        "executors/streaming/sources.py",
        "return isinstance(source, InFile) and source.identity == target.identity",
        "return isinstance(source, InFile) and source.path == target.path",
        "streaming/test_stream_extents.py::test_a_file_that_is_read_takes_no_output",
    ),
    Fault(
        "elements that repeat look apart",
        "executors/streaming/sources.py",
        "if stride < span and length > 1 and tensor.numel():",
        "if stride < 1 and length > 1 and tensor.numel():",
        "streaming/test_stream_extents.py::test_elements_that_share_memory_take_no_output",
    ),
    # Checkpoints.
    Fault(
        "entries of a journal are not chained",
        "executors/streaming/checkpoint.py",
        "sha256(self._digest + content)",
        "sha256(content)",
        "streaming/test_checkpoints.py::test_a_frozen_run_of_this_format_goes_on",
    ),
    Fault(
        "the LSE is not on the disk before the journal calls it final",
        "executors/streaming/checkpoint.py",
        "self.lse.flush()",
        "self.lse.identity  # noqa: B018",
        "streaming/test_checkpoints.py::test_a_checkpoint_holds_after_a_loss_of_power",
    ),
    Fault(
        "a changed LSE is not noticed",
        "executors/streaming/checkpoint.py",
        "for results, expected in zip((self._output, self.lse), digests, strict=True):",
        "for results, expected in zip((self._output,), digests, strict=False):",
        "streaming/test_checkpoints.py::test_a_changed_result_is_named_by_its_rows",
    ),
    Fault(
        "digests of parts are noted for the first heads",
        "executors/streaming/checkpoint.py",
        "place = output.batches[batch], output.heads[head], rows",
        "place = output.batches[batch], head, rows",
        "streaming/test_stream_heads.py::test_unequal_heads_in_files_go_on_bitwise_identically[30]",
    ),
    Fault(
        "a part begins anew although results are final",
        "executors/streaming/checkpoint.py",
        "            return plan, position",
        "            return plan, START",
        "streaming/test_streaming.py::test_what_was_stopped_goes_on_bitwise_identically[17]",
    ),
    Fault(
        "files of other users are trusted",
        "executors/streaming/checkpoint.py",
        "inode.st_uid == os.geteuid() and inode.st_nlink == 1",
        "inode.st_nlink == 1",
        "streaming/test_checkpoints.py::test_files_of_another_user_are_refused",
    ),
    Fault(
        "a run of an older format goes on",
        "executors/streaming/checkpoint.py",
        '(version := entries[0]["request"]["format"]) != _FORMAT',
        '(version := entries[0]["request"]["format"]) > _FORMAT',
        "streaming/test_checkpoints.py::test_a_run_of_another_format_is_rejected_with_both_versions",
    ),
    Fault(
        "results that failed verification are final",
        "executors/streaming/checkpoint.py",
        "if isinstance(error, VerificationError):",
        "if isinstance(error, OSError):",
        "streaming/test_checkpoints.py::test_a_result_that_is_wrong_is_not_kept",
    ),
    # Ranks.
    Fault(
        "rows to send count from the first shard",
        "executors/distributed/route.py",
        "tuple(moved(tokens, -own.start) for tokens in _common(own, ranges))",
        "tuple(_common(own, ranges))",
        "distributed/test_layout.py::test_every_token_needed_comes_once_from_its_shard",
    ),
    Fault(
        "rows in a send buffer begin one rank late",
        "executors/distributed/route.py",
        "tuple(counts[:, : self.rank].sum(axis=1).tolist())",
        "tuple(counts[:, : self.rank + 1].sum(axis=1).tolist())",
        "distributed/test_layout.py::test_every_token_needed_comes_once_from_its_shard",
    ),
    Fault(
        "head chunks all have the first heads",
        "executors/distributed/layout.py",
        "tuple(range(first + i * size, first + (i + 1) * size) for first in firsts)",
        "tuple(range(first, first + size) for first in firsts)",
        "distributed/test_layout.py::test_stages_have_every_head_once",
    ),
    Fault(
        "squares that reach beyond the shard are computed before their keys arrive",
        "executors/distributed/layout.py",
        "is_own = square is not None and contains(keys, square)",
        "is_own = square is not None",
        "distributed/test_locality.py::test_every_pair_is_on_one_side",
    ),
    Fault(
        "keys of the shard are computed again with those of others",
        "executors/distributed/layout.py",
        "there = [e for span in seen for e in _split(span, keys) if not contains(keys, e)]",
        "there = [e for span in seen for e in _split(span, keys)]",
        "distributed/test_locality.py::test_every_pair_is_on_one_side",
    ),
    Fault(
        "keys of other shards are not received for queries of the shard",
        "executors/distributed/layout.py",
        "for part in split[1:] if not see_only(keys, part)",
        "for part in split[2:] if not see_only(keys, part)",
        "distributed/test_packed_documents.py::test_keys_of_documents_are_received_once",
    ),
    Fault(
        "the answer lacks a rank's own queries with others' keys",
        "executors/distributed/chunk_pass.py",
        "parts + self._own * (group == heads[rank])",
        "parts",
        "distributed/test_attention.py::test_every_world_is_exact[2]",
    ),
    Fault(
        "results of a head group are written to the rows of another rank",
        "executors/distributed/chunk_pass.py",
        "received = slice(first, first + len(rows))",
        "received = slice(0, len(rows))",
        "distributed/test_attention.py::test_every_world_is_exact[3]",
    ),
    Fault(
        "ranks of a head group drop the pairs of the first heads",
        "executors/distributed/rank_task.py",
        "worker.dropout.moved(0, heads.start)",
        "worker.dropout.moved(0, 0)",
        "distributed/test_attention.py::test_dropout_is_that_of_one_process[4-4-5]",
    ),
    Fault(
        "ranks do not compare their options",
        "executors/distributed/agreement.py",
        "zip(digests, numbers, sends, strict=True)",
        "zip(numbers, sends, strict=True)",
        "distributed/test_attention.py::test_ranks_that_disagree_find_out[has scale 2.0]",
    ),
    Fault(
        "the last rank draws the seed",
        "executors/distributed/agreement.py",
        "return Shards(tuple(seqlens_q), tuple(seqlens_kv), seeds[0], machines[0], number)",
        "return Shards(tuple(seqlens_q), tuple(seqlens_kv), seeds[-1], machines[0], number)",
        "distributed/test_attention.py::test_dropout_is_that_of_one_process[2-1-None]",
    ),
    Fault(
        "joint tokens before the sequence are on the last rank",
        "executors/distributed/shards.py",
        "return [0] + [number] * num_ranks",
        "return [0] * num_ranks + [number]",
        "distributed/test_joint_tokens.py::test_every_world_is_exact[2]",
    ),
    Fault(
        "a bias loses its first rows with joint tokens after the sequence",
        "executors/distributed/shards.py",
        'slice(number, None) if self.rows.position == "front" else slice(-number)',
        "slice(number, None)",
        "test_matrix.py::test_every_pair_on_ranks",
    ),
    Fault(
        "gradients of streamed parts replace each other",
        "executors/distributed/backward_pass.py",
        "total[:, :, rows] += tensor[:, :, part]",
        "total[:, :, rows] = tensor[:, :, part]",
        "distributed/test_limited_memory.py::"
        "test_every_dtype_tracks_exact_and_holds_what_is_predicted",
    ),
    Fault(
        "a limit of memory counts half of the inputs in transit",
        "scheduler/held_bytes.py",
        "self.hold(packed + sum(received) + own)",
        "self.hold(packed + sum(received) / 2 + own)",
        "distributed/test_limited_memory.py::test_one_byte_less_than_a_call_holds_is_not_exceeded",
    ),
    # Ray tasks.
    Fault(
        "rows of a part are those of its step",
        "executors/ray/tasks/job.py",
        "for first in (step.queries.start, tokens.start)",
        "for first in (tokens.start, tokens.start)",
        "report/test_measuring.py::test_a_row_says_what_the_plan_says_and_how_long_it_took",
    ),
    Fault(
        "parts are merged in the order of their arrival",
        "executors/ray/tasks/run.py",
        "[m.parts[i].place for i in m.tasks]",
        "[part.place for part in m.parts.values()]",
        "cluster/test_cluster.py::test_results_are_bitwise_identical_for_any_number_of_actors",
    ),
    Fault(
        "parts of a failed worker count as present",
        "executors/ray/tasks/run.py",
        "if part.holder.handle is None]",
        "if False]",
        "cluster/test_scaling.py::test_a_call_outlives_its_only_worker",
    ),
    Fault(
        "workers join at the next call",
        "executors/ray/tasks/run.py",
        "if len(self._pool.actors) < self._pool.num_workers:",
        "if False:",
        "cluster/test_scaling.py::test_workers_that_join_compute_tasks_of_the_running_call[forward]",
    ),
    Fault(
        "tasks that ran again count no seconds",
        "executors/ray/tasks/run.py",
        "report.seconds if index in self._lost else 0.0",
        "0.0",
        "cluster/test_scaling.py::test_a_call_outlives_its_only_worker",
    ),
    Fault(
        "tokens of the object store are found by their place in the sequence",
        "executors/ray/tasks/inputs.py",
        "tokens.start - first : tokens.stop - first",
        "tokens.start : tokens.stop",
        "cluster/test_cluster.py::test_each_token_is_put_once",
    ),
    Fault(
        "gradients of a bias of several tasks replace each other",
        "problem/bias_blocks.py",
        "place.add_(block.view(place.shape))",
        "place.copy_(block.view(place.shape))",
        "test_matrix.py::test_every_pair_on_ray_tasks",
    ),
    Fault(
        "rows without a task are not empty",
        "executors/ray/tasks/job.py",
        "answer.lse.fill_(-torch.inf)",
        "answer.lse.fill_(0)",
        "cluster/test_cluster.py::test_empty_problems_need_no_actor",
    ),
    # Graphs of torch.compile.
    Fault(
        "a graph ignores the seed",
        "executors/operators.py",
        "return torch.full((), seed, dtype=torch.int64",
        "return torch.full((), 0, dtype=torch.int64",
        "test_compile.py::test_a_graph_has_the_whole_call[dropout-seed]",
    ),
    Fault(
        "a graph drops the same pairs in every call",
        "executors/operators.py",
        'return torch.randint(2**63 - 1, (), device="cpu")',
        'return torch.full((), 0, dtype=torch.int64, device="cpu")',
        "test_compile.py::test_a_graph_has_the_whole_call[dropout]",
    ),
    Fault(
        "heads that share a KV head replace its gradient",
        "executors/local_operator.py",
        "total.key[key_place] += gradients.key",
        "total.key[key_place] = gradients.key",
        "test_compile.py::test_a_graph_has_the_whole_call[per-head]",
    ),
    # Integrations.
    Fault(
        "windows of transformers have one key too many",
        "integrations/masks.py",
        "return sliding_window(window - 1, None)",
        "return sliding_window(window, None)",
        "integrations/test_transformers.py::test_patterns_are_the_masks",
    ),
    Fault(
        "the first key of padding is seen",
        "integrations/masks.py",
        "keys.within_cells(start, stop)",
        "keys.within_cells(start, stop + 1)",
        "integrations/test_transformers.py::test_patterns_are_the_masks",
    ),
    Fault(
        "keys of a stacked batch are as far apart as its queries",
        "integrations/masks.py",
        "keys=_moved(piece.keys, element * self.kv_length)",
        "keys=_moved(piece.keys, element * self.q_length)",
        "integrations/test_transformers.py::test_generation_with_padding_on_the_left_matches",
    ),
    Fault(
        "packed sequences begin one token early",
        "integrations/masks.py",
        "starts = np.flatnonzero(np.diff(row) != 1) + 1",
        "starts = np.flatnonzero(np.diff(row) != 1)",
        "integrations/test_torchtitan.py::test_layers_get_the_pattern_within_documents",
    ),
    Fault(
        "pairs that a mask biases are masked out",
        "integrations/masks.py",
        "visible = mask > torch.finfo(mask.dtype).min / 2",
        "visible = mask == 0",
        "integrations/test_transformers.py::test_a_float_mask_may_bias_scores",
    ),
    Fault(
        "a layer's bias replaces that of the mask",
        "integrations/transformers.py",
        "bias = added if bias is None else bias + added",
        "bias = added",
        "integrations/test_transformers.py::test_bias_of_a_layer_and_mask_are_added",
    ),
    Fault(
        "sinks of a layer are ignored",
        "integrations/transformers.py",
        'Scores(asked.get("s_aux"), asked.get("softcap"), bias=bias)',
        'Scores(None, asked.get("softcap"), bias=bias)',
        "integrations/test_transformers.py::test_outputs_and_gradients_match[GptOss-whole]",
    ),
    Fault(
        "the scale of FlexAttention is ignored",
        "integrations/flex.py",
        "        scale=scale,",
        "        scale=None,",
        "integrations/test_flex.py::test_a_block_mask_gives_what_torch_gives",
    ),
    Fault(
        "a bias that is the same for all keys masks all out",
        "integrations/diffusers.py",
        "bias = mask - mask.amax(-1, keepdim=True).clamp(min=torch.finfo(mask.dtype).min)",
        "bias = mask",
        "integrations/test_diffusers.py::test_masks_equal_native[the same bias everywhere]",
    ),
    Fault(
        "a mask of pairs is that of the first query",
        "integrations/diffusers.py",
        "if bool((visible == first).all()) else None",
        "if bool((visible[:, :, :1] == first).all()) else None",
        "integrations/test_diffusers.py::test_masks_equal_native[pairs]",
    ),
    Fault(
        "windows of JAX end one key early",
        "integrations/jax.py",
        "stop = np.clip(query + right + 1, start, np.maximum(start, seqlen_kv))",
        "stop = np.clip(query + right, start, np.maximum(start, seqlen_kv))",
        "integrations/test_jax.py::test_output_and_gradients_match_jax",
    ),
    Fault(
        "the first query beyond a sequence of JAX has keys",
        "integrations/jax.py",
        "np.where(query < rows, columns, 0)",
        "np.where(query <= rows, columns, 0)",
        "integrations/test_jax.py::test_masks_and_lengths_match_jax",
    ),
    # Layers of cqs.nn.
    Fault(
        "rotary embeddings turn the other way",
        "nn/attention.py",
        "torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)",
        "torch.cat((left * cos + right * sin, right * cos - left * sin), dim=-1)",
        "nn/test_block.py::test_a_block_is_llamas",
    ),
    Fault(
        "SwiGLU's gate and values are exchanged",
        "nn/block.py",
        "F.silu(self.gate(rows)) * self.up(rows)",
        "F.silu(self.up(rows)) * self.gate(rows)",
        "nn/test_block.py::test_a_block_is_llamas",
    ),
    Fault(
        "all ranks of a tensor axis have the patterns of the first heads",
        "nn/attention.py",
        "own = range(rank * number, (rank + 1) * number)",
        "own = range(number)",
        "nn/test_block.py::test_a_block_trains_as_on_one_device[pattern of each head]",
    ),
    # Numbers of reports, and commands.
    Fault(
        "efficiency is per task",
        "report/rows.py",
        "return self.speedup / self.num_devices",
        "return self.speedup / self.num_tasks",
        "report/test_scaling_plots.py::test_a_table_has_the_numbers_of_the_rows",
    ),
    Fault(
        "the spread is of other percentiles",
        "report/measurement.py",
        "np.quantile(seconds, (0.2, 0.5, 0.8))",
        "np.quantile(seconds, (0.1, 0.5, 0.9))",
        "report/test_measurement.py::test_a_summary_has_spread_and_load",
    ),
    Fault(
        "the speed-up over dense attention is its inverse",
        "report/sections.py",
        "Quantity(lambda row: 1 / row.ratio)",
        "Quantity(lambda row: row.ratio)",
        "report/test_scaling_plots.py::test_a_table_has_the_numbers_of_the_rows",
    ),
    Fault(
        "computations always follow the same ones",
        "report/timing.py",
        "generator.shuffle(order)",
        "order.reverse()",
        "report/test_timing.py::test_nothing_always_follows_the_same",
    ),
    Fault(
        "exact gradients of keys are those of the last query head",
        "report/exact.py",
        "sums.key[:, kv_head] += slopes.mT @ query",
        "sums.key[:, kv_head] = slopes.mT @ query",
        "report/test_measuring.py::test_wrong_gradients_are_found",
    ),
    Fault(
        "a ring makes one hop too many",
        "scheduler/cost_model.py",
        "hops = [(float(keys), num_steps - 1), (0.0, 1)]",
        "hops = [(float(keys), num_steps), (0.0, 1)]",
        "test_simulation.py::test_traffic_is_that_of_the_formulas",
    ),
    Fault(
        "a task receives its own keys",
        "scheduler/cost_model.py",
        "received = (needed.keys - 1) * keys + own_keys",
        "received = needed.keys * keys + own_keys",
        "test_simulation.py::test_traffic_is_that_of_the_layout",
    ),
    Fault(
        "1K is 1000",
        "commands/options.py",
        '_UNITS = {"K": 2**10,',
        '_UNITS = {"K": 10**3,',
        "test_commands.py::test_lengths_may_have_units",
    ),
    Fault(
        "latency is given in milliseconds",
        "commands/simulate.py",
        'given["latency"] = 1e-6 * options.latency',
        'given["latency"] = 1e-3 * options.latency',
        "test_commands.py::test_impossible_options_are_refused_at_once",
    ),
    Fault(
        "an output may be a hard link of an input",
        "commands/written_files.py",
        "return os.path.samefile(path, other)",
        "return os.path.realpath(other) == os.path.realpath(path)",
        "test_commands.py::test_attend_writes_to_no_file_that_it_reads",
    ),
    Fault(
        "--verify verifies nothing",
        "commands/attend.py",
        "verify=options.verify",
        "verify=False",
        "test_commands.py::test_attend_finds_a_wrong_answer",
        number=2,
    ),
)


@contextmanager
def _copy() -> Iterator[Path]:
    """Make a copy of the package and its tests, with links to everything else."""
    with TemporaryDirectory(prefix="cqs-mutant-") as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        for entry in _ROOT.iterdir():
            if entry.name in _COPIED:
                shutil.copytree(entry, tree / entry.name)
            elif not entry.name.startswith("."):
                (tree / entry.name).symlink_to(entry)
        yield tree


def _run(tree: Path, tests: Sequence[str], timeout: float | None, *, gpu: bool) -> tuple[int, str]:
    """Run tests in a copy; return pytest's exit status and what it printed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "TRITON_CACHE_DIR": str(tree.parent / "triton"),
        "OMP_NUM_THREADS": "1",
    }
    marks = "not long" if gpu else "not long and not gpu"
    options = ["-x", "-q", "-p", "no:cacheprovider", "--durations=0", "-m", marks]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=timeout)
        return process.returncode, printed
    except subprocess.TimeoutExpired:
        return _LATE, ""
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # also processes that the tests left behind
        except ProcessLookupError:
            pass
        process.wait()


def _try(fault: Fault) -> tuple[str, str]:
    """Run the tests of a fault; return its result and a line about it."""
    start = time.monotonic()
    printed = fault.problem() or ""
    result = "wrong"
    if not printed:
        with _copy() as tree:
            path = tree / "cqs" / fault.path
            path.write_text(path.read_text().replace(fault.old, fault.new))
            status, printed = _run(tree, fault.ids, _TIMEOUT, gpu=fault.gpu)
        result = {0: "survived", 1: "caught", _LATE: "late"}.get(status, "wrong")
        printed = f"status {status}:\n{printed[-2000:]}"
    seconds = time.monotonic() - start
    line = f"{result:8} {seconds:4.0f} s  {fault.path}: {fault.name}"
    return result, line if result != "wrong" else f"{line}\n{printed}"


def _check_baseline(faults: Sequence[Fault]) -> None:
    """Exit with status 1 unless the named tests pass without a fault."""
    for gpu in sorted({fault.gpu for fault in faults}):
        tests = dict.fromkeys(test for each in faults if each.gpu == gpu for test in each.ids)
        with _copy() as tree:
            status, printed = _run(tree, list(tests), None, gpu=gpu)
        print(f"without a fault: {len(tests)} test ids, status {status}", flush=True)
        if status:
            sys.exit(printed)


def main() -> None:
    """Run the selected faults; exit with status 1 unless each is caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="faults whose path or name has one of the words")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--baseline", action="store_true", help="run the tests without faults too")
    given = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    chosen = [
        fault
        for fault in FAULTS
        if not given.words or any(word in f"{fault.path} {fault.name}" for word in given.words)
    ]
    faults = [fault for fault in chosen if has_gpu or not fault.gpu]
    start = time.monotonic()
    if given.baseline:
        _check_baseline(faults)
    found: dict[str, list[str]] = {"caught": [], "late": [], "survived": [], "wrong": []}
    with ThreadPoolExecutor(given.jobs) as threads:
        for result, line in threads.map(_try, faults):
            print(line, flush=True)
            found[result].append(line)
    print(*found["survived"], *found["wrong"], sep="\n")
    print(
        f"{len(faults)} faults: {len(found['caught'])} caught, {len(found['late'])} caught by "
        f"timeout, {len(found['survived'])} survived, {len(found['wrong'])} without a result, "
        f"{len(chosen) - len(faults)} skipped without a GPU, {time.monotonic() - start:.0f} s"
    )
    sys.exit(bool(not faults or found["survived"] or found["wrong"]))


if __name__ == "__main__":
    main()
