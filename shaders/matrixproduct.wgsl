// The products of matmul.wgsl for a and w of f16, on matrix units: products of two f16 are exact in float32, and so are
// those of matrices but for their sums.
//
//     o[b, h, i, n] = Σ_x a[b, h, i, x] · w[b, h/group, x, n] + bias[n]
//
// A workgroup has SY x SX subgroups with RM x CN matrices of sums each, and reads a and w in stages of DEPTH terms, padded
// with zeros, so that any strides and lengths become aligned matrices:
//
//                 x ──► DEPTH                 n ──► SX·CN·N
//               ┌────────────┐              ┌──────────────┐
//      i        │ a_tile[sy] │           x  │  w_tile[sx]  │
//   SY·RM·M     └────────────┘              └──────────────┘
//
// Matrix units may truncate sums, by up to 2^-23 of a sum for each product of matrices. Such errors have one sign and add
// up to more than those of rounding to nearest, which grow with the root of the number of terms. Therefore a sum of
// matrices has at most FOLD terms. Then it passes through workgroup memory to lanes, which add it to theirs.
//
// Each sum is that of a row and a column alone, in the same order for all tiles. Chunks along x are multiples of FOLD and
// continue from the lanes' sums that the chunk before left in state, which changes no bit.
//
// Workgroup memory: 8·SY·RM·M·AS + 8·SX·WR·WS + 16·SY·SX·M·OS bytes. Its arrays have vectors, in which offsets and strides of
// matrices are counted, and each subgroup its own ones, as in matrix.wgsl.

const A: u32 = 1u; // types of a and w: f16
const W: u32 = 1u;
const A2: u32 = AVEC; // 1: a is bound as fours of f16
const W2: u32 = WVEC; // the same for w
const FOLD: u32 = 256u;
const THREADS: u32 = SY * SX * LANES;
const ROWS: u32 = RM * M; // of a subgroup
const CQ: u32 = SX * CN * N / 4u; // fours of columns of a workgroup
const COLS: u32 = CN * N / 4u; // fours of columns of a subgroup
const QD: u32 = DEPTH / 4u;
const AN: u32 = SY * ROWS * QD / THREADS; // fours of a that a thread stages
const WN: u32 = CQ * DEPTH / THREADS; // the same for w
const FN: u32 = M * COLS / LANES; // fours of a row of matrices that a lane adds
// Lengths of rows, in fours. Strides of matrices are multiples of 16 bytes, and 16 bytes more put rows on different banks.
const AS: u32 = QD + 2u;
const WS: u32 = ALONG * QD + (1u - ALONG) * COLS + 2u;
const WR: u32 = ALONG * 4u * COLS + (1u - ALONG) * DEPTH; // rows of w_tile
const OS: u32 = COLS + 1u;

@each($x $TWO: a A2, w W2)
@if($TWO == 1u) @binding var<storage, read> $x: array<vec2<u32>>;
@else @binding var<storage, read> $x: array<vec4<u32>>;
@binding var<storage, read> bias: array<u32>;
@if(OVEC == 0u) @binding var<storage, read_write> o: Words;
@if(OVEC == 1u) @binding var<storage, read_write> o: array<vec4<f32>>;
@binding var<storage, read_write> state: array<vec4<f32>>;
@binding var<uniform> p: MatmulParams;

var<workgroup> a_tile: array<array<vec2<u32>, ROWS * AS>, SY>; // [sy][row][x/4]
var<workgroup> w_tile: array<array<vec2<u32>, WR * WS>, SX>; // [sx][x][n/4], or [sx][n][x/4] with ALONG
var<workgroup> results: array<array<vec4<f32>, M * OS>, SY * SX>; // [subgroup][row][n/4]

// half_$x returns the four elements that stored_$x returned, in f16.
@each($x $TWO: a A2, w W2)
fn half_$x(x: vec4<u32>) -> vec2<u32> {
    @if($TWO == 1u) return x.xy;
    @else return bitcast<vec2<u32>>(vec4<f16>(value_$x(x)));
}

// The parts of main.

// stage moves the next DEPTH terms of a and w to workgroup memory.
@inline fn stage() {
    var a_loaded: array<vec4<u32>, AN>;
    var w_loaded: array<vec4<u32>, WN>;
    @unroll for (var n = 0u; n < AN; n++) {
        let e = t + THREADS * n;
        a_loaded[n] = stored_a(a_at + min(r0 + e / QD, p.rows - 1u) * p.a.s, x0 + 4u * (e % QD), p.depth, p.a.d);
    }
    @inline load_w(w_loaded);
    workgroupBarrier();
    @unroll for (var n = 0u; n < AN; n++) {
        let e = t + THREADS * n;
        a_tile[e / QD / ROWS][e / QD % ROWS * AS + e % QD] = half_a(a_loaded[n]);
    }
    @unroll for (var n = 0u; n < WN; n++) {
        let e = t + THREADS * n;
        @if(ALONG == 0u) w_tile[e % CQ / COLS][e / CQ * WS + e % COLS] = half_w(w_loaded[n]);
        @else w_tile[e / QD / (4u * COLS)][e / QD % (4u * COLS) * WS + e % QD] = half_w(w_loaded[n]);
    }
    workgroupBarrier();
}

// products adds DEPTH terms to the matrices of sums.
@inline fn products() {
    @unroll for (var i = 0u; i < DEPTH / K; i++) {
        var x: array<Left, RM>;
        @unroll for (var r = 0u; r < RM; r++) { x[r] = subgroupMatrixLoad<Left, row_major>(&a_tile[sy], r * M * AS + i * (K / 4u), AS); }
        @unroll for (var c = 0u; c < CN; c++) {
            @if(ALONG == 0u) let y = subgroupMatrixLoad<Right, row_major>(&w_tile[sx], i * K * WS + c * (N / 4u), WS);
            @else let y = subgroupMatrixLoad<Right, col_major>(&w_tile[sx], c * N * WS + i * (K / 4u), WS);
            @unroll for (var r = 0u; r < RM; r++) { s[r * CN + c] = subgroupMatrixMultiplyAccumulate(x[r], y, s[r * CN + c]); }
        }
    }
}

// fold adds the matrices of sums to those of the lanes.
@inline fn fold() {
    @unroll for (var r = 0u; r < RM; r++) {
        @unroll for (var c = 0u; c < CN; c++) { subgroupMatrixStore<row_major>(&results[subgroup], c * (N / 4u), s[r * CN + c], OS); }
        workgroupBarrier();
        @unroll for (var e = 0u; e < FN; e++) {
            let at = e * LANES + lane;
            sums[r * FN + e] = sums[r * FN + e] + results[subgroup][at / COLS * OS + at % COLS];
        }
        workgroupBarrier();
    }
}

// write writes four adjacent sums of a lane at once.
@inline fn write() {
    @unroll for (var i = 0u; i < RM * FN; i++) {
        let at = i % FN * LANES + lane;
        let row = r0 + sy * ROWS + i / FN * M + at / COLS;
        let c = c0 + 4u * (sx * COLS + at % COLS);
        if (row < p.rows && c < p.cols) {
            if (p.bias_type != 0u) {
                @unroll for (var e = 0u; e < 4u; e++) { sums[i][e] = sums[i][e] + load_bias(p.bias_base + min(c + e, p.cols - 1u) * p.bias_stride); }
            }
            @if(OVEC == 1u) o[(o_at + row * p.o.s + c) >> 2u] = sums[i];
            @else @unroll for (var e = 0u; e < 4u; e++) {
                if (c + e < p.cols) { put(o_at + row * p.o.s + (c + e) * p.o.d, sums[i][e]); }
            }
        }
    }
}

@main(THREADS) {
    @inline tile_of_product(SY * ROWS, 4u * CQ);
    let sy = subgroup / SX;
    let sx = subgroup % SX;
    var sums: array<vec4<f32>, RM * FN>;
    let state_at = id * (RM * FN * THREADS) + t;
    @unroll for (var i = 0u; i < RM * FN; i++) {
        sums[i] = vec4<f32>(0.0);
        if ((p.flags & GO_ON) != 0u) { sums[i] = state[state_at + i * THREADS]; }
    }
    for (var x1 = 0u; x1 < p.depth; x1 += FOLD) {
        var s: array<Result, RM * CN>;
        @unroll for (var i = 0u; i < RM * CN; i++) { s[i] = Result(); }
        for (var x0 = x1; x0 < min(x1 + FOLD, p.depth); x0 += DEPTH) {
            @inline stage();
            @inline products();
        }
        @inline fold();
    }
    if ((p.flags & LEAVE) != 0u) {
        @unroll for (var i = 0u; i < RM * FN; i++) { state[state_at + i * THREADS] = sums[i]; }
        return;
    }
    @inline write();
}
