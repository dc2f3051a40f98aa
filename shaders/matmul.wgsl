// Batched matrix product, one tile of 32 x 32 of one head a workgroup:
//
//     y[b, h, i, n] = Σ_x a[b, h, i, x] · w[b, h/group, x, n] + bias[n]
//
// It is QKᵀ (x the depth, n the key), PV (x the key, n the column) and the linear
// layers (x the input feature), which differ by strides alone. A thread (tx, ty)
// of 8 x 8 keeps 4 x 4 results in registers, rows 4·ty+r and columns 4·tx+c, from
// chunks of 32 along x:
//
//         x ──►  32                 n ──► 32
//     i ┌────────────┐         x ┌────────────┐
//       │ as [row]   │           │ ws [x]     │
//       └────────────┘           └────────────┘
//
// A call may come in pieces along x: unless it is the last, a piece leaves its
// sums in state, the next one goes on from there, and the result is the same to
// the bit.
//
// Workgroup memory: as_ 4,608 + ws 4,608 = 9,216 bytes.

// Rewritten for each variant:
const A: u32 = 0u; // type of a: 0 f32, 1 f16, 2 bf16
const W: u32 = 0u; // type of w
const SKIP: u32 = 1u; // 1: an a of exactly 0 hides its w, as PV wants (0·NaN is NaN)

struct Strides {
    base: u32,
    b: u32,
    h: u32,
    s: u32,
    d: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

struct Params {
    first: u32, // workgroups that earlier dispatches of this box took
    total: u32, // workgroups of the box
    row_tiles: u32,
    col_tiles: u32,
    heads: u32, // heads in the box
    head0: u32, // number of the first
    group: u32, // heads of a for each head of w
    rows: u32,
    cols: u32,
    depth: u32, // along x, in the piece
    along_x: u32, // 1: w's neighbours lie along x, else along n; for the order of loads
    flags: u32, // 1: go on from state, 2: leave state
    bias_type: u32, // 0: no bias, else 1 + its type
    out_type: u32, // type of y
    pad0: u32,
    pad1: u32,
    a: Strides,
    w: Strides, // s along x, d along n
    y: Strides,
    bias_base: u32,
    bias_stride: u32,
}

@group(0) @binding(0) var<storage, read> a: array<u32>;
@group(0) @binding(1) var<storage, read> w: array<u32>;
@group(0) @binding(2) var<storage, read> bias: array<u32>;
@group(0) @binding(3) var<storage, read_write> y: array<atomic<u32>>;
@group(0) @binding(4) var<storage, read_write> state: array<f32>;
@group(0) @binding(5) var<uniform> p: Params;

var<workgroup> as_: array<vec4<f32>, 288>; // [row][x/4], rows padded to 9
var<workgroup> ws: array<vec4<f32>, 288>; // [x][n/4]

// decode returns element i of a tensor from the word that holds it: type 0 is
// f32, 1 f16, 2 bf16.
fn decode(word: u32, i: u32, dtype: u32) -> f32 {
    let pair = unpack2x16float(word);
    let half = select(pair.x, pair.y, (i & 1u) == 1u);
    let brain = bitcast<f32>((word >> ((i & 1u) * 16u)) << 16u);
    return select(select(brain, half, dtype == 1u), bitcast<f32>(word), dtype == 0u);
}

// encode16 rounds x to f16 (type 1) or bf16 (type 2), to nearest, ties to even.
// pack2x16float may round either way, so it is not used.
fn encode16(x: f32, dtype: u32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let a = bits & 0x7fffffffu;
    let nan = a > 0x7f800000u;
    let brain = select((bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u, (bits >> 16u) | 0x40u, nan);
    var half = (a - 0x38000000u + 0xfffu + ((a >> 13u) & 1u)) >> 13u;
    // Below 2^-14 f16 is subnormal, in steps of 2^-24. Adding 1/2 puts the step of
    // the sum at 2^-24, so that the addition rounds; the low bits count the steps.
    half = select(half, bitcast<u32>(bitcast<f32>(a) + 0.5) - 0x3f000000u, a < 0x38800000u);
    half = select(half, 0x7c00u, a >= 0x477ff000u); // 65520 and over round to infinity
    half = select(half, 0x7e00u, nan);
    return select(sign | half, brain, dtype == 2u);
}

// put stores x as element i of y. Two rows may share a word when elements take
// 16 bits, so the bits that change are flipped atomically: nobody else writes this
// half of the word, and the other half is left alone whatever it is by then.
fn put(i: u32, x: f32) {
    if (p.out_type == 0u) {
        atomicStore(&y[i], bitcast<u32>(x));
    } else {
        let shift = (i & 1u) * 16u;
        let old = atomicLoad(&y[i >> 1u]) >> shift;
        atomicXor(&y[i >> 1u], ((old ^ encode16(x, p.out_type)) & 0xffffu) << shift);
    }
}

fn load_a(i: u32) -> f32 {
    return decode(a[select(i >> 1u, i, A == 0u)], i, A);
}

fn load_w(i: u32) -> f32 {
    return decode(w[select(i >> 1u, i, W == 0u)], i, W);
}

fn load_bias(i: u32) -> f32 {
    return decode(bias[select(i >> 1u, i, p.bias_type == 1u)], i, p.bias_type - 1u);
}

fn stage_a(t: u32, at: u32, r0: u32, x0: u32) {
    let quad = t % 8u;
    for (var i = 0u; i < 4u; i++) {
        let row = t / 8u + 8u * i;
        var v = vec4<f32>(0.0);
        if (r0 + row < p.rows) {
            let start = at + (r0 + row) * p.a.s;
            let x = x0 + 4u * quad;
            if (x < p.depth) { v.x = load_a(start + x * p.a.d); }
            if (x + 1u < p.depth) { v.y = load_a(start + (x + 1u) * p.a.d); }
            if (x + 2u < p.depth) { v.z = load_a(start + (x + 2u) * p.a.d); }
            if (x + 3u < p.depth) { v.w = load_a(start + (x + 3u) * p.a.d); }
        }
        as_[row * 9u + quad] = v;
    }
}

// stage_w reads neighbours in memory with neighbouring threads, whichever of the
// two axes that is.
fn stage_w(t: u32, at: u32, c0: u32, x0: u32) {
    for (var i = 0u; i < 4u; i++) {
        var row = t / 8u + 8u * i;
        var quad = t % 8u;
        if (p.along_x == 1u) {
            row = t % 32u;
            quad = t / 32u + 2u * i;
        }
        var v = vec4<f32>(0.0);
        if (x0 + row < p.depth) {
            let start = at + (x0 + row) * p.w.s;
            let c = c0 + 4u * quad;
            if (c < p.cols) { v.x = load_w(start + c * p.w.d); }
            if (c + 1u < p.cols) { v.y = load_w(start + (c + 1u) * p.w.d); }
            if (c + 2u < p.cols) { v.z = load_w(start + (c + 2u) * p.w.d); }
            if (c + 3u < p.cols) { v.w = load_w(start + (c + 3u) * p.w.d); }
        }
        ws[row * 9u + quad] = v;
    }
}

// add is acc + x·v; with SKIP it is acc where x is 0.
fn add(x: f32, v: vec4<f32>, acc: vec4<f32>) -> vec4<f32> {
    let sum = fma(vec4<f32>(x), v, acc);
    if (SKIP == 1u) {
        return select(sum, acc, (bitcast<u32>(x) & 0x7fffffffu) == 0u);
    }
    return sum;
}

@compute @workgroup_size(8, 8)
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
    let c0 = (id % p.col_tiles) * 32u;
    let r0 = ((id / p.col_tiles) % p.row_tiles) * 32u;
    let bh = id / p.col_tiles / p.row_tiles;
    let h = bh % p.heads;
    let b = bh / p.heads;
    let wh = (p.head0 + h) / p.group - p.head0 / p.group;
    let a_at = p.a.base + b * p.a.b + h * p.a.h;
    let w_at = p.w.base + b * p.w.b + wh * p.w.h;

    var s: array<vec4<f32>, 4>;
    for (var r = 0u; r < 4u; r++) {
        s[r] = vec4<f32>(0.0);
    }
    let state_at = (id * 64u + t) * 16u;
    if ((p.flags & 1u) != 0u) {
        for (var r = 0u; r < 4u; r++) {
            let at = state_at + 4u * r;
            s[r] = vec4<f32>(state[at], state[at + 1u], state[at + 2u], state[at + 3u]);
        }
    }
    for (var x0 = 0u; x0 < p.depth; x0 += 32u) {
        workgroupBarrier();
        stage_a(t, a_at, r0, x0);
        stage_w(t, w_at, c0, x0);
        workgroupBarrier();
        for (var x = 0u; x < 8u; x++) {
            let b0 = ws[(4u * x) * 9u + tx];
            let b1 = ws[(4u * x + 1u) * 9u + tx];
            let b2 = ws[(4u * x + 2u) * 9u + tx];
            let b3 = ws[(4u * x + 3u) * 9u + tx];
            for (var r = 0u; r < 4u; r++) {
                let v = as_[(4u * ty + r) * 9u + x];
                s[r] = add(v.w, b3, add(v.z, b2, add(v.y, b1, add(v.x, b0, s[r]))));
            }
        }
    }
    if ((p.flags & 2u) != 0u) {
        for (var r = 0u; r < 4u; r++) {
            let at = state_at + 4u * r;
            state[at] = s[r].x;
            state[at + 1u] = s[r].y;
            state[at + 2u] = s[r].z;
            state[at + 3u] = s[r].w;
        }
        return;
    }
    // The results go through workgroup memory, so that neighbouring threads write
    // neighbouring columns.
    workgroupBarrier();
    for (var r = 0u; r < 4u; r++) {
        as_[(4u * ty + r) * 9u + tx] = s[r];
    }
    workgroupBarrier();
    for (var x = t; x < 1024u; x += 64u) {
        let row = r0 + x / 32u;
        let c = c0 + x % 32u;
        if (row < p.rows && c < p.cols) {
            var v = as_[x / 32u * 9u + (x % 32u) / 4u][x % 4u];
            if (p.bias_type != 0u) {
                v = v + load_bias(p.bias_base + c * p.bias_stride);
            }
            put(p.y.base + b * p.y.b + h * p.y.h + row * p.y.s + c * p.y.d, v);
        }
    }
}
