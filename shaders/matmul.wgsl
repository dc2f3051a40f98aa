// Batched matrix product. A workgroup computes one tile of one head:
//
//     o[b, h, i, n] = Σ_x a[b, h, i, x] · w[b, h/group, x, n] + bias[n]
//
// This is QKᵀ (x is the depth, n the key), PV (x is the key, n the column) and the linear layers (x is the
// input feature): they differ only in strides. Thread (tx, ty) of TX x TY keeps ROWS x 4·CV sums in registers,
// of rows ROWS·ty + r and columns 4·(TX·i + tx) + c, and reads a and w in stages of 4·QD along x:
//
//         x ──► 4·QD                n ──► 4·TX·CV
//     i ┌────────────┐         x ┌────────────┐
//       │ a_rows[ty] │           │ w_columns  │
//       └────────────┘           │       [tx] │
//                                └────────────┘
//
// Threads read one row of a_rows and one of w_columns, and are in pairs, as in flash.wgsl. Tiles of 8x8 (variant
// L) read 16 vec4 for 256 multiply-adds, 4 a word. Tiles of 4x8 (M) and 4x4 (S) do 2.67 and 2 a word and serve
// grids that would be too small. Where w is contiguous along x (keys of QKᵀ), w_columns keeps that order and
// registers transpose four columns.
//
// PV must skip weights of exactly 0. The thread that stages weights notes whether there is a 0 among them, and
// only threads with a 0 in their rows of a stage check each weight.
//
// Each sum is by fma in ascending order of x in every variant: all yield the same bits. Chunks along x continue
// from the sums that the chunk before left in state, which changes no bit.
//
// Workgroup memory: 16·(TY·SA + TX·SB) + 4·TX·TY bytes.

const A2: u32 = AVEC * min(A, 1u); // 1: a is bound as fours of 16-bit elements
const W2: u32 = WVEC * min(W, 1u); // the same for w
const THREADS: u32 = TX * TY;
const ER: u32 = ROWS * QD / TX; // rows of a thread written at once
const CQ: u32 = TX * CV; // fours of columns of a tile
const SA: u32 = 1u + ROWS * QD; // length of a row of a_rows, odd
const SB: u32 = 1u + 4u * QD * CV; // length of a row of w_columns, odd
const O4: u32 = ROWS * CV;
const W4: u32 = 4u * CV;
const AN: u32 = ROWS * QD / TX; // vec4 of a that a thread stages, all for one row of a_rows
const WN: u32 = 4u * QD * CV / TY; // the same for w

@each($x $TWO: a A2, w W2)
@if($TWO == 1u) @binding var<storage, read> $x: array<vec2<u32>>;
@else @binding var<storage, read> $x: array<vec4<u32>>;
@binding var<storage, read> bias: array<u32>;
@if(OVEC == 0u) @binding var<storage, read_write> o: Words;
@if(OVEC == 1u) @binding var<storage, read_write> o: array<vec4<f32>>;
@binding var<storage, read_write> state: array<vec4<f32>>;
@binding var<uniform> p: MatmulParams;

var<workgroup> a_rows: array<array<vec4<f32>, SA>, TY>; // [row][x/4]
var<workgroup> w_columns: array<array<vec4<f32>, SB>, TX>; // [x][n/4], or [n][x/4] with ALONG
var<workgroup> zeros: array<array<u32, TX>, TY>; // 1: a thread staged a 0 for row ty of a_rows

// add_nonzero returns sum + x·v, or sum where x is 0.
fn add_nonzero(x: f32, v: vec4<f32>, sum: vec4<f32>) -> vec4<f32> {
    return select(fma(vec4<f32>(x), v, sum), sum, (bitcast<u32>(x) & 0x7fffffffu) == 0u);
}

// The parts of main.

// load loads the thread's part of the next 4·QD terms of a and w.
@inline fn load() {
    var a_loaded: array<vec4<u32>, AN>;
    var w_loaded: array<vec4<u32>, WN>;
    @unroll for (var n = 0u; n < AN; n++) {
        let row = r0 + a_row * ROWS + part * AN + n;
        a_loaded[n] = stored_a(a_at + min(row, p.rows - 1u) * p.a.s, x0 + 4u * a_quad, p.depth, p.a.d);
    }
    @inline load_w(w_loaded);
}

// stage puts what load loaded into a_rows and w_columns, and notes the zeros of a.
@inline fn stage() {
    @unroll for (var n = 0u; n < AN; n++) { a_rows[a_row][(part * AN + n) * QD + a_quad] = value_a(a_loaded[n]); }
    @unroll for (var n = 0u; n < WN; n++) {
        let e = t + THREADS * n;
        @if(ALONG == 0u) {
            let quad = e % (TX * CV);
            w_columns[quad % TX][(e / (TX * CV)) * CV + quad / TX] = value_w(w_loaded[n]);
        } @else {
            let c = e / QD;
            w_columns[(c / 4u) % TX][(4u * (c / (4u * TX)) + c % 4u) * QD + e % QD] = value_w(w_loaded[n]);
        }
    }
    @if(SKIP == 1u) {
        // Where subnormals count as 0, this finds more zeros than add_nonzero.
        var zero = vec4<bool>(false);
        @unroll for (var n = 0u; n < AN; n++) { zero = zero | (value_a(a_loaded[n]) == vec4<f32>(0.0)); }
        zeros[a_row][part * QD + a_quad] = select(0u, 1u, zero.x || zero.y || zero.z || zero.w);
    }
}

// products adds 4·QD terms to the sums.
@inline fn products($add) {
    @unroll(deep) for (var d = 0u; d < QD; d++) {
        var v: array<vec4<f32>, W4>; // [column/4][x]
        @unroll for (var i = 0u; i < CV; i++) {
            @if(ALONG == 1u) { @inline transposed4(v, 4u * i, v, w_columns[tx]); }
            @else @unroll for (var e = 0u; e < 4u; e++) { v[4u * i + e] = w_columns[tx][(4u * d + e) * CV + i]; }
        }
        @unroll for (var r = 0u; r < ROWS; r++) {
            let x = a_rows[ty][r * QD + d];
            @unroll for (var i = 0u; i < CV; i++) {
                s[r * CV + i] = $add(x.w, v[4u * i + 3u], $add(x.z, v[4u * i + 2u],
                    $add(x.y, v[4u * i + 1u], $add(x.x, v[4u * i], s[r * CV + i]))));
            }
        }
    }
}

// write_fours writes the sums, four columns at a time.
@inline fn write_fours() {
    if (p.bias_type != 0u) {
        @unroll for (var i = 0u; i < CV; i++) {
            var y = vec4<f32>(0.0);
            @unroll for (var e = 0u; e < 4u; e++) {
                let c = min(c0 + 4u * (TX * i + tx) + e, p.cols - 1u);
                y[e] = load_bias(p.bias_base + c * p.bias_stride);
            }
            @unroll for (var r = 0u; r < ROWS; r++) { s[r * CV + i] = s[r * CV + i] + y; }
        }
    }
    @unroll for (var r = 0u; r < ROWS; r++) {
        let row = r0 + ty * ROWS + r;
        if (row < p.rows) {
            @unroll for (var i = 0u; i < CV; i++) {
                let c = c0 + 4u * (TX * i + tx);
                if (c < p.cols) { o[(o_at + row * p.o.s + c) >> 2u] = s[r * CV + i]; }
            }
        }
    }
}

// write writes the sums through workgroup memory, ER rows of a thread at once: neighbouring threads write
// neighbouring columns.
@inline fn write() {
    @unroll for (var i = 0u; i < CV; i++) {
        @unroll for (var z = 0u; z < ROWS / ER; z++) {
            workgroupBarrier();
            @unroll for (var e = 0u; e < ER; e++) { a_rows[ty][e * TX + tx] = s[(z * ER + e) * CV + i]; }
            workgroupBarrier();
            for (var x = t; x < 4u * ER * THREADS; x += THREADS) {
                let e = (x / (4u * TX)) % ER;
                let row = r0 + (x / (4u * TX * ER)) * ROWS + z * ER + e;
                let c = c0 + 4u * TX * i + x % (4u * TX);
                if (row < p.rows && c < p.cols) {
                    var v = a_rows[x / (4u * TX * ER)][e * TX + (x / 4u) % TX][x % 4u];
                    if (p.bias_type != 0u) { v = v + load_bias(p.bias_base + c * p.bias_stride); }
                    put(o_at + row * p.o.s + c * p.o.d, v);
                }
            }
        }
    }
}

@main(THREADS) {
    let tx = (t / 2u) % TX;
    let ty = t / (2u * TX) * 2u + t % 2u;
    @inline tile_of_product(TY * ROWS, 4u * CQ);

    // Of a, this thread stages quad a_quad of rows part·AN + n for row a_row of a_rows.
    let a_quad = t % QD;
    let a_row = (t / QD) % TY;
    let part = t / (QD * TY);

    var s: array<vec4<f32>, O4>; // [row][column/4]
    @unroll for (var i = 0u; i < O4; i++) { s[i] = vec4<f32>(0.0); }
    let state_at = id * (O4 * THREADS) + t;
    if ((p.flags & GO_ON) != 0u) {
        @unroll for (var i = 0u; i < O4; i++) { s[i] = state[state_at + i * THREADS]; }
    }
    for (var x0 = 0u; x0 < p.depth; x0 += 4u * QD) {
        @inline load();
        workgroupBarrier();
        @inline stage();
        workgroupBarrier();
        var hidden = 0u; // 1: there is a 0 in the rows of this thread
        @if(SKIP == 1u) @unroll(deep) for (var i = 0u; i < TX; i++) { hidden = hidden | zeros[ty][i]; }
        if (hidden == 0u) { @inline products(add); }
        @if(SKIP == 1u) if (hidden == 1u) { @inline products(add_nonzero); }
    }
    if ((p.flags & LEAVE) != 0u) {
        @unroll for (var i = 0u; i < O4; i++) { state[state_at + i * THREADS] = s[i]; }
        return;
    }

    @if(OVEC == 1u) { @inline write_fours(); }
    @else { @inline write(); }
}
