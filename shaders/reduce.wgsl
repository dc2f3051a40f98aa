// Adds sums of dS, the gradients of scores, to the gradient of an operand that is broadcast, without atomics:
// each element of the gradient has one thread, or one workgroup, which sums in a fixed order. The gradients of
// a box of one head are [row][key] in s.
//
//     PAIRS       o[i, j] += dS[i, j]
//     KEYS        o[j] += Σ_i dS[i, j]
//     ROWS        o[i] += Σ_j dS[i, j], or -Σ_j |i + offset - j|·dS[i, j] when sloped
//     DIAGONALS   o[j - i] += Σ dS[i, j] of one diagonal
//     TOTALS      o[b, h] += Σ s[b', h', i] over the batches and heads that are summed
//     ZEROS       o[b, h, i, j] = 0
//
// A workgroup of ROWS or TOTALS computes one element: a thread sums every 64th term, and the sums of the
// threads are added in order. A thread of the others computes an element.
//
// Workgroup memory: part 256 bytes.

@ranged struct ReduceParams {
    kind: u32,
    all: u32, // elements of o in the box
    batches: u32, // TOTALS: that are summed; ZEROS: of the box
    heads: u32, // the same
    rows, keys: u32,
    pitch: u32, // elements from a row of s to the next
    base: u32, // the first element of s
    sloped: u32, // 1: each term has the factor -|away + row - key|
    away: i32,
    s_batch: u32, // TOTALS: elements from a batch of s to the next
    s_head: u32,
    o_heads: u32, // TOTALS: heads of o
    chained: u32, // 1: sums go on from o, so that cuts of the rows change no bit
    o: Strides,
}

const PAIRS: u32 = 0u;
const KEYS: u32 = 1u;
const ROWS: u32 = 2u;
const DIAGONALS: u32 = 3u;
const TOTALS: u32 = 4u;
const ZEROS: u32 = 5u;

@binding var<storage, read> s: array<f32>;
@binding var<storage, read_write> o: array<f32>;
@binding var<uniform> p: ReduceParams;

var<workgroup> part: array<f32, 64>;

@main(64) {
    var sum = 0.0;
    if (p.kind == ROWS || p.kind == TOTALS) {
        var at = p.o.base + id * p.o.s;
        if (p.kind == ROWS) {
            for (var j = t; j < p.keys; j += 64u) {
                let x = s[p.base + id * p.pitch + j];
                var factor = 1.0;
                if (p.sloped == 1u) { factor = -f32(abs(p.away + i32(id) - i32(j))); }
                sum = fma(x, factor, sum);
            }
        } else {
            let head = id % p.o_heads;
            let batch = id / p.o_heads;
            at = p.o.base + batch * p.o.b + head * p.o.h;
            // One of the factors of batch and batches - 1 is 0, and so for heads.
            let from_at = p.base + batch * p.s_batch + head * p.s_head;
            for (var n = t; n < p.batches * p.heads * p.rows; n += 64u) {
                let h = (n / p.rows) % p.heads;
                sum = sum + s[from_at + n / p.rows / p.heads * p.s_batch + h * p.s_head + n % p.rows];
            }
        }
        part[t] = sum;
        workgroupBarrier();
        if (t == 0u) {
            var all = 0.0;
            for (var x = 0u; x < 64u; x++) { all = all + part[x]; }
            o[at] = o[at] + all;
        }
        return;
    }
    let n = id * 64u + t;
    if (n >= p.all) { return; }
    if (p.kind == ZEROS) {
        let i = (n / p.keys) % p.rows;
        let h = (n / p.keys / p.rows) % p.heads;
        let b = n / p.keys / p.rows / p.heads;
        o[p.o.base + b * p.o.b + h * p.o.h + i * p.o.s + n % p.keys * p.o.d] = 0.0;
        return;
    }
    // The element has key j + i of rows i from from_row on.
    var at = p.o.base;
    var j = i32(n);
    var from_row = 0;
    var to_row = i32(p.rows);
    var step = 0;
    if (p.kind == PAIRS) {
        j = i32(n % p.keys);
        from_row = i32(n / p.keys);
        to_row = from_row + 1;
        at = at + u32(from_row) * p.o.s;
    } else if (p.kind == DIAGONALS) {
        j = i32(n) - i32(p.rows) + 1;
        step = 1;
        from_row = max(0, -j);
        to_row = min(i32(p.rows), i32(p.keys) - j);
    }
    at = at + u32(j) * p.o.d;
    let before = o[at];
    if (p.chained == 1u) { sum = before; }
    for (var i = from_row; i < to_row; i++) {
        sum = sum + s[p.base + u32(i) * p.pitch + u32(j + i * step)];
    }
    if (p.chained == 0u) { sum = sum + before; }
    o[at] = sum;
}
