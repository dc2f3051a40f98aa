// Parts of main that several kernels share.

// row_of_id declares the row of the box, head h and batch b of a workgroup that has one row.
@inline fn row_of_id($row) {
    let $row = id % p.rows;
    let h = (id / p.rows) % p.heads;
    let b = id / p.rows / p.heads;
}

// heads declares the key head of a query head, and where q, k and v begin in both.
@inline fn heads($batch, $head, $kv_head) {
    let $kv_head = (p.head0 + $head) / p.group - p.head0 / p.group;
    let q_at = p.q.base + $batch * p.q.b + $head * p.q.h;
    let k_batch = select($batch * p.k.b, 0u, PAGED == 1u);
    let v_batch = select($batch * p.v.b, 0u, PAGED == 1u);
    let k_at = p.k.base + k_batch + $kv_head * p.k.h;
    let v_at = p.v.base + v_batch + $kv_head * p.v.h;
}

// products4 adds the products of $keys keys and $rows vec4 of rows, for the QD vec4 of depths that are staged
// in the arrays a and b. Those of key j with the rows of vec4 h are element $at of s.
@inline fn products4($at, $keys, $rows, $all) {
    @unroll(deep) for (var d = 0u; d < QD; d++) {
        var w: array<vec4<f32>, $all>; // [row/4][depth]
        @unroll for (var h = 0u; h < $rows; h++) { @inline transposed4(w, 4u * h, w, a[ty]); }
        @unroll for (var j = 0u; j < $keys; j++) {
            let x = b[tx][j * QD + d];
            @unroll for (var h = 0u; h < $rows; h++) {
                s[$at] = add(x.w, w[4u * h + 3u], add(x.z, w[4u * h + 2u],
                    add(x.y, w[4u * h + 1u], add(x.x, w[4u * h], s[$at]))));
            }
        }
    }
}

// stage_weights4 puts the weights of step c, JJ keys of s with $rows vec4 of rows each, into the array a.
@inline fn stage_weights4($rows) {
    @unroll for (var y = 0u; y < STEPS; y++) {
        if (c == y) {
            @unroll for (var j = 0u; j < JJ; j++) {
                @unroll for (var h = 0u; h < $rows; h++) {
                    a[ty][(j * TX + tx) * $rows + h] = s[(y * JJ + j) * $rows + h];
                }
            }
        }
    }
}

// transposed4 sets four elements of $to, from $i on, to the columns of a matrix. Its rows are elements of
// $from, depth d of QD of each.
@inline fn transposed4($to, $i, $w, $from) {
    let $w0 = $from[($i) * QD + d];
    let $w1 = $from[($i + 1u) * QD + d];
    let $w2 = $from[($i + 2u) * QD + d];
    let $w3 = $from[($i + 3u) * QD + d];
    $to[$i] = vec4<f32>($w0.x, $w1.x, $w2.x, $w3.x);
    $to[$i + 1u] = vec4<f32>($w0.y, $w1.y, $w2.y, $w3.y);
    $to[$i + 2u] = vec4<f32>($w0.z, $w1.z, $w2.z, $w3.z);
    $to[$i + 3u] = vec4<f32>($w0.w, $w1.w, $w2.w, $w3.w);
}
