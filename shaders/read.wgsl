// The read ceiling: up to four buffers, over and over, by chunks of 4 KiB, one
// after the other as if they were one. A workgroup takes every so-many-th chunk,
// the grid's number of workgroups on each time:
//
//     chunk  0    1    2   ...  n0-1 | 0    1   ...        then the first again
//          ┌────┬────┬────┬───┬─────┬────┬────┬───
//          │ w0 │ w1 │ w2 │   │     │    │    │   src0, then src1, src2, src3
//          └────┴────┴────┴───┴─────┴────┴────┴───
//
// What is read is added up and stored, so that the reads cannot be left out. The
// end of a buffer that does not fill its last chunk is read again instead.
//
// Workgroup memory: none.

struct Params {
    total: u32, // chunks to read in all
    chunks: u32, // of all the buffers
    end0: u32, // the first chunk after src0, and so on
    end1: u32,
    end2: u32,
    last0: u32, // the last vec4 of src0, and so on
    last1: u32,
    last2: u32,
    last3: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<storage, read> src0: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> src1: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> src2: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> src3: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(5) var<uniform> p: Params;

fn read0(i: u32) -> vec4<f32> {
    return (src0[min(i, p.last0)] + src0[min(i + 64u, p.last0)]) + (src0[min(i + 128u, p.last0)] + src0[min(i + 192u, p.last0)]);
}

fn read1(i: u32) -> vec4<f32> {
    return (src1[min(i, p.last1)] + src1[min(i + 64u, p.last1)]) + (src1[min(i + 128u, p.last1)] + src1[min(i + 192u, p.last1)]);
}

fn read2(i: u32) -> vec4<f32> {
    return (src2[min(i, p.last2)] + src2[min(i + 64u, p.last2)]) + (src2[min(i + 128u, p.last2)] + src2[min(i + 192u, p.last2)]);
}

fn read3(i: u32) -> vec4<f32> {
    return (src3[min(i, p.last3)] + src3[min(i + 64u, p.last3)]) + (src3[min(i + 128u, p.last3)] + src3[min(i + 192u, p.last3)]);
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) t: u32,
) {
    var sum = vec4<f32>(0.0);
    for (var k = group.x; k < p.total; k += groups.x) {
        let c = k % p.chunks;
        if (c < p.end0) {
            sum += read0(256u * c + t);
        } else if (c < p.end1) {
            sum += read1(256u * (c - p.end0) + t);
        } else if (c < p.end2) {
            sum += read2(256u * (c - p.end1) + t);
        } else {
            sum += read3(256u * (c - p.end2) + t);
        }
    }
    out[64u * group.x + t] = sum;
}
