"""The training order depends on seed and step alone, and batches hold distinct tasks."""

import hashlib

import numpy as np
import pytest

from envs.data_order import batch_ids, check_disjoint, epoch_order, order_record
from envs.errors import EnvInputError

IDS = tuple("abcdefg")


def test_first_epoch_is_numpy_permutation_of_the_seed():
    """The stated generator, and what `datasets` uses to shuffle."""
    assert epoch_order(7, seed=3) == np.random.default_rng(3).permutation(7).tolist()


def test_first_epoch_of_seed_0_is_frozen():
    """A literal order: a change of generator must be a deliberate change of this test."""
    assert epoch_order(7, seed=0) == [2, 4, 3, 6, 5, 0, 1]


def test_steps_walk_through_the_order_and_drop_the_remainder():
    """7 ids in threes: steps 0 and 1 take six, the seventh is skipped, step 2 opens epoch 1."""
    first = [IDS[n] for n in [2, 4, 3, 6, 5, 0, 1]]
    second = [IDS[n] for n in np.random.default_rng([0, 1]).permutation(7).tolist()]

    found = [batch_ids(IDS, seed=0, step=step, groups=3) for step in range(3)]

    assert found == [first[:3], first[3:6], second[:3]]


def test_batch_is_the_same_whatever_was_asked_before():
    late = batch_ids(IDS, seed=1, step=41, groups=2)

    assert late == batch_ids(IDS, seed=1, step=41, groups=2)


@pytest.mark.parametrize("step", range(20))
def test_batches_hold_no_task_twice(step):
    found = batch_ids(IDS, seed=5, step=step, groups=4)

    assert len(set(found)) == 4


@pytest.mark.parametrize(
    ("step", "groups", "field"), [(0, 8, "groups"), (0, 0, "groups"), (-1, 2, "step")]
)
def test_batch_refuses_impossible_requests(step, groups, field):
    with pytest.raises(EnvInputError, match=f"^{field} is"):
        batch_ids(IDS, seed=0, step=step, groups=groups)


def test_order_record_digests_the_order():
    """SHA-256 of the ids of epoch 0, one a line."""
    record = order_record(IDS, seed=0)

    assert record["epoch_0_sha256"] == hashlib.sha256(b"c\ne\nd\ng\nf\na\nb\n").hexdigest()
    assert (record["seed"], record["n"]) == (0, 7)


def test_disjoint_names_the_shared_task():
    with pytest.raises(EnvInputError, match="held-out tasks is 'b'; expected none"):
        check_disjoint(["a", "b", "c"], ["d", "c", "b"])
