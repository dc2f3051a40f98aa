// The keys with the largest index scores, from the products x_h = q_h·k of a block of keys, a row a workgroup:
//
//     I = Σ_h w_h·max(0, x_h)
//
// A score becomes a code, an integer that grows with it: 0 for hidden keys and -Inf for NaN. The candidates are those of past,
// the best of earlier blocks, and then the keys of the block, which replace the products of head 0 by their codes. The least
// code that is chosen is found digit by digit, of 4 bits, from a histogram of the candidates that share the digits before it.
// Each thread then writes what is chosen of its stretch of candidates, in their order: of equal codes the first ones.
//
// o and past have the codes of a row in head 0, and its keys in head 1. Key -1 is none, whose code is 0.
//
// Workgroup memory: counts 4096, sums 64, above and equal 256 bytes each.

@ranged struct IndexParams {
    heads: u32,
    keys: u32, // of the block
    key0: u32, // the first of them
    top: u32, // keys to choose
    held: u32, // candidates of past: top or 0
    w_type: u32, // type of w: 0 f32, 1 f16, 2 bf16
    row0: u32, // index of row 0
    lo: i32, // row i sees keys from i + lo on
    hi: i32, // and below i + hi
    limit: u32, // and below limit
    x, w, past, o: Strides,
}

@binding var<storage, read_write> x: array<u32>;
@binding var<storage, read> w, past: array<u32>;
@binding var<storage, read_write> o: array<u32>;
@binding var<uniform> p: IndexParams;

// Counts of each digit, and for it of each thread: with atomic counts in workgroup memory the pure Go provider wrote no keys.
var<workgroup> counts: array<u32, 1024>;
var<workgroup> sums: array<u32, 16>; // of each digit
var<workgroup> above, equal: array<u32, 64>; // chosen codes of a thread that exceed the least one, and those that equal it

// code returns the code of a score.
fn code(score: f32) -> u32 {
    var bits = bitcast<u32>(score);
    if ((bits & 0x7fffffffu) > 0x7f800000u) { bits = MINUS_INF; }
    if (bits == 0x80000000u) { bits = 0u; } // -0
    return select(bits | 0x80000000u, ~bits, (bits >> 31u) == 1u);
}

// candidate returns the code of candidate n of a row.
fn candidate(row: u32, n: u32) -> u32 {
    var r = 0u;
    if (n < p.held) {
        r = past[p.past.base + row * p.past.s + n * p.past.d];
    } else {
        r = x[p.x.base + row * p.x.s + (n - p.held) * p.x.d];
    }
    return r;
}

@main(64) {
    let begin = i32(p.row0 + id) + p.lo;
    let end = min(i32(p.row0 + id) + p.hi, i32(p.limit));
    for (var j = t; j < p.keys; j += 64u) {
        let at = p.x.base + id * p.x.s + j * p.x.d;
        let key = i32(p.key0 + j);
        var sum = 0.0;
        for (var h = 0u; h < p.heads; h++) {
            let y = bitcast<f32>(x[at + h * p.x.h]);
            let negative = bitcast<u32>(y) - 0x80000000u <= 0x7f800000u; // and no NaN, which max may lose
            sum = fma(load_w(p.w.base + id * p.w.s + h * p.w.d), select(y, 0.0, negative), sum);
        }
        x[at] = select(0u, code(sum), key >= begin && key < end);
    }
    storageBarrier();
    workgroupBarrier();

    let all = p.held + p.keys;
    var least = 0u; // its digits so far
    var wanted = p.top; // of the candidates with these digits
    for (var turn = 0u; turn < 8u; turn++) {
        let shift = 28u - 4u * turn;
        for (var d = 0u; d < 16u; d++) { counts[64u * d + t] = 0u; }
        for (var n = t; n < all; n += 64u) {
            let c = candidate(id, n) >> shift;
            if ((c >> 4u) == least) {
                let at = 64u * (c & 15u) + t;
                counts[at] = counts[at] + 1u;
            }
        }
        workgroupBarrier();
        if (t < 16u) {
            var sum = 0u;
            for (var n = 0u; n < 64u; n++) { sum += counts[64u * t + n]; }
            sums[t] = sum;
        }
        workgroupBarrier();
        var digit = 15u;
        while (digit > 0u && sums[digit] < wanted) {
            wanted -= sums[digit];
            digit -= 1u;
        }
        least = (least << 4u) | digit;
    }

    let each = (all + 63u) / 64u;
    let from_n = min(t * each, all);
    let to_n = min(from_n + each, all);
    var more = 0u;
    var same = 0u;
    for (var n = from_n; n < to_n; n++) {
        let c = candidate(id, n);
        if (c > least) {
            more += 1u;
        } else if (c == least && c > 0u) {
            same += 1u;
        }
    }
    above[t] = more;
    equal[t] = same;
    workgroupBarrier();
    more = 0u;
    same = 0u;
    for (var n = 0u; n < t; n++) {
        more += above[n];
        same += equal[n];
    }
    let o_at = p.o.base + id * p.o.s;
    for (var n = from_n; n < to_n; n++) {
        let c = candidate(id, n);
        let tie = c == least && c > 0u;
        if (c > least || (tie && same < wanted)) {
            let at = o_at + (more + min(same, wanted)) * p.o.d;
            o[at] = c;
            var key = p.key0 + n - p.held;
            if (n < p.held) { key = past[p.past.base + id * p.past.s + n * p.past.d + p.past.h]; }
            o[at + p.o.h] = key;
        }
        if (c > least) {
            more += 1u;
        } else if (tie) {
            same += 1u;
        }
    }
    if (t == 63u) { // which has counted all
        for (var n = more + min(same, wanted); n < p.top; n++) {
            o[o_at + n * p.o.d] = 0u;
            o[o_at + n * p.o.d + p.o.h] = 0xffffffffu;
        }
    }
}
