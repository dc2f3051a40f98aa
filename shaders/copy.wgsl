// Measures the copy ceiling: every vec4 of one buffer to another. (convert.wgsl copies tensors.)
//
//     dst[i] = src[i]
//
// A thread copies 4 vec4 a round, neighbouring threads neighbouring ones. Each buffer holds laps · 4 vec4 for
// each thread of the grid; after the last lap the first follows.
//
// Workgroup memory: none.

struct CopyParams {
    rounds: u32,
    laps: u32,
    threads: u32, // of the grid
    pad: u32,
}

@binding var<storage, read> src: array<vec4<f32>>;
@binding var<storage, read_write> dst: array<vec4<f32>>;
@binding var<uniform> p: CopyParams;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    for (var r = 0u; r < p.rounds; r++) {
        let i0 = 4u * (r % p.laps) * p.threads + id.x;
        let i1 = i0 + p.threads;
        let i2 = i1 + p.threads;
        let i3 = i2 + p.threads;
        let x0 = src[i0];
        let x1 = src[i1];
        let x2 = src[i2];
        let x3 = src[i3];
        dst[i0] = x0;
        dst[i1] = x1;
        dst[i2] = x2;
        dst[i3] = x3;
    }
}
