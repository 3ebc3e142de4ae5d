"""Backward of wide heads for Hopper: 64 keys, of which one warpgroup computes `pᵀ` and dv, the other `dsᵀ` and dk.

Letters as in `pieces` and `backward`.
"""

from flashtile._backends.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store_wait,
    warpgroup_mma_wait,
)
from flashtile.ops.attention.hopper.backward_loads import receive_step
from flashtile.ops.attention.hopper.backward_pieces import (
    ROWS,
    chunks_of,
    less_statistics,
    mask_probs,
    modified_scores,
    start_sum,
    start_transposed,
    store_rows,
    wait_sum,
    wide_zeros,
)
from flashtile.ops.attention.hopper.backward_walk import (
    await_last_sum,
    keys_of,
    receive_keys,
    receive_next_keys,
    step_after,
    step_of,
    turned_tile,
    walk_of,
)
from flashtile.ops.attention.hopper.blocks import FULL, load_bits, where_visible
from flashtile.ops.attention.hopper.pieces import pack, place_of, release


@gluon.jit
def sum_dv(inputs):
    """dv of all keys, and for `sum_dk` the factor of `dpᵀ - delta`: `pᵀ`, with a soft cap `pᵀ · (1 - tanh²)`."""
    (
        form, k, v, q, dout, statistics, probs_smem, probs_full, probs_empty, listing, changing, storing, queue, call,
    ) = inputs  # fmt: skip
    dtype: gl.constexpr = q.tiles.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.M, 16])
    window_left, window_right = call[9], call[10]
    zeros = gl.zeros([ROWS, form.M], gl.float32, s_layout)
    count = 0
    before = 0
    found = receive_keys(queue, count, form)
    while found[0] >= 0:
        walk = walk_of(found, call, form)
        key = walk.first + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        mine, key_phase = keys_of(count, 0, form)
        k_tile, k_tail = chunks_of(k, mine)
        dv, dv_tail = wide_zeros(dout)
        mbarrier.wait(k.full.index(mine), key_phase)
        head, tile = step_of(walk, 0)
        for it in range(walk.total):
            stage, phase = place_of(before + it, q.STAGES)
            place, place_phase = place_of(before + it, form.HANDOVERS)
            q_tile, q_tail = chunks_of(q, stage)
            mbarrier.wait(q.full.index(stage), phase)
            s = start_transposed(k_tile, k_tail, q_tile, q_tail, 0, zeros, q.TAIL)
            s, lse = less_statistics(s, statistics, stage, 0, 0, form.M, form)
            if form.TILE_K > 0:
                head, tile, kind = receive_step(listing, before + it, q, form)
            s = warpgroup_mma_wait(0, [s])
            seen = turned_tile(walk, tile, form) * form.M
            s, tanh = modified_scores(s, key, seen, head, walk, changing)
            if form.TILE_K > 0:
                if kind != FULL:
                    bits = load_bits(listing[0], kind, walk.first, tile, form.M, form.TILE_K, form.TILE_Q)
                    s = where_visible(bits, s, float("-inf"))
            p = gl.exp2(s * changing[0] - lse[None, :])
            if form.MAY_CUT:
                if (tile < walk.full_begin) | (tile >= walk.full_end):
                    p = mask_probs(p, key, tile * form.M, walk.shift, walk.seq_k, window_left, window_right, form)
            release(q.empty.index(stage))
            probs = pack(p, dtype)
            mbarrier.wait(probs_empty.index(place), place_phase ^ 1)
            if changing[1] is not None:
                probs_smem.index(place).store(pack(p * (1.0 - tanh * tanh), dtype))
            else:
                probs_smem.index(place).store(probs)
            mbarrier.arrive(probs_full.index(place), count=1)
            mbarrier.wait(dout.full.index(stage), phase)
            dout_tile, dout_tail = chunks_of(dout, stage)
            dv, dv_tail = start_sum(probs, dout_tile, dout_tail, 0, dv, dv_tail, dout.TAIL)
            dv, dv_tail = wait_sum(0, dout, dv, dv_tail)
            release(dout.empty.index(stage))
            head, tile = step_after(walk, head, tile)
        before += walk.total
        if walk.total > 0:  # `sum_dk` has read the values for the last time before it took the last weights
            place, place_phase = place_of(before - 1, form.HANDOVERS)
            mbarrier.wait(probs_empty.index(place), place_phase)
        else:
            mbarrier.wait(v.full.index(mine), key_phase)
        release(k.empty.index(mine))
        count += 1
        _, _, dv_desc, dv_tail_desc = storing
        store_rows(dv_desc, dv_tail_desc, v, mine, dv, dv_tail, walk, walk.first, form.PACKED)
        found = receive_next_keys(found, queue, count, form)
        tma_store_wait(0)
        release(v.empty.index(mine))


@gluon.jit
def sum_dk(inputs):
    """dk of all keys, and `dsᵀ` for `_sum_dq`, from the `pᵀ` of `sum_dv`."""
    (
        form, k, v, q, dout, statistics, probs_smem, probs_full, probs_empty,
        dscores, dscores_full, dscores_empty, scale, storing, queue, call,
    ) = inputs  # fmt: skip
    dtype: gl.constexpr = q.tiles.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.M, 16])
    zeros = gl.zeros([ROWS, form.M], gl.float32, s_layout)
    count = 0
    before = 0
    found = receive_keys(queue, count, form)
    while found[0] >= 0:
        walk = walk_of(found, call, form)
        mine, key_phase = keys_of(count, 0, form)
        v_tile, v_tail = chunks_of(v, mine)
        dk, dk_tail = wide_zeros(q)
        mbarrier.wait(v.full.index(mine), key_phase)
        for it in range(walk.total):
            stage, phase = place_of(before + it, q.STAGES)
            place, place_phase = place_of(before + it, form.HANDOVERS)
            dout_tile, dout_tail = chunks_of(dout, stage)
            mbarrier.wait(dout.full.index(stage), phase)
            dp = start_transposed(v_tile, v_tail, dout_tile, dout_tail, 0, zeros, dout.TAIL)
            mbarrier.wait(q.full.index(stage), phase)
            dp, delta = less_statistics(dp, statistics, stage, 1, 0, form.M, form)
            dp = warpgroup_mma_wait(0, [dp])
            release(dout.empty.index(stage))
            mbarrier.wait(probs_full.index(place), place_phase)
            p = probs_smem.index(place).load(s_layout).to(gl.float32)
            release(probs_empty.index(place))
            ds = pack(p * (dp - delta[None, :]), dtype)
            mbarrier.wait(dscores_empty.index(place), place_phase ^ 1)
            dscores.index(place).store(ds)
            fence_async_shared()
            mbarrier.arrive(dscores_full.index(place), count=1)
            q_tile, q_tail = chunks_of(q, stage)
            dk, dk_tail = start_sum(ds, q_tile, q_tail, 0, dk, dk_tail, q.TAIL)
            dk, dk_tail = wait_sum(0, q, dk, dk_tail)
            release(q.empty.index(stage))
        mbarrier.wait(k.full.index(mine), key_phase)
        before += walk.total
        count += 1
        await_last_sum(walk, before, form, dscores_empty)
        # `sum_dv` has read the keys before it gave the last weights.
        dk = dk * scale
        dk_tail = dk_tail * scale
        dk_desc, dk_tail_desc, _, _ = storing
        store_rows(dk_desc, dk_tail_desc, k, mine, dk, dk_tail, walk, walk.first, form.PACKED)
        found = receive_next_keys(found, queue, count, form)
        tma_store_wait(0)
        release(k.empty.index(mine))
