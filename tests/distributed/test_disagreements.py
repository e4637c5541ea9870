"""Random programs in which one rank does something else: an error on every rank, and soon."""

import pytest
from disagreements import SILENT, outcomes_of_programs, random_program

pytestmark = pytest.mark.slow

NUM_PROGRAMS = 2000
BATCH = 25


@pytest.mark.sample(25)
@pytest.mark.parametrize("batch", range(NUM_PROGRAMS // BATCH))
def test_ranks_of_which_one_differs_find_out(ranks, batch):
    num_ranks = 2 + batch % 5
    programs = [random_program(BATCH * batch + i, num_ranks) for i in range(BATCH)]
    found = ranks.run(8, outcomes_of_programs, num_ranks, programs)[:num_ranks]
    for program, *of_ranks in zip(programs, *found, strict=True):
        check(program, of_ranks)


def check(program, found):
    """Every rank has an error within 5 s, and no rank has a wrong result."""
    for rank, (_, wrong, error, text, seconds) in enumerate(found):
        about = f"rank {rank}: {error} {text} after {seconds:.1f} s; {program}"
        assert not wrong and error and seconds < 5, about
        if program.kind in SILENT:
            continue
        # The first rank that differs from rank 0.
        named = program.of_rank or (1 if program.kind != "invalid" else 0)
        if program.kind != "invalid":
            assert error == "ValueError" and ", rank 0 has " in text, about
            assert text.startswith(f"rank {named} of the group has "), about
        elif rank != program.of_rank:
            assert error == "ValueError", about
            assert text.startswith(f"rank {named} of the group failed: "), about
    if program.kind not in SILENT:  # all found it in the same pass
        assert len({right for right, *_ in found}) == 1
