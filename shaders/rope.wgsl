// Rotary position embedding (Su et al. 2021): pairs (a, b) of the elements of each
// row turn by angles that come as their cosines and sines, and the elements from
// 2·pairs on are taken as they are:
//
//     y_a = x_a·cos_i - x_b·sin_i    y_b = x_a·sin_i + x_b·cos_i
//
// Pair i is (i, i + pairs), or interleaved (2i, 2i+1). A unit is a pair, or one of
// the elements that do not turn; a thread takes 4 units, and threads that are
// neighbours take neighbours. In place there are pairs only.
//
// Workgroup memory: none.

// Rewritten for each variant:
const INPLACE: u32 = 0u; // 1: x is what y holds, and not bound

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
    heads: u32,
    rows: u32,
    pairs: u32,
    units: u32, // of a row
    all: u32, // units of the box
    interleaved: u32,
    in_type: u32, // type of x: 0 f32, 1 f16, 2 bf16
    out_type: u32, // type of y
    pad0: u32,
    pad1: u32,
    x: Strides,
    cosine: Strides,
    sine: Strides,
    y: Strides,
}

@group(0) @binding(0) var<storage, read> x: array<u32>;
@group(0) @binding(1) var<storage, read> cosine: array<f32>;
@group(0) @binding(2) var<storage, read> sine: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<atomic<u32>>;
@group(0) @binding(4) var<uniform> p: Params;

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

fn load_x(i: u32) -> f32 {
    let at = select(i >> 1u, i, p.in_type == 0u);
    if (INPLACE == 1u) {
        return decode(atomicLoad(&y[at]), i, p.in_type);
    }
    return decode(x[at], i, p.in_type);
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
    for (var k = 0u; k < 4u; k++) {
        let n = id * 256u + k * 64u + t;
        if (n >= p.all) {
            return;
        }
        let unit = n % p.units;
        let bhs = n / p.units;
        let row = bhs % p.rows;
        let h = (bhs / p.rows) % p.heads;
        let b = bhs / p.rows / p.heads;
        let x_at = p.x.base + b * p.x.b + h * p.x.h + row * p.x.s;
        let y_at = p.y.base + b * p.y.b + h * p.y.h + row * p.y.s;
        let turns = unit < p.pairs;
        // The first element, and of a pair the second.
        var i = unit + p.pairs;
        var j = i;
        if (turns) {
            i = select(unit, 2u * unit, p.interleaved == 1u);
            j = select(unit + p.pairs, 2u * unit + 1u, p.interleaved == 1u);
        }
        let u = load_x(x_at + i * p.x.d);
        if (!turns) {
            put(y_at + i * p.y.d, u);
            continue;
        }
        let v = load_x(x_at + j * p.x.d);
        let c = cosine[p.cosine.base + b * p.cosine.b + h * p.cosine.h + row * p.cosine.s + unit * p.cosine.d];
        let s = sine[p.sine.base + b * p.sine.b + h * p.sine.h + row * p.sine.s + unit * p.sine.d];
        put(y_at + i * p.y.d, u * c - v * s);
        put(y_at + j * p.y.d, u * s + v * c);
    }
}
