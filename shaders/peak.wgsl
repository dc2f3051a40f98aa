// Measures the float32 ceiling: independent fused multiply-adds in registers. A thread keeps 8 vec4; each round
// makes 16 · 8 · 4 FMA on them, 1,024 operations. With 8 · 4, the loop itself took 15% of the time on an H200.
// Storing the results keeps the compiler from removing the work.
//
// Workgroup memory: none.

struct PeakParams {
    rounds: u32,
    factor: f32, // below 1, which keeps the values normal
    addend: f32,
}

@binding var<storage, read_write> out: array<f32>;
@binding var<uniform> p: PeakParams;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let f = vec4<f32>(p.factor);
    let a = vec4<f32>(p.addend);
    var x0 = vec4<f32>(f32(id.x));
    var x1 = x0 + vec4<f32>(1.0);
    var x2 = x0 + vec4<f32>(2.0);
    var x3 = x0 + vec4<f32>(3.0);
    var x4 = x0 + vec4<f32>(4.0);
    var x5 = x0 + vec4<f32>(5.0);
    var x6 = x0 + vec4<f32>(6.0);
    var x7 = x0 + vec4<f32>(7.0);
    for (var i = 0u; i < p.rounds; i++) {
        @unroll for (var n = 0u; n < 16u; n++) {
            x0 = fma(x0, f, a);
            x1 = fma(x1, f, a);
            x2 = fma(x2, f, a);
            x3 = fma(x3, f, a);
            x4 = fma(x4, f, a);
            x5 = fma(x5, f, a);
            x6 = fma(x6, f, a);
            x7 = fma(x7, f, a);
        }
    }
    let sum = ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7));
    out[id.x] = dot(sum, vec4<f32>(1.0));
}
