// Merges a partial result (po, plse) over other keys into (o, lse), one row a workgroup (Milakov & Gimelshein
// 2018):
//
//     m = max(lse, plse)    a = exp(lse-m)    b = exp(plse-m)
//     o = (a·o + b·po)/(a+b)    lse = m + log(a+b)
//
// Where one lse is infinite, the result is the other side, bit for bit: o and lse if both are.
//
// Workgroup memory: none.

@ranged struct MergeParams {
    heads, rows, vdim: u32,
    o, lse, po, plse: Strides,
}

@binding var<storage, read> po, plse: array<f32>;
@binding var<storage, read_write> o, lse: array<f32>;
@binding var<uniform> p: MergeParams;

@main(64) {
    @inline row_of_id(row);
    let lse_at = p.lse.base + b * p.lse.b + h * p.lse.h + row * p.lse.s;
    let x = lse[lse_at];
    let y = plse[p.plse.base + b * p.plse.b + h * p.plse.h + row * p.plse.s];
    storageBarrier(); // all threads read x before one overwrites it
    if (unseen(y)) { return; }
    let alone = unseen(x);
    let m = max(x, y);
    let e = exp2_acc(vec4<f32>((x - m) * LOG2E, (y - m) * LOG2E, 0.0, 0.0));
    let sum = e.x + e.y;
    let o_at = p.o.base + b * p.o.b + h * p.o.h + row * p.o.s;
    let po_at = p.po.base + b * p.po.b + h * p.po.h + row * p.po.s;
    for (var c = t; c < p.vdim; c += 64u) {
        let theirs = po[po_at + c * p.po.d];
        let at = o_at + c * p.o.d;
        o[at] = select((e.x * o[at] + e.y * theirs) / sum, theirs, alone);
    }
    if (t == 0u) { lse[lse_at] = select(m + log_acc(sum), y, alone); }
}
