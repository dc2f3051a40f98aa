// Gradients on matrix units: dV and dK, or dQ, of gradient.wgsl with its options, where q, k, v and dO are f16, or all
// bf16. A subgroup takes products as matrices of f16 that add up in f32.
//
// OF chooses the results. A workgroup has TY subgroups, which own M keys (dV and dK) or rows (dQ) each, and goes through
// the others, OTHERS rows or keys at once, which lie in workgroup memory, padded with zeros. What is owned is in registers:
//
//     S = own1·other1ᵀ      dP = own2·other2ᵀ     own1, other1: k and q, or q and k     own2, other2: v and dO, or dO and v
//     acc1 += dX·other1     acc2 += P·other2      acc1: dK, or dQ                       acc2: dV
//
// Scores and dP pass through workgroup memory as f32, with four keys of a row next to each other. Lanes make P and dX of
// them, which come back as f16. So that f16 holds them, P has a factor of 2^15, and dX one for what each row of acc1 is for:
// 2^(7 - top), where top is the exponent of the largest dX so far or less, by at most 7. Only where it rises by more, acc1
// passes through workgroup memory to be rescaled.
//
// An other with a NaN or an infinity is 0 in matrices, and NaN in the P and dX of pairs that see it.
//
// Elements of bf16 become f16 by powers of two, which is exact for SPAN exponents: 2^7 for q, k and v, and for dO one that brings
// the largest element of the tile, or of a row that is owned, to [2^15, 2^16), unless it is 2^16 or more, or below 2^-56. acc2
// takes the power of each tile. Other elements are odd, and 0 in the matrix. What a row or key with an odd element has in common
// with others, lanes compute in f32 from q, k, v and dO, and add to sums of their own: an element in some 20 million of a
// normal distribution is odd.
//
// State has what that of gradient.wgsl has, and top in the last vec4 of each row of dK or dQ. What is left for the next part of a cut
// call keeps its factors. For bf16 sums of lanes follow, which the last part adds to the results, and the first row of a
// subgroup has two more numbers: whether there are any, and the exponent of acc2.
//
// Workgroup memory: 8·OTHERS·(XS + YS) + TY·AREA·(32 + 8·(1 + KEYS)) + 4·TY·M + 8·TILE_ROWS + 20 bytes, and 8 + 4·TY for bf16.

const Q2: u32 = VEC; // 1: q is bound as fours of f16
const KV2: u32 = VEC; // the same for k and v
const G2: u32 = VEC; // the same for dO
const KEYS: u32 = 1u - min(OF, 1u); // 1: the workgroup owns keys
const THREADS: u32 = TY * LANES;
const OWNED: u32 = TY * M;
const TILE_ROWS: u32 = OWNED + (OTHERS - OWNED) * KEYS;
const TILE_KEYS: u32 = OWNED + OTHERS - TILE_ROWS;
const ITEMS: u32 = OTHERS * M / (4u * LANES); // fours of pairs of a lane
const ALONG: u32 = (M / 4u - LANES / M) * KEYS + LANES / M; // lanes next to each other have fours of one row
const LEAST: u32 = 30u; // of top: dX below 2^-97 have no part in it
const SN: u32 = OTHERS / N; // matrices of scores along the others
const PI: u32 = OTHERS / K; // of weights along the others
const XI: u32 = DEPTH / K; // of q and k along the depth
const YI: u32 = COLUMNS / K; // of v and dO along the columns
const XN: u32 = DEPTH / N; // of dK or dQ
const YN: u32 = COLUMNS / N; // of dV
// Exponents of bf16: of the largest numbers in matrices, of the elements of q, k and v that come to these, and the least for
// those of dO. The factors of dO of two tiles differ by at most 2^71, with which dV neither overflows nor vanishes.
const TOP: u32 = 142u;
const X_TOP: u32 = 135u;
const G_LEAST: u32 = 71u;
const SPAN: u32 = 33u; // exponents that are not odd
const APART: u32 = 1u + KEYS; // results in the state before those of lanes
const UP: u32 = (TOP - X_TOP) * (IN - 1u); // of the factor of q, k and v
// Lengths of rows in fours. Strides of matrices are multiples of 16 bytes, and 16 bytes more put rows on different banks.
const XS: u32 = DEPTH / 4u + 2u;
const YS: u32 = COLUMNS / 4u + 2u;
const SS: u32 = OTHERS / 4u + 2u;
const PS: u32 = (M / 4u + 2u) * KEYS + SS * (1u - KEYS); // of scores, dP and weights
const AREA: u32 = (OTHERS * KEYS + M * (1u - KEYS)) * PS;

@each($x: q, k, v, g)
@if(VEC == 1u) @binding var<storage, read> $x: array<vec2<u32>>;
@else @binding var<storage, read> $x: array<vec4<u32>>;
@binding var<storage, read> rows: array<f32>;
@binding var<storage, read> mask, bias: array<u32>;
@binding var<storage, read_write> state: array<vec4<f32>>;
@binding var<uniform> p: AttentionParams;

var<workgroup> tile_x: array<vec2<u32>, OTHERS * XS>; // [other][depth/4] of q or k
var<workgroup> tile_y: array<vec2<u32>, OTHERS * YS>; // [other][column/4] of dO or v
var<workgroup> scores: array<array<vec4<f32>, 2u * AREA>, TY>; // [subgroup][S, dP][row][key/4], and columns of results
var<workgroup> weights: array<array<vec2<u32>, (1u + KEYS) * AREA>, TY>; // [subgroup][dX, P][row][key/4]
var<workgroup> factors: array<f32, OWNED>; // of what is owned
var<workgroup> info: array<vec2<f32>, TILE_ROWS>; // LSE in units of log 2, and D, of the rows of the tile
var<workgroup> dead: atomic<u32>; // the last tile with a row whose LSE is -Inf
// In turns: bits of others with a NaN or an infinity, and whether acc1 is to be rescaled.
var<workgroup> special, grown: array<atomic<u32>, 2>;
@if(IN == 2u) var<workgroup> odd_others: array<atomic<u32>, 2>; // in turns, bits of others with odd elements
@if(IN == 2u) var<workgroup> odd_own: array<atomic<u32>, TY>; // the same for what each subgroup owns
@if(IN == 2u) var<private> s_at: u32; // where the rows of a head begin in rows

// top_of returns the exponent that comes to TOP for row i of dO.
@if(IN == 2u) fn top_of(i: u32) -> u32 {
    return clamp(bitcast<u32>(rows[s_at + min(i, p.rows - 1u) * p.s.s + 2u * p.s.d]) >> 23u, G_LEAST, TOP);
}

// stage puts $COUNT rows of $x, from $first on, into $tile. Those of others are finite. Exponents of bf16 up to $top are not odd.
@inline fn stage($x, $COUNT, $first, $size, $tile, $STRIDE, $OTHER, $top) {
    for (var n = t; n < $COUNT * ($STRIDE - 2u); n += THREADS) {
        let line = n / ($STRIDE - 2u);
        let four = four_$x(row_$x($x_at, $first + line), 4u * (n % ($STRIDE - 2u)), $size);
        @if(IN == 2u) var bits = halves_of(lifted(value_$x(four), $top));
        @else @if(VEC == 1u) var bits = four.xy;
        @else var bits = halves_of(value_$x(four));
        @if($OTHER == 1u) if (!finite(value_$x(four))) {
            atomicOr(&special[tiles % 2u], 1u << line);
            bits = vec2<u32>(0u);
        }
        @if(IN == 2u) if (any(is_odd(value_$x(four), $top))) {
            @if($OTHER == 1u) atomicOr(&odd_others[tiles % 2u], 1u << line);
            @else atomicOr(&odd_own[c], 1u << line);
        }
        $tile[line * $STRIDE + n % ($STRIDE - 2u)] = bits;
    }
}

@inline fn stage_two($x, $y, $COUNT, $first, $OTHER, $top) {
    @inline stage($x, $COUNT, $first, p.dim, tile_x, XS, $OTHER, X_TOP);
    @inline stage($y, $COUNT, $first, p.vdim, tile_y, YS, $OTHER, $top);
}

// stage_own loads what each subgroup owns.
@inline fn stage_own($x, $y, $top) {
    for (var c = 0u; c < TY; c++) {
        workgroupBarrier();
        @inline stage_two($x, $y, M, own + c * M, 0u, $top);
        workgroupBarrier();
        if (c == subgroup) {
            @unroll(deep) for (var i = 0u; i < XI; i++) { own1[i] = subgroupMatrixLoad<Left, row_major>(&tile_x, i * (K / 4u), XS); }
            @unroll(deep) for (var i = 0u; i < YI; i++) { own2[i] = subgroupMatrixLoad<Left, row_major>(&tile_y, i * (K / 4u), YS); }
        }
    }
}

// products stores the products of what is owned and the others of the tile.
@inline fn products($own, $COUNT, $tile, $STRIDE, $at) {
    @unroll for (var n = 0u; n < SN; n++) {
        var s = Result();
        @unroll(deep) for (var i = 0u; i < $COUNT; i++) {
            s = subgroupMatrixMultiplyAccumulate($own[i], subgroupMatrixLoad<Right, col_major>(&$tile, n * N * $STRIDE + i * (K / 4u), $STRIDE), s);
        }
        @if(KEYS == 1u) subgroupMatrixStore<col_major>(&scores[subgroup], $at + n * N * PS, s, PS);
        @else subgroupMatrixStore<row_major>(&scores[subgroup], $at + n * (N / 4u), s, PS);
    }
}

// sums adds the products of weights and others.
@inline fn sums($acc, $COUNT, $tile, $STRIDE, $at) {
    @unroll for (var i = 0u; i < PI; i++) {
        @if(KEYS == 1u) let w = subgroupMatrixLoad<Left, col_major>(&weights[subgroup], $at + i * K * PS, PS);
        @else let w = subgroupMatrixLoad<Left, row_major>(&weights[subgroup], $at + i * (K / 4u), PS);
        @unroll(deep) for (var n = 0u; n < $COUNT; n++) {
            $acc[n] = subgroupMatrixMultiplyAccumulate(w, subgroupMatrixLoad<Right, row_major>(&$tile, i * K * $STRIDE + n * (N / 4u), $STRIDE), $acc[n]);
        }
    }
}

// apart_bits returns a bit for each pair of a row of scores and four keys from n on that lanes multiply.
@if(IN == 2u) fn apart_bits(own_odd: u32, others_odd: u32, line: u32, n: u32) -> u32 {
    @if(KEYS == 1u) return select(own_odd >> n, 15u, ((others_odd >> line) & 1u) != 0u) & 15u;
    @else return select(others_odd >> n, 15u, ((own_odd >> line) & 1u) != 0u) & 15u;
}

// product sets $to to the products of a row of $q and four keys of $k, where lanes multiply them.
@inline fn product($to, $q, $k, $WIDTH, $dim) {
    let i = row_$q($q_at, r0 + row);
    var sum = vec4<f32>(0.0);
    for (var d = 0u; d < $WIDTH; d += 4u) {
        let y = value_$q(four_$q(i, d, p.$dim));
        @unroll for (var c = 0u; c < 4u; c++) { sum[c] = dot4(y, value_$k(four_$k(row_$k($k_at, j + c), d, p.$dim)), sum[c]); }
    }
    $to = select($to, sum, apart);
}

// apart_sums adds to a result what lanes multiply: weights, from scores[$at] on, and rows of $x.
@inline fn apart_sums($x, $COUNT, $dim, $RESULT, $at) {
    for (var c = 0u; c < ($COUNT + SN - 1u) / SN; c++) {
        for (var x = lane; x < M * OTHERS / 4u; x += LANES) {
            @inline place($RESULT);
            var rest = select(others_odd, 0xffffffffu >> (32u - OTHERS), ((own_odd >> (line % M)) & 1u) != 0u);
            if (held && (rest != 0u || !parted)) {
                var sum = vec4<f32>(0.0);
                if (parted) { sum = state[to + APART * result_size]; }
                for (; rest != 0u; rest &= rest - 1u) {
                    let n = firstTrailingBit(rest);
                    @if(KEYS == 1u) let w = scores[subgroup][$at + n * PS + line % M / 4u][line % 4u];
                    @else let w = scores[subgroup][$at + line % M * PS + n / 4u][n % 4u];
                    if (bitcast<u32>(w) != HIDDEN_BITS) { sum = add(w, value_$x(four_$x(row_$x($x_at, other0 + n), 4u * column, p.$dim)), sum); }
                }
                state[to + APART * result_size] = sum;
            }
        }
    }
}

// pairs makes weights of the lane's scores and dP: P, and dX of y, which it leaves with their places.
@inline fn pairs() {
    @unroll for (var n = 0u; n < ITEMS; n++) {
        let line = lane / ALONG + n * (LANES / ALONG) * KEYS;
        let key_four = lane % ALONG + n * ALONG * (1u - KEYS);
        let row = line + subgroup * M * (1u - KEYS);
        let j = j0 + 4u * key_four + subgroup * M * KEYS;
        let step = 1u;
        at_four[n] = line * PS + key_four;
        var x = scores[subgroup][at_four[n]];
        @if(IN == 1u) let u = scores[subgroup][AREA + at_four[n]];
        @else var u = scores[subgroup][AREA + at_four[n]] * power_of_two(127u + g_top - TOP - UP);
        @if(IN == 2u) x *= power_of_two(127u - 2u * UP);
        @if(IN == 2u) let bits = apart_bits(own_odd, others_odd, line, 4u * key_four);
        @if(IN == 2u) let apart = (vec4<u32>(bits) & vec4<u32>(1u, 2u, 4u, 8u)) != vec4<u32>(0u);
        @if(IN == 2u) if (bits != 0u) {
            { @inline product(x, q, k, DEPTH, dim); }
            { @inline product(u, g, v, COLUMNS, vdim); }
        }
        var dropped_keys = vec4<bool>(false);
        @if(PAIRED == 1u) if ((p.flags & HAS_DROPOUT) != 0u) {
            @unroll for (var c = 0u; c < 4u; c++) { dropped_keys[c] = dropped(batch, head, r0 + row, j + c); }
        }
        @inline derivatives();
        @if(KEYS == 1u) let marked = vec4<u32>(marks_of_tile >> line);
        @else let marked = vec4<u32>(marks_of_tile) >> (vec4<u32>(4u * key_four) + vec4<u32>(0u, 1u, 2u, 3u));
        let unknown = ((marked & vec4<u32>(1u)) != vec4<u32>(0u)) & !hidden;
        dx[n] = select(y, vec4<f32>(not_a_number()), unknown);
        @if(IN == 2u) if (bits != 0u) {
            scores[subgroup][at_four[n]] = dx[n];
            @if(KEYS == 1u) scores[subgroup][AREA + at_four[n]] = select(w, vec4<f32>(not_a_number()), unknown);
            dx[n] = select(dx[n], vec4<f32>(0.0), apart);
        }
        most = max(most, bitcast<vec4<u32>>(dx[n]) & vec4<u32>(0x7fffffffu));
        @if(KEYS == 1u) {
            w = select(e * 32768.0, vec4<f32>(not_a_number()), unknown);
            @if(IN == 2u) w = select(w, vec4<f32>(0.0), apart);
            weights[subgroup][AREA + at_four[n]] = halves_of(select(w, vec4<f32>(0.0), hidden | dropped_keys));
        }
    }
}

// find_top finds the exponent of dO that comes to TOP in the tile.
@inline fn find_top() {
    var largest = 0u;
    for (var x = lane; x < OTHERS; x += LANES) { largest = max(largest, top_of(r0 + x)); }
    g_top = subgroupMax(largest);
}

// sum_apart adds what lanes multiply, and gives acc2 the unit of the tile.
@inline fn sum_apart() {
    if ((own_odd | others_odd) != 0u) {
        @if(KEYS == 1u) {
            { @inline apart_sums(q, XN, dim, KEYS, 0u); }
            { @inline apart_sums(g, YN, vdim, 0u, AREA); }
        } @else { @inline apart_sums(k, XN, dim, 0u, 0u); }
        parted = true;
    }
    @if(KEYS == 1u) if (g_top != sum_top) {
        @unroll(deep) for (var n = 0u; n < YN; n++) { acc2[n] = subgroupMatrixScalarMultiply(acc2[n], power_of_two(127u + sum_top - g_top)); }
        sum_top = g_top;
    }
}

// scaled finds top, leaves the factors of acc1, and writes dX.
@inline fn scaled() {
    @if(KEYS == 1u) {
        for (var y = ALONG; y < LANES; y = 2u * y) { most = max(most, subgroupShuffleXor(most, y)); }
    } @else {
        for (var y = 1u; y < ALONG; y = 2u * y) { most = max(most, subgroupShuffleXor(most, y)); }
        most = vec4<u32>(max(max(most.x, most.y), max(most.z, most.w)));
    }
    let exponent = clamp(most >> vec4<u32>(23u), vec4<u32>(LEAST), vec4<u32>(254u));
    let grows = exponent > top + vec4<u32>(7u);
    let less = select(vec4<u32>(0u), exponent - top, grows);
    if (any(grows)) { atomicStore(&grown[tiles % 2u], 1u); }
    top = select(top, exponent, grows);
    let factor = bitcast<vec4<f32>>((vec4<u32>(127u) - min(less, vec4<u32>(127u))) << vec4<u32>(23u));
    @inline leave_factors(factor);
    let up = bitcast<vec4<f32>>((vec4<u32>(261u) - top) << vec4<u32>(23u));
    @unroll for (var n = 0u; n < ITEMS; n++) { weights[subgroup][at_four[n]] = halves_of(dx[n] * up); }
}

// leave_factors puts what each lane has for its keys, or its row, into factors.
@inline fn leave_factors($x) {
    @if(KEYS == 1u) {
        if (lane < ALONG) { @unroll for (var c = 0u; c < 4u; c++) { factors[subgroup * M + 4u * lane + c] = $x[c]; } }
    } @else if (lane % ALONG == 0u) { factors[subgroup * M + lane / ALONG] = $x.x; }
}

// rescale multiplies acc1 by factors.
@inline fn rescale() {
    for (var c = 0u; c < (XN + SN - 1u) / SN; c++) {
        @inline store_columns(acc1, XN);
        for (var x = lane; x < M * OTHERS / 4u; x += LANES) {
            let line = x / (OTHERS / 4u);
            scores[subgroup][line * SS + x % (OTHERS / 4u)] *= factors[subgroup * M + line];
        }
        @inline load_columns(acc1, XN);
    }
}

// done returns x, or 1 where sums are left for later.
fn done(x: f32) -> f32 { return select(x, 1.0, (p.flags & LEAVE) != 0u); }

// place declares where vec4 x of the columns of turn c is, at, and in state, to, if the result has it.
@inline fn place($RESULT) {
    let line = subgroup * M + x / (OTHERS / 4u);
    let column = c * (OTHERS / 4u) + x % (OTHERS / 4u);
    let at = line % M * SS + x % (OTHERS / 4u);
    let to = state_at + $RESULT * result_size + line * p.splits + column;
    let held = own + line < length && column < p.splits - 1u;
}

// write writes sums to state, with factors, or a factor, and read reads those of an earlier call.
@inline fn write($acc, $COUNT, $RESULT, $factor) {
    for (var c = 0u; c < ($COUNT + SN - 1u) / SN; c++) {
        @inline store_columns($acc, $COUNT);
        for (var x = lane; x < M * OTHERS / 4u; x += LANES) {
            @inline place($RESULT);
            if (held) { state[to] = unsigned_zeros(scores[subgroup][at]) * $factor; }
            @if(IN == 2u) if (held && parted && (p.flags & LEAVE) == 0u) { state[to] += state[to + APART * result_size]; }
        }
        workgroupBarrier();
    }
}

@inline fn read($acc, $COUNT, $RESULT) {
    for (var c = 0u; c < ($COUNT + SN - 1u) / SN; c++) {
        for (var x = lane; x < M * OTHERS / 4u; x += LANES) {
            @inline place($RESULT);
            scores[subgroup][at] = vec4<f32>(0.0);
            if (held) { scores[subgroup][at] = state[to]; }
        }
        @inline load_columns($acc, $COUNT);
    }
}

@main(THREADS) {
    let owner = id / p.parts % p.batch_heads;
    @inline owner_of_id();
    var first = begin;
    if (KEYS == 0u) { first = max(begin / others * others, i32(p.key0)); } // sums are those of whole tiles
    @inline what_is_paired();

    @each($x $s: q q, g o) var $x_at = p.$s.base + batch * p.$s.b + first_head * p.$s.h;
    var tiles = 0u; // that the workgroup has begun
    var own1: array<Left, XI>;
    var own2: array<Left, YI>;
    @if(IN == 2u) if (t < TY) { atomicStore(&odd_own[t], 0u); }
    @if(IN == 2u) s_at = p.s.base + batch * p.s.b + first_head * p.s.h;
    @if(KEYS == 1u) { @inline stage_own(k, v, X_TOP); }
    @else { @inline stage_own(q, g, top_of(own + c * M + line)); }
    @if(IN == 2u) let own_odd = atomicLoad(&odd_own[subgroup]);
    if (t == 0u) {
        atomicStore(&dead, 0u);
        @each($x: special, grown) atomicStore(&$x[1], 0u);
        @if(IN == 2u) atomicStore(&odd_others[1], 0u);
    }

    // The state has the rows of one result after those of the other.
    let result_size = p.batch_heads * length * p.splits;
    let state_at = (owner * length + own) * p.splits;
    var top = vec4<u32>(LEAST);
    var acc1: array<Result, XN>;
    @unroll(deep) for (var n = 0u; n < XN; n++) { acc1[n] = Result(); }
    @if(KEYS == 1u) var acc2: array<Result, YN>;
    @if(KEYS == 1u) @unroll(deep) for (var n = 0u; n < YN; n++) { acc2[n] = Result(); }
    @if(IN == 2u) var parted = false; // whether the state has sums of lanes
    @if(IN == 2u) @if(KEYS == 1u) var g_top = G_LEAST; // of dO of the tile
    @else let g_top = top_of(own + subgroup * M + lane / ALONG);
    @if(IN == 2u) var sum_top = G_LEAST; // of dO of acc2
    if ((p.flags & GO_ON) != 0u) {
        workgroupBarrier();
        for (var x = t; x < OWNED; x += THREADS) {
            factors[x] = state[state_at + KEYS * result_size + min(x, length - 1u - own) * p.splits + p.splits - 1u].x;
        }
        workgroupBarrier();
        @if(KEYS == 1u) {
            @unroll for (var c = 0u; c < 4u; c++) { top[c] = u32(factors[subgroup * M + 4u * (lane % ALONG) + c]); }
        } @else top = vec4<u32>(u32(factors[subgroup * M + lane / ALONG]));
        @inline read(acc1, XN, KEYS);
        @if(KEYS == 1u) { @inline read(acc2, YN, 0u); }
        @if(IN == 2u) if (own + subgroup * M < length) {
            let saved = state[state_at + KEYS * result_size + (subgroup * M + 1u) * p.splits - 1u];
            parted = saved.y != 0.0;
            sum_top = u32(saved.z);
        }
    }

    for (var at = first; at < end; at += others) {
        for (var member = 0u; member < members; member++) {
            @inline tile_of_member();
            if (look != 0u) {
                tiles += 1u;
                @each($x $s: q q, g o) $x_at = p.$s.base + batch * p.$s.b + head * p.$s.h;
                @if(IN == 2u) s_at = p.s.base + batch * p.s.b + head * p.s.h;
                workgroupBarrier();
                if (t == 0u) { @each($x: special, grown) atomicStore(&$x[(tiles + 1u) % 2u], 0u); }
                @if(IN == 2u) if (t == 0u) { atomicStore(&odd_others[(tiles + 1u) % 2u], 0u); }
                @inline stage_info();
                @if(IN == 2u) @if(KEYS == 1u) { @inline find_top(); }
                @if(KEYS == 1u) { @inline stage_two(q, g, OTHERS, r0, 1u, g_top); }
                @else { @inline stage_two(k, v, OTHERS, j0, 1u, X_TOP); }
                workgroupBarrier();
                @inline products(own1, XI, tile_x, XS, 0u);
                @inline products(own2, YI, tile_y, YS, AREA);
                workgroupBarrier();
                @inline check_of_tile();
                let marks_of_tile = atomicLoad(&special[tiles % 2u]);
                @if(IN == 2u) let others_odd = atomicLoad(&odd_others[tiles % 2u]);
                var dx: array<vec4<f32>, ITEMS>;
                var at_four: array<u32, ITEMS>;
                var most = vec4<u32>(0u);
                @inline pairs();
                @inline scaled();
                let rescales = workgroupUniformLoad(&grown[tiles % 2u]) != 0u;
                @if(IN == 2u) { @inline sum_apart(); }
                if (rescales) {
                    @if(IN == 2u) workgroupBarrier();
                    @inline rescale();
                }
                @inline sums(acc1, XN, tile_x, XS, 0u);
                @if(KEYS == 1u) { @inline sums(acc2, YN, tile_y, YS, AREA); }
            }
        }
    }
    workgroupBarrier();
    let tops = vec4<f32>(top);
    @inline leave_factors(tops);
    @if(IN == 1u) let y_factor = p.keep / 32768.0;
    @else let y_factor = p.keep * power_of_two(112u + sum_top - TOP);
    @inline write(acc1, XN, KEYS, done(power_of_two(u32(factors[line]) - 7u - UP)));
    @if(KEYS == 1u) { @inline write(acc2, YN, 0u, done(y_factor)); }
    for (var x = t; x < min(OWNED, length - own); x += THREADS) { state[state_at + KEYS * result_size + x * p.splits + p.splits - 1u].x = factors[x]; }
    @if(IN == 2u) if (lane == 0u && own + subgroup * M < length) {
        let to = state_at + KEYS * result_size + (subgroup * M + 1u) * p.splits - 1u;
        state[to].y = select(0.0, 1.0, parted);
        state[to].z = f32(sum_top);
    }
}
