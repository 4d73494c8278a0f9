"""Every golden case, at both precisions, through the torch losses and the float64 reference.

The folder is tests/losses/fixtures, or the one that GATED_RL_LOSS_FIXTURES names.
"""

import pytest

from tests.losses.golden.compare import check
from tests.losses.golden.families import FAMILIES, family, precision_matters
from tests.losses.golden.loading import Block, all_blocks

BLOCKS = all_blocks()
RUNS = [
    pytest.param(block, implementation, id=f"{block.id}-{implementation}")
    for block in BLOCKS
    for implementation in FAMILIES[family(block)]
    # A float64 reference cannot take a decision that float32 rounding made differently.
    if not (implementation == "reference" and block.dtype == "float32" and precision_matters(block))
]


@pytest.mark.parametrize(("block", "implementation"), RUNS)
def test_golden_case_is_reproduced(block: Block, implementation: str) -> None:
    """Loss, gradient, terms, decisions and counts equal the published ones."""
    check(block, FAMILIES[family(block)][implementation](block))
