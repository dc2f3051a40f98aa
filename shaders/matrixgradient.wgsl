// Gradients on matrix units: dV and dK, or dQ, of gradient.wgsl with its options, where q, k, v and dO are f16. A subgroup
// takes products as matrices of f16 that add up in f32.
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
// State has what that of gradient.wgsl has, and top in the last vec4 of each row of dK or dQ. What is left for the next part of a cut
// call keeps its factors.
//
// Workgroup memory: 8·OTHERS·(XS + YS) + TY·AREA·(32 + 8·(1 + KEYS)) + 4·TY·M + 8·TILE_ROWS + 20 bytes.

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

// stage puts $COUNT rows of $x, from $first on, into $tile. Those of others are finite.
@inline fn stage($x, $COUNT, $first, $size, $tile, $STRIDE, $OTHER) {
    for (var n = t; n < $COUNT * ($STRIDE - 2u); n += THREADS) {
        let line = n / ($STRIDE - 2u);
        let four = four_$x(row_$x($x_at, $first + line), 4u * (n % ($STRIDE - 2u)), $size);
        @if(VEC == 1u) var bits = four.xy;
        @else var bits = halves_of(value_$x(four));
        @if($OTHER == 1u) if (!finite(value_$x(four))) {
            atomicOr(&special[tiles % 2u], 1u << line);
            bits = vec2<u32>(0u);
        }
        $tile[line * $STRIDE + n % ($STRIDE - 2u)] = bits;
    }
}

@inline fn stage_two($x, $y, $COUNT, $first, $OTHER) {
    @inline stage($x, $COUNT, $first, p.dim, tile_x, XS, $OTHER);
    @inline stage($y, $COUNT, $first, p.vdim, tile_y, YS, $OTHER);
}

// stage_own loads what each subgroup owns.
@inline fn stage_own($x, $y) {
    for (var c = 0u; c < TY; c++) {
        workgroupBarrier();
        @inline stage_two($x, $y, M, own + c * M, 0u);
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
        let u = scores[subgroup][AREA + at_four[n]];
        var dropped_keys = vec4<bool>(false);
        @if(PAIRED == 1u) if ((p.flags & HAS_DROPOUT) != 0u) {
            @unroll for (var c = 0u; c < 4u; c++) { dropped_keys[c] = dropped(batch, head, r0 + row, j + c); }
        }
        @inline derivatives();
        @if(KEYS == 1u) let marked = vec4<u32>(marks_of_tile >> line);
        @else let marked = vec4<u32>(marks_of_tile) >> (vec4<u32>(4u * key_four) + vec4<u32>(0u, 1u, 2u, 3u));
        let unknown = ((marked & vec4<u32>(1u)) != vec4<u32>(0u)) & !hidden;
        dx[n] = select(y, vec4<f32>(not_a_number()), unknown);
        most = max(most, bitcast<vec4<u32>>(dx[n]) & vec4<u32>(0x7fffffffu));
        @if(KEYS == 1u) {
            w = select(e * 32768.0, vec4<f32>(not_a_number()), unknown);
            weights[subgroup][AREA + at_four[n]] = halves_of(select(w, vec4<f32>(0.0), hidden | dropped_keys));
        }
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
    @if(KEYS == 1u) { @inline stage_own(k, v); }
    @else { @inline stage_own(q, g); }
    if (t == 0u) {
        atomicStore(&dead, 0u);
        @each($x: special, grown) atomicStore(&$x[1], 0u);
    }

    // The state has the rows of one result after those of the other.
    let result_size = p.batch_heads * length * p.splits;
    let state_at = (owner * length + own) * p.splits;
    var top = vec4<u32>(LEAST);
    var acc1: array<Result, XN>;
    @unroll(deep) for (var n = 0u; n < XN; n++) { acc1[n] = Result(); }
    @if(KEYS == 1u) var acc2: array<Result, YN>;
    @if(KEYS == 1u) @unroll(deep) for (var n = 0u; n < YN; n++) { acc2[n] = Result(); }
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
    }

    for (var at = first; at < end; at += others) {
        for (var member = 0u; member < members; member++) {
            @inline tile_of_member();
            if (look != 0u) {
                tiles += 1u;
                @each($x $s: q q, g o) $x_at = p.$s.base + batch * p.$s.b + head * p.$s.h;
                workgroupBarrier();
                if (t == 0u) { @each($x: special, grown) atomicStore(&$x[(tiles + 1u) % 2u], 0u); }
                @inline stage_info();
                @if(KEYS == 1u) { @inline stage_two(q, g, OTHERS, r0, 1u); }
                @else { @inline stage_two(k, v, OTHERS, j0, 1u); }
                workgroupBarrier();
                @inline products(own1, XI, tile_x, XS, 0u);
                @inline products(own2, YI, tile_y, YS, AREA);
                workgroupBarrier();
                @inline check_of_tile();
                let marks_of_tile = atomicLoad(&special[tiles % 2u]);
                var dx: array<vec4<f32>, ITEMS>;
                var at_four: array<u32, ITEMS>;
                var most = vec4<u32>(0u);
                @inline pairs();
                @inline scaled();
                if (workgroupUniformLoad(&grown[tiles % 2u]) != 0u) { @inline rescale(); }
                @inline sums(acc1, XN, tile_x, XS, 0u);
                @if(KEYS == 1u) { @inline sums(acc2, YN, tile_y, YS, AREA); }
            }
        }
    }
    workgroupBarrier();
    let tops = vec4<f32>(top);
    @inline leave_factors(tops);
    @inline write(acc1, XN, KEYS, done(power_of_two(u32(factors[line]) - 7u)));
    @if(KEYS == 1u) { @inline write(acc2, YN, 0u, done(p.keep / 32768.0)); }
    for (var x = t; x < min(OWNED, length - own); x += THREADS) { state[state_at + KEYS * result_size + x * p.splits + p.splits - 1u].x = factors[x]; }
}
