// Measures the read ceiling: up to four buffers, read repeatedly as if they were one, in chunks of 8 KiB. The
// workgroups of a grid of size n take every n-th chunk:
//
//     chunk  0    1    2   ...  n0-1 | 0    1   ...        then the first again
//          ┌────┬────┬────┬───┬─────┬────┬────┬───
//          │ w0 │ w1 │ w2 │   │     │    │    │   src0, then src1, src2, src3
//          └────┴────┴────┴───┴─────┴────┴────┴───
//
// Storing the sum of what was read keeps the compiler from removing the reads. The last chunk of a buffer
// repeats its last vec4 where the buffer does not fill the chunk.
//
// Workgroup memory: none.

struct ReadParams {
    all: u32, // chunks to read
    chunks: u32, // of all the buffers
    end0: u32, // the first chunk after src0
    end1: u32, // after src1
    end2: u32, // after src2
    last0: u32, // the last vec4 of src0
    last1, last2, last3: u32,
}

@binding var<storage, read> src0, src1, src2, src3: array<vec4<f32>>;
@binding var<storage, read_write> out: array<vec4<f32>>;
@binding var<uniform> p: ReadParams;

@each($n: 0, 1, 2, 3)
fn read$n(i: u32) -> vec4<f32> {
    let last = p.last$n;
    let a = (src$n[min(i, last)] + src$n[min(i + 64u, last)]) + (src$n[min(i + 128u, last)] + src$n[min(i + 192u, last)]);
    let b = (src$n[min(i + 256u, last)] + src$n[min(i + 320u, last)]) + (src$n[min(i + 384u, last)] + src$n[min(i + 448u, last)]);
    return a + b;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) t: u32) {
    var sum = vec4<f32>(0.0);
    for (var k = group.x; k < p.all; k += groups.x) {
        let c = k % p.chunks;
        if (c < p.end0) {
            sum += read0(512u * c + t);
        } else if (c < p.end1) {
            sum += read1(512u * (c - p.end0) + t);
        } else if (c < p.end2) {
            sum += read2(512u * (c - p.end1) + t);
        } else {
            sum += read3(512u * (c - p.end2) + t);
        }
    }
    out[64u * group.x + t] = sum;
}
