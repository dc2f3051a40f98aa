// Measures the ceiling of matrix.wgsl: independent products of f16 matrices that add up in float32, on registers. A
// subgroup keeps four results; each round makes 16 · 4 products of MxK times KxN, 128·M·N·K operations. The elements of
// one operand are p.factor, those of the other 1. Storing a sum of the results keeps the compiler from removing the work.
//
// Workgroup memory: 2·K·(M + N) + 256/LANES·M·N bytes.

struct MatrixPeakParams {
    rounds: u32,
    factor: u32, // two f16
}

@binding var<storage, read_write> out: array<f32>;
@binding var<uniform> p: MatrixPeakParams;

var<workgroup> a: array<vec2<u32>, M * K / 4u>;
var<workgroup> b: array<vec2<u32>, K * N / 4u>;
var<workgroup> results: array<vec4<f32>, 64u / LANES * M * N / 4u>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(local_invocation_index) t: u32, @builtin(subgroup_id) subgroup: u32) {
    for (var i = t; i < M * K / 4u; i += 64u) { a[i] = vec2<u32>(p.factor); }
    for (var i = t; i < K * N / 4u; i += 64u) { b[i] = vec2<u32>(0x3c003c00u); }
    workgroupBarrier();
    let x = subgroupMatrixLoad<Left, row_major>(&a, 0u, K / 4u);
    let y = subgroupMatrixLoad<Right, row_major>(&b, 0u, N / 4u);
    var s: array<Result, 4>;
    @unroll for (var n = 0u; n < 4u; n++) { s[n] = Result(); }
    for (var i = 0u; i < p.rounds; i++) {
        @unroll for (var j = 0u; j < 16u; j++) {
            @unroll for (var n = 0u; n < 4u; n++) { s[n] = subgroupMatrixMultiplyAccumulate(x, y, s[n]); }
        }
    }
    var sum = 0.0;
    @unroll for (var n = 0u; n < 4u; n++) {
        subgroupMatrixStore<row_major>(&results, subgroup * (M * N / 4u), s[n], N / 4u);
        workgroupBarrier();
        sum += results[t % (64u / LANES * M * N / 4u)].x;
        workgroupBarrier();
    }
    out[id.x] = sum;
}
