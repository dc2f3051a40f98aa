// Parts of the kernels of gradients, see gradient.wgsl. A workgroup owns OWNED keys (KEYS = 1) or rows, and takes OTHERS
// rows or keys at once: the rows are TILE_ROWS, from row r0 of the box on, the keys TILE_KEYS, from key j0 of the chunk on.

// row_$x returns where row i of the part of $x that begins at element at, or its last row, begins.
@each($x $s $n: q q rows, g o rows, k k keys, v v keys)
fn row_$x(at: u32, i: u32) -> u32 { return at + min(i, p.$n - 1u) * p.$s.s; }

@each($x $s: q q, g o, k k, v v)
fn four_$x(row: u32, d: u32, end: u32) -> vec4<u32> { return stored_$x(row, d, end, p.$s.d); }

// owner_of_id declares what the workgroup with the number owner owns, from own on, in which batch, for which query heads,
// and what it runs over.
@inline fn owner_of_id() {
    // In a causal call the first keys and the last rows see most: they come first.
    var own = id / p.parts / p.batch_heads;
    if (KEYS == 0u) { own = p.blocks - 1u - own; }
    own = own * OWNED;

    // The query heads of the workgroup.
    let zero = select(p.key0, p.row0, KEYS == 1u); // index in the call of the first other
    let owners = select(p.heads, p.kv_heads, KEYS == 1u);
    let members = select(1u, p.group, KEYS == 1u);
    let batch = owner / owners;
    let first_head = owner % owners * members;
    let length = select(p.rows, p.keys, KEYS == 1u); // rows, or keys, that workgroups own in a head
    @inline tiles_of_owner();
}

// tiles_of_owner declares the key head of the workgroup, and from which row or key to which it runs over tiles,
// begin and end.
@inline fn tiles_of_owner() {
    let kv_head = (p.head0 + first_head) / p.group - p.head0 / p.group;
    @each($x: k, v) let $x_at = p.$x.base + batch * p.$x.b + kv_head * p.$x.h;
    let cap = key_end(batch, p.key0 + p.keys);
    let offset = offset_of(batch);
    let others = i32(OTHERS);
    var begin = 0;
    var end = 0;
    if (KEYS == 1u) {
        let j_first = i32(p.key0 + own);
        let j_end = min(j_first + i32(OWNED), cap);
        begin = max(j_first - p.hi - offset + 1, i32(p.row0)) / others * others; // tiles order the sums over heads
        begin = max(begin, i32(p.row0));
        end = min(j_end - p.lo - offset, i32(p.row0 + p.rows));
        if (j_first >= j_end) { end = begin; }
    } else {
        let i_first = i32(p.row0 + own) + offset;
        let i_last = i32(p.row0 + min(own + OWNED, p.rows)) - 1 + offset;
        begin = max(i_first + p.lo, i32(p.key0));
        end = min(i_last + p.hi, cap);
        @if(OF == 2u) {
            let j_first = i32(p.key0 + part * OTHERS);
            end = select(min(end, j_first + others), j_first, begin >= j_first + others);
            begin = j_first;
        }
    }
}

// stage_info puts D and LSE of the rows of the tile into info. Rows after the last are as if they saw nothing.
@inline fn stage_info() {
    for (var x = t; x < TILE_ROWS; x += THREADS) {
        let row_at = p.s.base + batch * p.s.b + head * p.s.h + min(r0 + x, p.rows - 1u) * p.s.s;
        let lse = select(negative_infinity(), rows[row_at + p.s.d], r0 + x < p.rows);
        if (bitcast<u32>(lse) == MINUS_INF) { atomicStore(&dead, tiles); }
        info[x] = vec2<f32>(lse * LOG2E, rows[row_at]);
    }
}

// tile_of_member declares the tile of the others from at on with a query head: its rows and keys, and whether the block
// mask shows any pair.
@inline fn tile_of_member() {
    let head = first_head + member;
    let other0 = u32(at) - zero;
    let r0 = select(own, other0, KEYS == 1u);
    let j0 = select(other0, own, KEYS == 1u);
    let i_first = i32(p.row0 + r0) + offset;
    let i_last = i32(p.row0 + min(r0 + TILE_ROWS, p.rows)) - 1 + offset;
    let key = i32(p.key0 + j0);
    var look = 2u;
    @if(PAIRED == 1u) if ((p.flags & HAS_BLOCKS) != 0u) {
        look = blocks_seen(batch, head, r0, TILE_ROWS, u32(key), TILE_KEYS, u32(cap));
    }
}

// what_is_paired declares whether pairs have options of their own, and biases.
@inline fn what_is_paired() {
    var paired = (p.flags & (HAS_MASK | HAS_BLOCKS | HAS_BIAS | HAS_SLOPES | HAS_DROPOUT)) != 0u;
    @if(MOD == 1u) paired = true;
    let biased = (p.flags & (HAS_BIAS | HAS_SLOPES)) != 0u;
}

// check_of_tile declares whether any pair of a tile may be hidden or has options of its own.
@inline fn check_of_tile() {
    let check = paired || key < i_last + p.lo || key + i32(TILE_KEYS) > min(i_first + p.hi, cap) || atomicLoad(&dead) == tiles;
}

// derivatives declares, for a row of the tile and the keys j, j + step, j + 2·step and j + 3·step with the products x = q·k
// and u = dO·v, the probabilities e, those after dropout w, and dX, or dS, y.
@inline fn derivatives() {
    let lse = info[row].x;
    var hidden = vec4<bool>(false);
    var more = vec4<f32>(0.0);
    if (check) {
        let i = i32(p.row0 + r0 + row) + offset;
        let at_key = vec4<i32>(i32(p.key0 + j)) + vec4<i32>(i32(step)) * vec4<i32>(0, 1, 2, 3);
        var seen = (at_key >= vec4<i32>(i + p.lo)) & (at_key < vec4<i32>(min(i + p.hi, cap)));
        if (bitcast<u32>(lse) == MINUS_INF) { seen = vec4<bool>(false); }
        @if(PAIRED == 1u) {
            let options = added(seen, batch, head, r0 + row, j, step, biased);
            seen = options.seen;
            more = options.y;
        }
        hidden = !seen;
    }
    var slope = vec4<f32>(p.scale);
    @if(MOD == 1u) {
        let at_row = vec4<u32>(r0 + row);
        let at_j = vec4<u32>(j) + vec4<u32>(step) * vec4<u32>(0u, 1u, 2u, 3u);
        slope = derived(x * p.scale, batch, head, at_row, at_j) * p.scale;
        x = modified(x * p.scale, batch, head, at_row, at_j);
        hidden = hidden | mod_hides(x);
    }
    var z = fma(x, vec4<f32>(p.unit), vec4<f32>(-lse));
    @if(PAIRED == 1u) {
        if ((p.flags & HAS_SOFTCAP) != 0u) {
            x = capped(x);
            slope = fma(-x, x, vec4<f32>(1.0)) * slope;
            z = fma(x, vec4<f32>(p.unit), vec4<f32>(-lse));
        }
        if (biased) { z = fma(x, vec4<f32>(p.unit), more * LOG2E) - lse; }
    }
    // A probability is at most 1, however much a large score is off. exp2_own needs no bound then.
    @if(EXP2 == 1u) let e = exp2(min(z, vec4<f32>(0.0)));
    @else let e = exp2_down(min(z, vec4<f32>(0.0)));
    let d = vec4<f32>(info[row].y);
    var dp = u - d;
    @if(PAIRED == 1u) dp = select(fma(u, vec4<f32>(p.keep), -d), -d, dropped_keys);
    var y = e * dp;
    @if(OF != 2u) y = y * slope;
    var w = e;
    @if(PAIRED == 1u) w = e * p.keep;
    if (check) {
        @if(OF == 2u) y = select(y, vec4<f32>(0.0), hidden);
        @else y = select(y, vec4<f32>(hidden_weight()), hidden);
        w = select(w, vec4<f32>(hidden_weight()), hidden | dropped_keys);
    }
}
