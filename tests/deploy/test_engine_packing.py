"""How sequences are laid out: beginnings shared, batches bounded."""

import torch

from deploy.local_service.packing import Group, PackedSequence, pack, row_batches, shared_groups


def sequences(*texts):
    """One token per character."""
    return [PackedSequence([ord(c) for c in text]) for text in texts]


def groups(*texts):
    return [
        (sorted(texts[n] for n in g.members), g.shared) for g in shared_groups(sequences(*texts))
    ]


def test_completions_of_a_prompt_share_it():
    assert groups("promptA", "promptBB", "promptC") == [(["promptA", "promptBB", "promptC"], 6)]


def test_unrelated_sequences_stay_apart():
    assert groups("abc", "xyz") == [(["abc"], 3), (["xyz"], 3)]


def test_runs_are_split_where_that_saves_more():
    """Apart "prompt" saves 6 rows; sharing "p" by three would save 2, sharing "prompt" is kept."""
    assert groups("prompt1", "prompt2", "p1") == [(["p1"], 2), (["prompt1", "prompt2"], 6)]
    # "prom" by all three saves 2 * 4, more than 6
    assert groups("prompt1", "prompt2", "prom1") == [(["prom1", "prompt1", "prompt2"], 4)]


def test_many_nested_beginnings_are_grouped_somehow():
    texts = ["a" * n for n in range(1, 400)]
    found = shared_groups(sequences(*texts))
    assert sorted(n for group in found for n in group.members) == list(range(399))


def test_equal_sequences_need_no_rows_of_their_own():
    (group,) = shared_groups(sequences("same", "same"))
    assert group.shared == 4
    assert group.rows(sequences("same", "same")) == 4


def test_different_known_prefixes_are_never_shared():
    known = [PackedSequence([1, 2, 3], cached=2), PackedSequence([1, 2, 3], cached=0)]
    assert [(g.members, g.shared) for g in shared_groups(known)] == [((1,), 3), ((0,), 3)]


def test_rows_point_at_shared_and_own_tokens():
    """Rows: a b | c | d e, then three that fill the quantum of 8."""
    asked = sequences("abc", "abde")
    packing = pack(asked, groups=[Group((0, 1), 2)], heads_per_kv=1)
    assert packing.tokens_N.tolist() == [ord(c) for c in "abcde" + "aaa"]
    assert packing.positions_N.tolist() == [0, 1, 2, 2, 3, 0, 0, 0]
    assert [rows.tolist() for rows in packing.rows_S] == [[0, 1, 2], [0, 1, 3, 4]]


def test_every_query_sees_its_own_sequence_up_to_itself():
    asked = [
        PackedSequence(range(5)),
        PackedSequence([0, 1, 2, 9, 9, 9]),
        PackedSequence(range(50, 53)),
    ]
    packing = pack(asked, groups=shared_groups(asked), heads_per_kv=2)
    seen = {}
    for block in packing.blocks:
        for b, (queries, keys) in enumerate(
            zip(block.query_rows_BQ.tolist(), block.key_rows_BK.tolist(), strict=True)
        ):
            for q in range(len(queries)):
                open_keys = block.mask_B1XK[b, 0, 2 * q] == 0
                assert torch.equal(open_keys, block.mask_B1XK[b, 0, 2 * q + 1] == 0)
                place = sum(
                    x.query_rows_BQ.numel() for x in packing.blocks[: packing.blocks.index(block)]
                )
                place += b * len(queries) + q
                seen[place] = [keys[k] for k in open_keys.nonzero()[:, 0].tolist()]
    members = [n for group in shared_groups(asked) for n in group.members]
    for n, rows in zip(members, packing.rows_S, strict=True):
        for position, row in enumerate(rows.tolist()):
            assert seen[int(packing.output_rows_N[row])] == rows[: position + 1].tolist(), n


def test_known_keys_come_before_the_rows_own():
    """Two tokens known, from row 4 of the pool on: rows 8 + 4 and 8 + 5."""
    asked = [PackedSequence([7, 8, 9], cached=2, cache_start=4)]
    packing = pack(asked, groups=[Group((0,), 3)], heads_per_kv=1)
    (block,) = packing.blocks
    assert packing.positions_N[0] == 2
    assert block.key_rows_BK[0, :3].tolist() == [12, 13, 0]


def test_batches_stay_below_the_limit_and_lose_nobody():
    asked = [PackedSequence([n // 5, *range(20 + n)]) for n in range(20)]
    batches = row_batches(asked, max_rows=100)
    assert sorted(n for b in batches for g in b for n in g.members) == list(range(20))
    assert all(sum(group.rows(asked) for group in batch) <= 100 for batch in batches)


def test_single_long_sequence_makes_a_batch_of_its_own():
    asked = [PackedSequence(range(500)), PackedSequence([900])]
    batches = row_batches(asked, max_rows=100)
    assert [[g.members for g in batch] for batch in batches] == [[(1,)], [(0,)]]
