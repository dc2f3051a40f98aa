// What the gradients of a row need in addition to the operands, one row a workgroup:
//
//     D = Σ_c dO_c·O_c - dLSE        sink = -exp(min(Sink - LSE, 0))·D
//
// rows holds D, LSE (-Inf for +Inf) and the largest finite |dO_c| of each row, for matrixgradient.wgsl; sums holds the gradient of the head's sink, which is 0 for a row
// whose LSE is infinite. A thread sums every 64th column.
//
// Workgroup memory: part 512 bytes.

@ranged struct DeltaParams {
    heads, rows, vdim: u32,
    g_type: u32, // type of dO: 0 f32, 1 f16, 2 bf16
    o_type: u32, // type of o
    shifted: u32, // 1: there is a dLSE
    sunk: u32, // 1: sums is written
    g, o, lse, dlse: Strides,
    out: Strides, // of rows
    sums: Strides,
    sinks: array<vec4<f32>, 16>, // of up to 64 heads
}

@binding var<storage, read> g, o: array<u32>;
@binding var<storage, read> lse, dlse: array<f32>;
@binding var<storage, read_write> rows, sums: array<f32>;
@binding var<uniform> p: DeltaParams;

var<workgroup> part: array<vec2<f32>, 64>;

@main(64) {
    @inline row_of_id(row);
    let g_at = p.g.base + b * p.g.b + h * p.g.h + row * p.g.s;
    let o_at = p.o.base + b * p.o.b + h * p.o.h + row * p.o.s;
    var sum = 0.0;
    var most = 0.0;
    for (var c = t; c < p.vdim; c += 64u) {
        let g = load_g(g_at + c * p.g.d);
        sum = fma(g, load_o(o_at + c * p.o.d), sum);
        if (finite(vec4<f32>(g))) { most = max(most, abs(g)); }
    }
    part[t] = vec2<f32>(sum, most);
    workgroupBarrier();
    if (t > 0u) { return; }
    var d = 0.0;
    for (var x = 0u; x < 64u; x++) {
        d = d + part[x].x;
        most = max(most, part[x].y);
    }
    if (p.shifted == 1u) { d = d - dlse[p.dlse.base + b * p.dlse.b + h * p.dlse.h + row * p.dlse.s]; }
    let total = lse[p.lse.base + b * p.lse.b + h * p.lse.h + row * p.lse.s];
    let at = p.out.base + b * p.out.b + h * p.out.h + row * p.out.s;
    rows[at] = d;
    rows[at + p.out.d] = select(total, negative_infinity(), unseen(total));
    rows[at + 2u * p.out.d] = select(most, 0.0, unseen(total));
    if (p.sunk == 1u) {
        let sink = p.sinks[h / 4u][h % 4u];
        let e = exp2_acc(min(vec4<f32>((sink - total) * LOG2E), vec4<f32>(0.0))).x; // a large LSE may round below the sink
        let none = unseen(total) || bitcast<u32>(sink) == MINUS_INF;
        sums[p.sums.base + b * p.sums.b + h * p.sums.h + row * p.sums.s] = select(-(e * d), 0.0, none);
    }
}
