"""Writes docs/composition.md: what composes with what.

    python scripts/composition.py            # write it
    python scripts/composition.py --check    # exit status 1 if the page has other tables

A cell is exact, and names the tests that show it, or refused by an error. tests/parallel/test_composition.py walks the
cells: it sees each error, and finds each test.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[1] / "docs" / "composition.md"
MARK = "<!-- The rest is written by scripts/composition.py: edit the table there. -->\n"

# What a request asks for.
ASKED = (
    "seeds and cutoffs",
    "penalties",
    "`min_tokens`",
    "`logit_bias`",
    "`allowed_token_ids`",
    "`bad_words`",
    "`extra_args`",
    "`logprobs`",
    "`prompt_logprobs`",
    "`n`",
    "grammars",
)
DRAFTS, VECTORS, ADAPTERS = "drafts", "vectors", "adapters"
REQUESTS = (*ASKED, DRAFTS, VECTORS, ADAPTERS)
STATES, FOREIGN, ENCODERS = "recurrent states", "by transformers' code", "encoders"
FAMILIES = ("full attention", "sliding windows", STATES, "experts", FOREIGN, ENCODERS)
FORMATS = ("16 and 32 bits", "8-bit integers", "4-bit integers", "FP8", "MXFP4", "GGUF")
TENSOR, PIPELINE, REPLICAS = "`tensor_parallel_size`", "`pipeline_parallel_size`", "`data_parallel_size`"
SHARED, RAY = "shared experts", '`executor="ray"`'
DIVISIONS = (TENSOR, PIPELINE, REPLICAS, SHARED, RAY)
SWAPPED = "`swap_space_bytes`"
LOOKUP, FOUND = '`speculation="suffix"`', '`speculation="ngram_worker"`'
KV_CODES = '`kv_cache_dtype="fp8"`'
TIERS = "`kv_tiers`"
SETTINGS = (SWAPPED, TIERS, LOOKUP, FOUND, KV_CODES)
WALKED = (*FAMILIES[:-1], *FORMATS[1:], TENSOR)
"""What tests/parallel/test_composition.py walks with requests for each pair of features."""
WALKED_IN_CODES = (*FAMILIES[:3], FOREIGN, TENSOR)
"""What it walks so with keys and values in FP8."""

WALKED_WITH_ADAPTERS = (*FAMILIES[:-1], *FORMATS[1:])
"""What it walks so with requests of which two of three have adapters."""

WALK = "tests/parallel/test_composition.py::test_requests"
WALK_IN_CODES = "tests/parallel/test_composition.py::test_requests_of_fp8_keys_and_values"
DIVIDED_CODES = "tests/parallel/test_swapped_workers.py::test_fp8_keys_and_values"
WALK_WITH_ADAPTERS = "tests/parallel/test_composition.py::test_requests_with_adapters"
MERGED = "tests/models/test_lora_models.py::test_rows_have_the_logits_of_merged_models"
MERGED_FOREIGN = "tests/models/test_lora_runner.py::test_a_model_that_transformers_computes"
MERGED_ENGINES = "tests/models/test_lora_engines.py::test_each_request_is_as_by_a_merged_model"
ADAPTED_EXPERTS = "tests/models/test_lora_engines.py::test_shared_experts"
OF_PIPELINES = "tests/parallel/test_pipeline_engine.py::test_any_request"
OF_REPLICAS = "tests/parallel/test_replicas_engine.py::test_any_request"
OF_SHARED = "tests/parallel/test_shared_experts.py::test_any_request"
OF_RAY = "tests/parallel/test_ray_cluster.py::test_a_rank_that_dies_costs_no_token"
DIVIDED = {
    PIPELINE: (OF_PIPELINES,),
    REPLICAS: (OF_REPLICAS,),
    SHARED: (OF_SHARED,),
    RAY: (OF_RAY, WALK, OF_PIPELINES),  # the same ranks, in other places
}
VECTORS_OF = {
    PIPELINE: ("tests/parallel/test_replicas_engine.py::test_vectors",),
    REPLICAS: ("tests/parallel/test_replicas_engine.py::test_vectors",),
    SHARED: ("tests/parallel/test_ranked_processes.py::test_vectors",),
    RAY: (OF_RAY, WALK, "tests/parallel/test_replicas_engine.py::test_vectors"),
}
FAMILIES_OF = {
    TENSOR: "tests/parallel/test_divided_models.py::test_families",
    PIPELINE: "tests/parallel/test_pipeline.py::test_families",
    REPLICAS: OF_REPLICAS,
    SHARED: "tests/parallel/test_experts_of_replicas.py::test_families",
}
FORMATS_OF = {
    "16 and 32 bits": "tests/parallel/test_divided_formats.py::test_bfloat16",
    "8-bit integers": "tests/parallel/test_divided_formats.py::test_int8",
    "4-bit integers": "tests/parallel/test_divided_formats.py::test_groups",
    "FP8": "tests/parallel/test_divided_formats.py::test_fp8",
    "MXFP4": "tests/parallel/test_divided_formats.py::test_mxfp4",
    "GGUF": "tests/parallel/test_divided_formats.py::test_gguf",
}
DRAFTED_STAGES = "tests/parallel/test_pipeline_engine.py::test_drafts"
SETTINGS_OF_SHARED = "tests/parallel/test_shared_experts.py::test_drafts_and_swapped_requests"
DRAFT_MODEL, HEADS, MTP = "a draft model", "EAGLE-3, P-EAGLE, DFlash", "MTP"
DRAFTED_BY = {
    DRAFT_MODEL: "tests/e2e/test_draft_models.py::test_the_same_tokens",
    HEADS: "tests/e2e/test_trained_heads.py::test_a_head_is_right_as_often_as_its_reference",
    MTP: "tests/e2e/test_trained_heads.py::test_a_head_is_right_as_often_as_its_reference",
}
"""Methods of `speculation` that have weights, and where their drafts are right."""
HEADS_OF_STATES = "tests/e2e/test_speculation_states.py::test_heads_draft_for_models_with_states"
DRAFTED_STATES = "tests/models/test_drafted_hybrids.py::test_every_scenario"
NO_KV = "there are neither tokens to be drafted nor KV to be kept"
NO_DRAFTS = "nothing is drafted"
NO_EXPERTS = "but adapters that change experts are refused"
APART = "what weights are made of changes nothing in how keys and values are kept"


SLEEP = "`sleep`"
SLEEPS = {
    "full attention": "tests/e2e/test_sleep_smollm2.py::test_the_same_texts_after_each_sleep",
    "sliding windows": "tests/parallel/test_sleeping_ranks.py::test_families",
    STATES: "tests/parallel/test_sleeping_ranks.py::test_families",
    **dict.fromkeys(
        ("experts", TENSOR, PIPELINE, REPLICAS, SHARED), "tests/parallel/test_sleeping_ranks.py::test_divided"
    ),
}

UPDATES = "new weights"
UPDATED = ("full attention", "sliding windows", STATES, "experts", "16 and 32 bits", "FP8")
UPDATED += (TENSOR, PIPELINE, REPLICAS, SHARED)

INVARIANT = "`batch_invariant`"
INVARIANT_TESTS = (
    "tests/models/test_batch_invariant.py::test_logits_have_the_same_bits_alone_and_in_any_batch",
    "tests/gpu/test_gpu_batch_invariant.py::test_every_family",
)
INVARIANT_WITH = ("full attention", "sliding windows", "experts", STATES, FOREIGN, ENCODERS, ADAPTERS, DRAFTS, TENSOR)


SESSIONS = "sessions"
WITH_SESSIONS = (*ASKED, DRAFTS)
SESSION_TESTS = (
    "tests/e2e/test_sessions_smollm2.py::test_what_a_turn_asks_for",
    "tests/e2e/test_sessions_smollm2.py::test_a_turn_finds_all_of_those_before_it",
)


TENANTS = "tenants"
WITH_TENANTS = (*ASKED, DRAFTS)


class Cell(NamedTuple):
    row: str
    column: str
    tests: tuple[str, ...]
    """The tests that show that it is exact; of a refusal the one that sees the error."""
    error: str = ""
    """The error that refuses it; empty: it is exact."""
    note: str = ""


SEEN = "tests/parallel/test_composition.py::test_what_is_refused"


def _refused(row: str, column: str, error: str) -> Cell:
    return Cell(row, column, (SEEN,), error)


def of_requests(row: str, column: str) -> Cell:
    """Two things that a request asks for."""
    if ADAPTERS in (row, column):
        return Cell(row, column, (WALK_WITH_ADAPTERS,))
    if VECTORS in (row, column) and DRAFTS not in (row, column):
        return _refused(row, column, "InvalidRequestError")
    if VECTORS in (row, column):
        return Cell(row, column, (WALK,), note=NO_DRAFTS)
    return Cell(row, column, (WALK,))


def of_families(row: str, column: str) -> Cell:
    """What a request asks for, of a model."""
    if row == ADAPTERS:
        if column == ENCODERS:
            return _refused(row, column, "ModelLoadError")
        if column == FOREIGN:
            return Cell(row, column, (WALK_WITH_ADAPTERS, MERGED_FOREIGN), note=NO_EXPERTS)
        return Cell(row, column, (WALK_WITH_ADAPTERS, MERGED))
    if column == ENCODERS:
        if row == VECTORS:
            return Cell(row, column, ("tests/models/test_encoders.py::test_poolings",))
        return _refused(row, column, "InvalidRequestError")
    if (row, column) == (DRAFTS, STATES):
        return Cell(row, column, (WALK, DRAFTED_STATES))
    return Cell(row, column, (WALK,))


def of_formats(row: str, column: str) -> Cell:
    """What a request asks for, with weights of a format."""
    if row == ADAPTERS:
        return Cell(row, column, (MERGED,) if column == FORMATS[0] else (WALK_WITH_ADAPTERS,))
    return Cell(row, column, (WALK,))


def of_divisions(row: str, column: str) -> Cell:
    """What a request asks for, of an engine that is divided."""
    if row == ADAPTERS:
        tests = {SHARED: (ADAPTED_EXPERTS,), RAY: (OF_RAY, MERGED_ENGINES)}
        note = NO_EXPERTS if column == SHARED else ""
        return Cell(row, column, tests.get(column, (MERGED_ENGINES,)), note=note)
    if column == TENSOR:
        return Cell(row, column, (WALK,))
    if row == VECTORS:
        return Cell(row, column, VECTORS_OF[column])
    if row == DRAFTS and column == PIPELINE:
        return Cell(row, column, (DRAFTED_STAGES,))
    return Cell(row, column, DIVIDED[column])


def of_settings(row: str, column: str) -> Cell:
    """A setting that changes when requests are computed, or what keys and values are kept in, with a model, a format or
    a division."""
    if column == ENCODERS:
        return Cell(row, column, ("tests/models/test_encoders.py::test_poolings",), note=NO_KV)
    if row == KV_CODES:
        return of_codes(column)
    if column == SHARED:
        return Cell(row, column, (SETTINGS_OF_SHARED,))
    if row == TIERS and column == RAY:
        return _refused(row, column, "InvalidRequestError")
    if row == TIERS:
        tiers = "test_any_request" if column in DIVISIONS else "test_models"
        note = APART if column in FORMATS else ""
        return Cell(row, column, (f"tests/parallel/test_kv_tiers_engine.py::{tiers}",), note=note)
    if column in (PIPELINE, REPLICAS, RAY) and row == SWAPPED:
        return Cell(row, column, ("tests/parallel/test_swapped_workers.py::test_any_request",))
    if column in (PIPELINE, RAY):
        return Cell(row, column, (DRAFTED_STAGES,), note="" if column == PIPELINE else "as without Ray")
    if column == REPLICAS:
        return Cell(row, column, (WALK, OF_REPLICAS), note="each replica drafts by itself")
    if row == SWAPPED:
        return Cell(row, column, (WALK, "tests/models/test_swap_space.py::test_every_scenario"))
    return Cell(row, column, (WALK, DRAFTED_STATES) if column == STATES else (WALK,))


def of_codes(column: str) -> Cell:
    """Keys and values in FP8, with drafts and swapped requests, against themselves."""
    if column in (PIPELINE, REPLICAS):
        return Cell(KV_CODES, column, (DIVIDED_CODES,))
    if column in ("experts", SHARED):
        return Cell(KV_CODES, column, ("tests/parallel/test_shared_experts.py::test_fp8_keys_and_values",))
    if column == RAY:
        return Cell(KV_CODES, column, (DIVIDED_CODES,), note="as without Ray")
    return Cell(KV_CODES, column, (WALK_IN_CODES,), note=APART if column in FORMATS else "")


def of_divided_families(row: str, column: str) -> Cell:
    """A model, divided."""
    if row in (FOREIGN, ENCODERS) and column in (TENSOR, PIPELINE):
        return _refused(row, column, "ModelLoadError")
    if column == SHARED and row not in ("experts", STATES):
        return _refused(row, column, "ModelLoadError")
    if row == ENCODERS and column == REPLICAS:
        return Cell(row, column, ("tests/parallel/test_bad_divisions.py::test_encoders",))
    if column == RAY:
        return Cell(row, column, (OF_RAY,), note="as without Ray: the same ranks in other places")
    return Cell(row, column, (FAMILIES_OF[column],))


def of_divided_formats(row: str, column: str) -> Cell:
    """Weights of a format, divided."""
    if column == RAY:
        return Cell(row, column, (OF_RAY, FORMATS_OF[row]), note="as without Ray: the same ranks in other places")
    if column == PIPELINE:
        return Cell(row, column, ("tests/parallel/test_composition.py::test_stages_read_their_part",))
    if column == REPLICAS:
        return Cell(row, column, (OF_REPLICAS, WALK), note="each replica has all of them")
    if column == SHARED:
        return Cell(row, column, ("tests/parallel/test_composition.py::test_shared_experts_of_a_format",))
    return Cell(row, column, (FORMATS_OF[row],))


def of_weighted_drafts(row: str, column: str) -> Cell:
    """What drafts with weights of its own, for a model or in a division."""
    if column == PIPELINE:
        return _refused(row, column, "ModelLoadError")
    if column == STATES or (row, column) == (MTP, TENSOR):
        return Cell(row, column, (HEADS_OF_STATES,))
    return Cell(row, column, (DRAFTED_BY[row],))


def of_two_divisions(row: str, column: str) -> Cell:
    """Two divisions of one engine."""
    pair = {row, column}
    if pair in ({SHARED, PIPELINE}, {SHARED, RAY}):
        return _refused(row, column, "ModelLoadError")
    if pair == {SHARED, REPLICAS}:
        return Cell(row, column, (OF_SHARED,), note="experts are shared among replicas")
    if RAY in pair:
        replicas = "tests/parallel/test_ray_cluster.py::test_replicas_are_on_several_nodes"
        return Cell(row, column, (replicas if REPLICAS in pair else OF_RAY,))
    if SHARED in pair:
        return Cell(row, column, (OF_SHARED,))
    return Cell(row, column, (OF_REPLICAS if REPLICAS in pair else OF_PIPELINES,))


def of_sleep(row: str, column: str) -> Cell:
    """An engine that sleeps while requests run."""
    return Cell(row, column, (SLEEPS[column],))


def of_updates(row: str, column: str) -> Cell:
    """Weights of a trainer, for an engine that runs."""
    if column == "FP8":
        return Cell(row, column, ("tests/gpu/test_gpu_weight_updates.py::test_the_tokens_of_a_fresh_engine",))
    return Cell(row, column, ("tests/parallel/test_weight_updates.py::test_tokens_are_those_of_a_fresh_engine",))


def of_sessions(row: str, column: str) -> Cell:
    """What a turn of a session asks for, beside the same request of its tokens alone."""
    return Cell(row, column, SESSION_TESTS)


def of_tenants(row: str, column: str) -> Cell:
    """What a tenant asks for beside a flood of another's, and the same alone."""
    return Cell(row, column, ("tests/e2e/test_tenants_smollm2.py::test_what_tenants_ask_for",))


def of_invariance(row: str, column: str) -> Cell:
    """A request's bits, whatever else is computed."""
    if column in (STATES, FOREIGN, ENCODERS, TENSOR):
        return _refused(row, column, "ModelLoadError")
    if column == ADAPTERS:
        return _refused(row, column, "InvalidRequestError")
    if column == DRAFTS:
        gpu = "tests/gpu/test_gpu_batch_invariant.py::test_one_result_alone_and_in_200_batches"
        return Cell(
            row, column, ("tests/runner/test_invariant_gpu_path.py::test_log_probabilities_have_one_result", gpu)
        )
    note = 'on a CPU by compiled kernels, but for `dtype="bfloat16"`' if column == "experts" else ""
    return Cell(row, column, INVARIANT_TESTS, note=note)


class Table(NamedTuple):
    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    is_symmetric: bool = False


TABLES = {
    of_requests: Table("Requests", REQUESTS, REQUESTS, is_symmetric=True),
    of_families: Table("Requests and models", REQUESTS, FAMILIES),
    of_formats: Table("Requests and formats of weights", REQUESTS, FORMATS),
    of_divisions: Table("Requests and several devices", REQUESTS, DIVISIONS),
    of_settings: Table("Settings", SETTINGS, (*FAMILIES, *FORMATS, *DIVISIONS)),
    of_weighted_drafts: Table(
        "Drafts of models and heads", tuple(DRAFTED_BY), ("full attention", STATES, TENSOR, PIPELINE)
    ),
    of_divided_families: Table("Models and several devices", FAMILIES, DIVISIONS),
    of_divided_formats: Table("Formats and several devices", FORMATS, DIVISIONS),
    of_sleep: Table("Sleep", (SLEEP,), tuple(SLEEPS)),
    of_updates: Table("Weights from a trainer", (UPDATES,), UPDATED),
    of_sessions: Table("Sessions", (SESSIONS,), WITH_SESSIONS),
    of_tenants: Table("Tenants", (TENANTS,), WITH_TENANTS),
    of_invariance: Table("Batch invariance", (INVARIANT,), INVARIANT_WITH),
    of_two_divisions: Table("Divisions", DIVISIONS, DIVISIONS, is_symmetric=True),
}


def cells() -> Iterator[Cell]:
    """Every cell of every table, each pair once."""
    for cell_of, table in TABLES.items():
        if table.is_symmetric:
            pairs: Iterator[tuple[str, str]] = itertools.combinations(table.rows, 2)
        else:
            pairs = itertools.product(table.rows, table.columns)
        yield from (cell_of(row, column) for row, column in pairs)


def as_markdown() -> str:
    parts = [MARK]
    for cell_of, table in TABLES.items():
        notes: dict[str, int] = {}
        tests: dict[str, None] = {}
        lines = [f"| | {' | '.join(table.columns)} |", f"|---|{'---|' * len(table.columns)}"]
        for row in table.rows:
            shown = []
            for column in table.columns:
                if row == column:
                    shown.append("")
                    continue
                cell = cell_of(row, column)
                tests |= dict.fromkeys(cell.tests)
                mark = f" ({notes.setdefault(cell.note, len(notes) + 1)})" if cell.note else ""
                shown.append(f"`{cell.error}`" if cell.error else f"exact{mark}")
            lines.append(f"| {row} | {' | '.join(shown)} |")
        parts.append(f"\n## {table.title}\n\n" + "\n".join(lines) + "\n")
        if notes:
            parts.append("\n" + "\n".join(f"{number}. {note}" for note, number in notes.items()) + "\n")
        parts.append("\nShown by " + ",\n".join(f"`{test}`" for test in tests) + ".\n")
    return "".join(parts)


def main() -> None:
    page = PAGE.read_text()
    written = page.partition(MARK)[0] + as_markdown()
    if "--check" in sys.argv:
        raise SystemExit(0 if page == written else f"{PAGE} is not as it should be: run python scripts/composition.py")
    PAGE.write_text(written)


if __name__ == "__main__":
    main()
