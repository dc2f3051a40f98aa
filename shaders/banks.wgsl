// Measures the ceiling of workgroup memory: loads of vec4, neighbours by neighbouring threads, and one addition
// for each word, which costs a device far less than the load. A thread makes 4 loads a round, 64 bytes, each
// round from another row, so that the compiler cannot reuse the loads of the round before.
//
// Workgroup memory: 4,096 bytes.

struct BanksParams {
    rounds: u32,
}

@binding var<storage, read_write> out: array<vec4<f32>>;
@binding var<uniform> p: BanksParams;

var<workgroup> tile: array<vec4<f32>, 256>; // [row of 64][thread]

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    for (var i = 0u; i < 4u; i++) { tile[64u * i + t] = vec4<f32>(f32(t + i)); }
    workgroupBarrier();
    var x0 = vec4<f32>(0.0);
    var x1 = vec4<f32>(0.0);
    var x2 = vec4<f32>(0.0);
    var x3 = vec4<f32>(0.0);
    for (var r = 0u; r < p.rounds; r++) {
        let at = (t + r) & 63u;
        x0 += tile[at];
        x1 += tile[64u + at];
        x2 += tile[128u + at];
        x3 += tile[192u + at];
    }
    out[id.x] = (x0 + x1) + (x2 + x3);
}
