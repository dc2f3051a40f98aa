// Computes the exponentials of the prelude, which package gpu compares with exact ones:
//
//     y_i = (exp2_acc(x_i), exp2_down(x_i))
//
// A thread has four arguments. Workgroup memory: none.

@binding var<storage, read> x: array<vec4<f32>>;
@binding var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let a = x[id.x];
    y[2u * id.x] = exp2_acc(a);
    y[2u * id.x + 1u] = exp2_down(a);
}
