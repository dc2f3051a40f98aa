// Gradients of fused attention, without atomics. With P = exp(s - LSE) and D = rowsum(dO ∘ O) -
// dLSE, which delta.wgsl computes:
//
//     dS = P ∘ (keep·dP - D)    dP = dO·Vᵀ    dX = scale · dS ∘ (1 - tanh²)
//     dV = (keep·P)ᵀ·dO         dK = dXᵀ·Q    dQ = dX·K
//
// OF chooses the result. For dV and dK a workgroup owns 32 keys of one key head: it loops over
// the tiles of 32 rows that see one of them, and in each over the query heads that share the
// key head. For dQ it owns 32 rows of one query head and loops over the tiles of keys that they
// see. Every sum is a chain of fma in that order. Tiles of rows begin at multiples of 32 of the
// call, so that neither the keys next to a key nor the pieces of a cut change a bit. For dS a
// workgroup computes one tile.
//
// Thread (tx, ty) of 8 x 8 has rows 4·ty + r and
//
//                 keys 4·tx + c             columns 32·i + 4·tx + c
//            ┌──────┬──────┬─ 8 ─┐        ┌──────┬─ 8 ─┐
//     rows   │ 4x4  │      │     │        │ 4x4  │     │   · BLOCKS blocks of 32
//     4·ty+r ├──────┼ S,dP ┼     │        ├──────┼ sum │
//            └──────┴──────┴─────┘        └──────┴─────┘
//
// in registers. For dV and dK the tile of weights is transposed on its way through workgroup
// memory, and the rows on the right are the keys 4·ty + r. Results with more columns than
// BLOCKS blocks take several workgroups, which compute the weights again.
//
// The sums are state, in float32: rows of p.splits vec4. convert.wgsl rounds them to their
// type. dS is [row][key] in state.
//
// A hidden pair never takes part: its weight is the marker HIDDEN, which the products skip.
// Rows whose LSE is -Inf are hidden.
//
// Workgroup memory: a 4,608 + b 4,608 + w 4,608 + info 256 = 14,080 bytes.

// The binding g is dO, with the strides o. The binding rows has D and LSE of each row, with the
// strides s.

// Rewritten for each variant:
const EXPAND: u32 = 0u; // 0: loops stay loops, 1: 'unroll' is unrolled, 2: 'unroll deep' too
const IN: u32 = 0u; // type of q: 0 f32, 1 f16, 2 bf16
const KV: u32 = 0u; // type of k and v
const DO: u32 = 0u; // type of dO
const BOTH: u32 = 0u; // 1: blocks and relative are bound, see common/options.wgsl
const EXTRA: u32 = 1u; // see common/options.wgsl
const OF: u32 = 0u; // the result: 0 dV, 1 dK, 2 dQ, 3 dS
const BLOCKS: u32 = 2u; // blocks of 32 columns of a workgroup
const ACC: u32 = 8u; // 4 · BLOCKS

@group(0) @binding(0) var<storage, read> q: array<u32>;
@group(0) @binding(1) var<storage, read> k: array<u32>;
@group(0) @binding(2) var<storage, read> v: array<u32>;
@group(0) @binding(3) var<storage, read> g: array<u32>;
@group(0) @binding(4) var<storage, read> rows: array<f32>;
@group(0) @binding(5) var<storage, read> mask: array<u32>;
@group(0) @binding(6) var<storage, read> bias: array<u32>;
@group(0) @binding(7) var<storage, read_write> state: array<vec4<f32>>;
@group(0) @binding(8) var<uniform> p: AttentionParams;
@group(0) @binding(9) var<storage, read> blocks: array<u32>; // BOTH
@group(0) @binding(10) var<storage, read> relative: array<u32>; // BOTH

// Rows of 8 vec4 are padded to 9, which puts lanes on different banks.
var<workgroup> a: array<vec4<f32>, 288>; // q or dO as [row][column/4]
var<workgroup> b: array<vec4<f32>, 288>; // k or v as [column][key/4], or a factor of the sums as [term][column/4]
var<workgroup> w: array<vec4<f32>, 288>; // weights, [row of the sums][term/4]
var<workgroup> info: array<vec4<f32>, 16>; // LSE, then D, of the rows of the tile

// element_$x returns element i of $x.
// each $x $TYPE: q IN, k KV, v KV, g DO
fn element_$x(i: u32) -> f32 {
    return decode($x[select(i >> 1u, i, $TYPE == 0u)], i, $TYPE);
}

// $to_$x copies 32 columns from c0 of 32 rows of $x from r0 to $to, with zeros beyond the end.
// each $x $s $to: q q a, g o a, g o b, q q b, k k b
fn $to_$x(t: u32, at: u32, r0: u32, count: u32, c0: u32, width: u32) {
    let quad = t % 8u;
    let c = c0 + 4u * quad;
    for (var i = 0u; i < 4u; i++) {
        let row = t / 8u + 8u * i;
        var x = vec4<f32>(0.0);
        if (r0 + row < count) {
            let start = at + (r0 + row) * p.$s.s;
            for (var e = 0u; e < 4u; e++) { // unroll always
                if (c + e < width) { x[e] = element_$x(start + (c + e) * p.$s.d); }
            }
        }
        $to[row * 9u + quad] = x;
    }
}

// across_$x copies 32 columns from c0 of 32 rows of $x from j0 to b, transposed.
// each $x: k, v
fn across_$x(t: u32, at: u32, j0: u32, c0: u32, width: u32) {
    let column = t % 32u;
    let c = c0 + column;
    for (var i = 0u; i < 4u; i++) {
        let quad = t / 32u + 2u * i;
        let j = j0 + 4u * quad;
        var x = vec4<f32>(0.0);
        if (c < width) {
            for (var e = 0u; e < 4u; e++) { // unroll always
                if (j + e < p.keys) { x[e] = element_$x(at + (j + e) * p.$x.s + c * p.$x.d); }
            }
        }
        b[column * 9u + quad] = x;
    }
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) t: u32,
) {
    let id = p.first + group.y * groups.x + group.x;
    if (id >= p.total) {
        return;
    }
    let tx = t % 8u;
    let ty = t / 8u;
    let part = id % p.parts; // of the columns of the result, or the tile of keys of dS
    let own = id / p.parts % p.blocks * 32u; // the first row or key that this workgroup owns
    let owner = id / p.parts / p.blocks; // its head and batch

    // The query heads of the workgroup, their key head, and the tiles that it runs over.
    var batch = owner / p.heads;
    var first_head = owner % p.heads;
    var members = 1u;
    var length = p.rows; // rows, or keys, that workgroups own in a head
    if (OF < 2u) {
        batch = owner / p.kv_heads;
        first_head = owner % p.kv_heads * p.group;
        members = p.group;
        length = p.keys;
    }
    let kv_head = (p.head0 + first_head) / p.group - p.head0 / p.group;
    let k_at = p.k.base + batch * p.k.b + kv_head * p.k.h;
    let v_at = p.v.base + batch * p.v.b + kv_head * p.v.h;
    var cap = i32(p.key0 + p.keys);
    if ((p.flags & HAS_KLEN) != 0u) {
        cap = min(cap, p.klen[batch / 4u][batch % 4u]);
    }
    var begin = 0;
    var end = 0;
    if (OF < 2u) {
        let j_first = i32(p.key0 + own);
        let j_end = min(j_first + 32, cap);
        begin = max(j_first - p.hi + 1, i32(p.row0)) / 32 * 32; // tiles order the sums over heads
        begin = max(begin, i32(p.row0));
        end = min(j_end - p.lo, i32(p.row0 + p.rows));
        if (j_first >= j_end) {
            end = begin;
        }
    } else {
        let i_first = i32(p.row0 + own);
        let i_last = i32(p.row0 + min(own + 32u, p.rows)) - 1;
        begin = max(i_first + p.lo, i32(p.key0));
        end = min(i_last + p.hi, cap);
        if (OF == 3u) { // static
            let j_first = i32(p.key0 + part * 32u);
            let j_end = min(j_first + 32, cap);
            let empty = max(begin, j_first) >= min(end, j_end);
            begin = j_first;
            end = select(j_end, j_first, empty);
        }
    }

    var acc: array<vec4<f32>, ACC>; // [block][row]
    var tile: array<vec4<f32>, 4>; // weights of the thread's rows with its keys
    for (var i = 0u; i < ACC; i++) { // unroll
        acc[i] = vec4<f32>(0.0);
    }
    for (var r = 0u; r < 4u; r++) { // unroll
        tile[r] = vec4<f32>(0.0);
    }
    let state_at = (owner * length + own + 4u * ty) * p.splits + part * (8u * BLOCKS) + tx;
    if (OF != 3u) { // static
        if ((p.flags & GO_ON) != 0u) {
            for (var i = 0u; i < BLOCKS; i++) { // unroll
                for (var r = 0u; r < 4u; r++) { // unroll
                    if (own + 4u * ty + r < length) {
                        acc[4u * i + r] = state[state_at + r * p.splits + 8u * i];
                    }
                }
            }
        }
    }
    let paired = (p.flags & (HAS_MASK | HAS_BLOCKS | HAS_BIAS | HAS_SLOPES | HAS_DROPOUT)) != 0u;
    let biased = (p.flags & (HAS_BIAS | HAS_SLOPES)) != 0u;

    for (var at = begin; at < end; at += 32) {
        for (var member = 0u; member < members; member++) {
            let head = first_head + member;
            var r0 = own;
            var j0 = u32(at) - p.key0;
            if (OF < 2u) {
                r0 = u32(at) - p.row0;
                j0 = own;
            }
            let i_first = i32(p.row0 + r0);
            let i_last = i32(p.row0 + min(r0 + 32u, p.rows)) - 1;
            let key = i32(p.key0 + j0);
            var look = 2u;
            if ((p.flags & HAS_BLOCKS) != 0u) {
                look = blocks_seen(batch, head, r0, 32u, u32(key), 32u, u32(cap));
            }
            if (look != 0u) {
                let q_at = p.q.base + batch * p.q.b + head * p.q.h;
                let g_at = p.o.base + batch * p.o.b + head * p.o.h;
                if (t < 32u) { // rows after the last are as if they saw nothing
                    var d = 0.0;
                    var lse = bitcast<f32>(MINUS_INF);
                    if (r0 + t < p.rows) {
                        let row_at = p.s.base + batch * p.s.b + head * p.s.h + (r0 + t) * p.s.s;
                        d = rows[row_at];
                        lse = rows[row_at + p.s.d];
                    }
                    info[t / 4u][t % 4u] = lse;
                    info[8u + t / 4u][t % 4u] = d;
                }

                var s: array<vec4<f32>, 4>; // q·k of the thread's rows
                var u: array<vec4<f32>, 4>; // dO·v
                for (var r = 0u; r < 4u; r++) { // unroll
                    s[r] = vec4<f32>(0.0);
                    u[r] = vec4<f32>(0.0);
                }
                for (var d0 = 0u; d0 < p.dim; d0 += 32u) {
                    workgroupBarrier();
                    a_q(t, q_at, r0, p.rows, d0, p.dim);
                    across_k(t, k_at, j0, d0, p.dim);
                    workgroupBarrier();
                    for (var x = 0u; x < 8u; x++) { // unroll deep
                        let b0 = b[(4u * x) * 9u + tx];
                        let b1 = b[(4u * x + 1u) * 9u + tx];
                        let b2 = b[(4u * x + 2u) * 9u + tx];
                        let b3 = b[(4u * x + 3u) * 9u + tx];
                        for (var r = 0u; r < 4u; r++) { // unroll
                            let y = a[(4u * ty + r) * 9u + x];
                            s[r] = add(y.w, b3, add(y.z, b2, add(y.y, b1, add(y.x, b0, s[r]))));
                        }
                    }
                }
                if (OF != 0u) { // static
                    for (var d0 = 0u; d0 < p.vdim; d0 += 32u) {
                        workgroupBarrier();
                        a_g(t, g_at, r0, p.rows, d0, p.vdim);
                        across_v(t, v_at, j0, d0, p.vdim);
                        workgroupBarrier();
                        for (var x = 0u; x < 8u; x++) { // unroll deep
                            let b0 = b[(4u * x) * 9u + tx];
                            let b1 = b[(4u * x + 1u) * 9u + tx];
                            let b2 = b[(4u * x + 2u) * 9u + tx];
                            let b3 = b[(4u * x + 3u) * 9u + tx];
                            for (var r = 0u; r < 4u; r++) { // unroll
                                let y = a[(4u * ty + r) * 9u + x];
                                u[r] = add(y.w, b3, add(y.z, b2, add(y.y, b1, add(y.x, b0, u[r]))));
                            }
                        }
                    }
                }

                var check = paired || key < i_last + p.lo || key + 32 > min(i_first + p.hi, cap);
                for (var x = 0u; x < 8u; x++) { // unroll deep
                    let dead = bitcast<vec4<u32>>(info[x]) == vec4<u32>(MINUS_INF);
                    check = check || dead.x || dead.y || dead.z || dead.w;
                }
                let lses = info[ty];
                let ds = info[8u + ty];
                for (var r = 0u; r < 4u; r++) { // unroll
                    let row = r0 + 4u * ty + r;
                    let lse = lses[r];
                    var hidden = vec4<bool>(false);
                    var more = vec4<f32>(0.0);
                    if (check) {
                        let i = i32(p.row0 + row);
                        let j = vec4<i32>(key + i32(4u * tx)) + vec4<i32>(0, 1, 2, 3);
                        var seen = (j >= vec4<i32>(i + p.lo)) & (j < vec4<i32>(min(i + p.hi, cap)));
                        if (bitcast<u32>(lse) == MINUS_INF) {
                            seen = vec4<bool>(false);
                        }
                        let options = added(seen, batch, head, row, j0 + 4u * tx, 1u, biased);
                        hidden = !options.seen;
                        more = options.y;
                    }
                    var x = s[r];
                    var factor = p.scale;
                    var slope = vec4<f32>(p.scale);
                    if ((p.flags & HAS_SOFTCAP) != 0u) {
                        x = tanh_acc(x * p.scale / p.softcap);
                        factor = p.softcap;
                        slope = fma(-x, x, vec4<f32>(1.0)) * p.scale;
                    }
                    // A probability is at most 1, however much a large score is off.
                    let z = (fma(x, vec4<f32>(factor), more) - vec4<f32>(lse)) * LOG2E;
                    let y = select(min(z, vec4<f32>(0.0)), z, is_nan(z));
                    let e = exp2_acc(y);
                    var dropped_keys = vec4<bool>(false);
                    if ((p.flags & HAS_DROPOUT) != 0u) {
                        for (var c = 0u; c < 4u; c++) { // unroll
                            dropped_keys[c] = dropped(batch, head, row, j0 + 4u * tx + c);
                        }
                    }
                    if (OF == 0u) { // static
                        tile[r] = select(e * p.keep, vec4<f32>(HIDDEN), hidden | dropped_keys);
                    }
                    if (OF != 0u) { // static
                        let d = vec4<f32>(ds[r]);
                        let dp = select(fma(u[r], vec4<f32>(p.keep), -d), -d, dropped_keys);
                        if (OF != 3u) { // static
                            tile[r] = select(e * dp * slope, vec4<f32>(HIDDEN), hidden);
                        }
                        if (OF == 3u) { // static
                            tile[r] = select(e * dp, vec4<f32>(0.0), hidden);
                        }
                    }
                }

                if (OF != 3u) { // static
                    if (OF == 2u) { // static
                        for (var r = 0u; r < 4u; r++) { // unroll
                            w[(4u * ty + r) * 9u + tx] = tile[r];
                        }
                    }
                    if (OF != 2u) { // static
                        for (var c = 0u; c < 4u; c++) { // unroll
                            w[(4u * tx + c) * 9u + ty] = vec4<f32>(tile[0][c], tile[1][c], tile[2][c], tile[3][c]);
                        }
                    }
                    for (var i = 0u; i < BLOCKS; i++) { // unroll
                        let c0 = (part * BLOCKS + i) * 32u;
                        workgroupBarrier();
                        if (OF == 0u) { // static
                            b_g(t, g_at, r0, p.rows, c0, p.vdim);
                        }
                        if (OF == 1u) { // static
                            b_q(t, q_at, r0, p.rows, c0, p.dim);
                        }
                        if (OF == 2u) { // static
                            b_k(t, k_at, j0, p.keys, c0, p.dim);
                        }
                        workgroupBarrier();
                        for (var x = 0u; x < 8u; x++) { // unroll deep
                            let b0 = b[(4u * x) * 9u + tx];
                            let b1 = b[(4u * x + 1u) * 9u + tx];
                            let b2 = b[(4u * x + 2u) * 9u + tx];
                            let b3 = b[(4u * x + 3u) * 9u + tx];
                            for (var r = 0u; r < 4u; r++) { // unroll
                                let y = w[(4u * ty + r) * 9u + x];
                                let sum = acc[4u * i + r];
                                if (check) {
                                    acc[4u * i + r] = add_seen(y.w, b3, add_seen(y.z, b2, add_seen(y.y, b1, add_seen(y.x, b0, sum))));
                                } else {
                                    acc[4u * i + r] = add(y.w, b3, add(y.z, b2, add(y.y, b1, add(y.x, b0, sum))));
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    if (OF == 3u) { // static
        for (var r = 0u; r < 4u; r++) { // unroll
            if (own + 4u * ty + r < p.rows && part * 32u + 4u * tx < p.keys) {
                state[(own + 4u * ty + r) * p.splits + p.part0 + part * 8u + tx] = tile[r];
            }
        }
    }
    if (OF != 3u) { // static
        for (var i = 0u; i < BLOCKS; i++) { // unroll
            for (var r = 0u; r < 4u; r++) { // unroll
                if (own + 4u * ty + r < length) {
                    state[state_at + r * p.splits + 8u * i] = acc[4u * i + r];
                }
            }
        }
    }
}
