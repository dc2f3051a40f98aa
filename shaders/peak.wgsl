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
    @each($n: 1, 2, 3, 4, 5, 6, 7)
    var x$n = x0 + vec4<f32>($n.0);
    for (var i = 0u; i < p.rounds; i++) {
        @unroll for (var n = 0u; n < 16u; n++) {
            @each($n: 0, 1, 2, 3, 4, 5, 6, 7)
            x$n = fma(x$n, f, a);
        }
    }
    let sum = ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7));
    out[id.x] = dot(sum, vec4<f32>(1.0));
}
