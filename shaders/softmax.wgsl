// The softmax stage, in place. A workgroup computes one row of scores:
//
//     s_j = scale · s_j        s_j = cap · tanh(s_j / cap)        s_j = s_j + bias_j - slope·|i - j|
//     w_j = exp(s_j - max s) / Σ exp(s - max s)     over the keys that the row sees
//
// A sink adds to the sum only, and dropout affects the stored weights only. There are two phases, in which
// thread t takes every 64th key, four at a time:
//
//     SUMS      read the scores: each thread's maximum, and the sum of its weights
//               relative to that maximum (Milakov & Gimelshein 2018)
//     WEIGHTS   write w, 0 where hidden, and the row's log-sum-exp
//
// With neither flag the kernel writes the scores, -Inf where hidden.
//
// A row of up to ROW keys stays in workgroup memory between the phases (HELD = 1): each score is read once and
// written once. Longer rows are read again and their scores computed again, by the same operations and hence to
// the same bits.
//
// A row longer than a binding comes in chunks along the keys (LEAVE): all of them for the first phase, then all
// for the second, with each thread's maximum and sum kept in state. Chunks begin at multiples of 256, so that
// cutting the row changes no bit.
//
// Workgroup memory: 4·ROW + 256 bytes.

// The bits of a hidden score: a NaN that no arithmetic produces. Any number and -Inf can be visible scores.
const UNSEEN: u32 = 0xffc5a3d1u;

@binding var<storage, read> mask, bias: array<u32>;
@binding var<storage, read_write> s: array<u32>;
@binding var<storage, read_write> lse, state: array<f32>;
@binding var<uniform> p: AttentionParams;

var<workgroup> part: array<f32, 64>; // maxima, then sums
var<workgroup> row: array<u32, ROW>; // scores

struct Row {
    b, h, i: u32,
    s: u32, // where its scores begin
    start: i32, // it sees keys from start
    to: i32, // up to this one, by position
}

struct Scores {
    x: vec4<f32>,
    seen: vec4<bool>,
}

// scores returns the scores of keys j, j + 64, j + 128 and j + 192 of the chunk.
fn scores(r: Row, j: u32) -> Scores {
    var w: Scores;
    @unroll for (var c = 0u; c < 4u; c++) {
        let n = j + 64u * c;
        let key = i32(p.key0 + n);
        w.seen[c] = n < p.keys && key >= r.start && key < r.to;
        w.x[c] = 0.0;
        if (w.seen[c]) { w.x[c] = bitcast<f32>(s[r.s + n * p.s.d]); }
    }
    let options = added(w.seen, r.b, r.h, r.i, j, 64u, (p.flags & (HAS_BIAS | HAS_SLOPES)) != 0u);
    w.seen = options.seen;
    var factor = p.scale;
    @if(MOD == 1u) {
        w.x = modified(w.x * p.scale, r.b, r.h, vec4<u32>(r.i), vec4<u32>(j) + vec4<u32>(0u, 64u, 128u, 192u));
        w.seen = w.seen & !mod_hides(w.x);
        factor = 1.0;
    }
    if ((p.flags & HAS_SOFTCAP) != 0u) {
        w.x = capped(w.x);
        factor = p.softcap;
    }
    w.x = fma(w.x, vec4<f32>(factor), options.y);
    return w;
}

@main(64) {
    @inline row_of_id(i);
    let scores_at = p.s.base + b * p.s.b + h * p.s.h + i * p.s.s;
    let at = i32(p.row0 + i) + offset_of(b);
    let r = Row(b, h, i, scores_at, at + p.lo, key_end(b, u32(max(at + p.hi, 0))));
    if ((p.flags & (SUMS | WEIGHTS)) == 0u) {
        for (var j = t; j < p.keys; j += 256u) {
            let w = scores(r, j);
            let x = select(vec4<u32>(MINUS_INF), bitcast<vec4<u32>>(w.x), w.seen);
            @unroll for (var c = 0u; c < 4u; c++) {
                if (j + 64u * c < p.keys) { s[r.s + (j + 64u * c) * p.s.d] = x[c]; }
            }
        }
        return;
    }
    let state_at = id * 128u;
    let keep = (p.flags & LEAVE) != 0u;

    var m = LOWEST;
    var l = 0.0;
    if (keep && ((p.flags & SUMS) == 0u || p.key0 != 0u)) {
        m = state[state_at + t];
        l = state[state_at + 64u + t];
    }
    if ((p.flags & SUMS) != 0u) {
        for (var j = t; j < p.keys; j += 256u) {
            let w = scores(r, j);
            @if(HELD == 1u) {
                let held = select(vec4<u32>(UNSEEN), bitcast<vec4<u32>>(w.x), w.seen);
                @unroll for (var c = 0u; c < 4u; c++) { row[j + 64u * c] = held[c]; }
            }
            let most = select(vec4<f32>(LOWEST), w.x, w.seen);
            let top = max(max(m, max(most.x, most.y)), max(most.z, most.w));
            let e = select(vec4<f32>(0.0), exp2_acc((w.x - vec4<f32>(top)) * LOG2E), w.seen);
            l = fma(l, exp2_acc(vec4<f32>((m - top) * LOG2E)).x, ((e.x + e.y) + e.z) + e.w);
            m = top;
        }
        if (keep) {
            state[state_at + t] = m;
            state[state_at + 64u + t] = l;
        }
    }
    if ((p.flags & WEIGHTS) == 0u) { return; }

    // The row's maximum, in any order, and its sum, in a fixed order.
    part[t] = m;
    workgroupBarrier();
    var top = LOWEST;
    for (var x = 0u; x < 64u; x++) { top = max(top, part[x]); }
    let sink = p.sinks[h / 4u][h % 4u];
    let sinks = (p.flags & HAS_SINKS) != 0u && bitcast<u32>(sink) != MINUS_INF;
    if (sinks) { top = max(top, sink); }
    workgroupBarrier();
    part[t] = l * exp2_acc(vec4<f32>((m - top) * LOG2E)).x;
    workgroupBarrier();
    var sum = 0.0;
    for (var x = 0u; x < 64u; x++) { sum = sum + part[x]; }
    if (sinks) { sum = sum + exp2_acc(vec4<f32>((sink - top) * LOG2E)).x; }
    let empty = bitcast<u32>(sum) == 0u;
    let divisor = select(sum, 1.0, empty);
    let inverse = 1.0 / divisor;
    for (var j = t; j < p.keys; j += 256u) {
        var w: Scores;
        @if(HELD == 1u) {
            @unroll for (var c = 0u; c < 4u; c++) {
                let held = row[j + 64u * c];
                w.x[c] = bitcast<f32>(held);
                w.seen[c] = held != UNSEEN;
            }
        } @else {
            w = scores(r, j);
        }
        let e = exp2_acc((w.x - vec4<f32>(top)) * LOG2E) * inverse;
        var weight = select(vec4<f32>(0.0), e, w.seen & vec4<bool>(!empty));
        if ((p.flags & HAS_DROPOUT) != 0u) {
            // A dropped weight is 0, or stays NaN.
            let none = select(vec4<f32>(0.0), weight, is_nan(weight));
            @unroll for (var c = 0u; c < 4u; c++) {
                if (dropped(b, h, i, j + 64u * c)) { weight[c] = none[c]; }
            }
            weight = weight * p.keep;
        }
        @unroll for (var c = 0u; c < 4u; c++) {
            if (j + 64u * c < p.keys) { s[r.s + (j + 64u * c) * p.s.d] = bitcast<u32>(weight[c]); }
        }
    }
    if (t == 0u && (p.flags & WANT_LSE) != 0u) {
        let value = top + log_acc(select(sum, 1.0, empty));
        lse[p.lse.base + b * p.lse.b + h * p.lse.h + i * p.lse.s] =
            select(value, negative_infinity(), empty);
    }
}
