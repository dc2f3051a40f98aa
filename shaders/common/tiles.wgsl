// Parts of kernels that compute a block of query rows of one head. Thread (tx, ty) of TX x TY has RV vec4 of
// rows, ROWS in all, and COLS vec4 of columns of the output, CV of them in each turn. The arrays a, of rows, and
// b, of keys or columns, are in workgroup memory. Each thread has in registers
//
//     s    [key][row/4]    scores, then weights        most    [row/4]    their maxima in a tile
//     m    [row/4]         running maxima              l       [row/4]    its part of their sums
//     acc  [row][column/4] its part of the output

// registers declares m, l and acc.
@inline fn registers() {
    var m, l: array<vec4<f32>, RV>;
    var acc: array<vec4<f32>, O4>;
    @inline clear();
}

// clear sets m, l and acc to those of rows that see no key.
@inline fn clear() {
    @unroll for (var h = 0u; h < RV; h++) {
        m[h] = vec4<f32>(LOWEST);
        l[h] = vec4<f32>(0.0);
    }
    @unroll for (var i = 0u; i < O4; i++) { acc[i] = vec4<f32>(0.0); }
}

// load_state reads acc, l and m from state, and save_state writes them.
@inline fn load_state($at) {
    @unroll for (var i = 0u; i < O4; i++) { acc[i] = state[$at + i * THREADS]; }
    @unroll for (var h = 0u; h < RV; h++) {
        l[h] = state[$at + (O4 + h) * THREADS];
        m[h] = state[$at + (O4 + RV + h) * THREADS];
    }
}

@inline fn save_state($at) {
    @unroll for (var i = 0u; i < O4; i++) { state[$at + i * THREADS] = acc[i]; }
    @unroll for (var h = 0u; h < RV; h++) {
        state[$at + (O4 + h) * THREADS] = l[h];
        state[$at + (O4 + RV + h) * THREADS] = m[h];
    }
}

// stage_rows puts QN vec4 of depths of rows, which $from holds as stored, into a.
@inline fn stage_rows($value, $from) {
    @unroll for (var n = 0u; n < QN; n++) {
        let x = t + THREADS * n;
        if (QN * THREADS == TY * ROWS * QD || x < TY * ROWS * QD) {
            a[x / (QD * ROWS)][x % (QD * ROWS)] = $value($from[n]);
        }
    }
}

// dots adds the products of KT keys with the rows to s, from element $at on, for the QD vec4 of depths that
// are staged in a and b.
@inline fn dots($at) {
    @unroll(deep) for (var d = 0u; d < QD; d++) {
        var w: array<vec4<f32>, ROWS>; // [row/4][depth]
        @unroll for (var h = 0u; h < RV; h++) { @inline transposed4(w, 4u * h, w, a[ty]); }
        @unroll for (var j = 0u; j < KT; j++) {
            let x = b[tx][j * QD + d];
            @unroll for (var h = 0u; h < RV; h++) {
                s[$at + j * RV + h] = add(x.w, w[4u * h + 3u], add(x.z, w[4u * h + 2u],
                    add(x.y, w[4u * h + 1u], add(x.x, w[4u * h], s[$at + j * RV + h]))));
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

// maxima updates m by the maxima of rows over all threads, and declares rescale, 2^(m before - m).
@inline fn maxima() {
    workgroupBarrier();
    @unroll for (var h = 0u; h < RV; h++) { a[ty][tx * RV + h] = most[h]; }
    workgroupBarrier();
    var rescale: array<vec4<f32>, RV>;
    @unroll for (var h = 0u; h < RV; h++) {
        var top = m[h];
        @unroll(deep) for (var x = 0u; x < TX; x++) { top = max(top, a[ty][x * RV + h]); }
        rescale[h] = exp2_down(m[h] - top);
        m[h] = top;
    }
}

// stage_weights puts the weights of step c, JJ keys of s, into a.
@inline fn stage_weights() {
    @unroll for (var y = 0u; y < STEPS; y++) {
        if (c == y) {
            @unroll for (var j = 0u; j < JJ; j++) {
                @unroll for (var h = 0u; h < RV; h++) {
                    a[ty][(j * TX + tx) * RV + h] = s[(y * JJ + j) * RV + h];
                }
            }
        }
    }
}

// stage_columns puts VN vec4 of columns of a step, which $from holds as stored, into b, for $lanes lanes from
// $first on.
@inline fn stage_columns($value, $from, $lanes, $first) {
    @unroll for (var n = 0u; n < VN; n++) {
        let x = t + THREADS * n;
        if (VN * THREADS == STAGED * $lanes * CV || x < STAGED * $lanes * CV) {
            let quad = x % ($lanes * CV);
            let y = $value($from[n]);
            b[$first + quad % $lanes][(x / ($lanes * CV)) * CV + quad / $lanes] = y;
            if (check && !finite(y)) { atomicStore(&special, round); }
        }
    }
}

// output adds the products of the STAGED values of a step and their weights, which begin at $from, to the output,
// CV columns from $column on.
@inline fn output($add, $column, $from) {
    @unroll(deep) for (var y = 0u; y < STAGED; y++) {
        var w: array<vec4<f32>, RV>;
        @unroll for (var h = 0u; h < RV; h++) { w[h] = a[ty][$from + y * RV + h]; }
        @unroll for (var i = 0u; i < CV; i++) {
            let x = b[tx][y * CV + i];
            @unroll for (var r = 0u; r < ROWS; r++) {
                acc[r * COLS + $column + i] = $add(w[r / 4u][r % 4u], x, acc[r * COLS + $column + i]);
            }
        }
    }
}

// totals adds l over all threads of a row, in a fixed order, writes the log-sum-exp, and declares inverse, the
// factor of the output, and empty, the rows that see no key.
@inline fn totals() {
    workgroupBarrier();
    @unroll for (var h = 0u; h < RV; h++) { a[ty][tx * RV + h] = l[h]; }
    workgroupBarrier();
    var inverse: array<vec4<f32>, RV>;
    var empty: array<vec4<bool>, RV>;
    @unroll for (var h = 0u; h < RV; h++) {
        var sum = vec4<f32>(0.0);
        @unroll(deep) for (var x = 0u; x < TX; x++) { sum = sum + a[ty][x * RV + h]; }
        var scale = vec4<f32>(p.keep);
        if ((p.flags & HAS_SINKS) != 0u) {
            let sink = p.sinks[head / 4u][head % 4u];
            if (bitcast<u32>(sink) != MINUS_INF) {
                let top = max(m[h], vec4<f32>(sink));
                let before = exp2_down(m[h] - top);
                sum = fma(sum, before, exp2_down(vec4<f32>(sink) - top));
                scale = scale * before;
                m[h] = top;
            }
        }
        empty[h] = (bitcast<vec4<u32>>(sum) & vec4<u32>(0x7fffffffu)) == vec4<u32>(0u);
        let safe = select(sum, vec4<f32>(1.0), empty[h]);
        inverse[h] = vec4<f32>(1.0) / safe * scale;
        if (tx == 0u && (p.flags & WANT_LSE) != 0u) {
            @unroll for (var r = 0u; r < 4u; r++) {
                let row = r0 + ty * ROWS + 4u * h + r;
                if (row < rows) {
                    lse[lse_at + row * p.lse.s] = select(fma(m[h][r], LN2, log_acc(safe[r])), negative_infinity(), empty[h][r]);
                }
            }
        }
    }
}

// write_output writes the output through a, ER rows of a thread at once: neighbouring threads write neighbouring
// columns.
@inline fn write_output() {
    @unroll for (var i = 0u; i < COLS; i++) {
        @unroll for (var y = 0u; y < ROWS / ER; y++) {
            workgroupBarrier();
            @unroll for (var e = 0u; e < ER; e++) {
                a[ty][e * TX + tx] = select(
                    unsigned_zeros(acc[(y * ER + e) * COLS + i]) * inverse[(y * ER + e) / 4u][(y * ER + e) % 4u],
                    vec4<f32>(0.0), empty[(y * ER + e) / 4u][(y * ER + e) % 4u]);
            }
            workgroupBarrier();
            for (var x = t; x < 4u * ER * THREADS; x += THREADS) {
                let c = x % (4u * TX);
                let e = (x / (4u * TX)) % ER;
                let row = r0 + (x / (4u * TX * ER)) * ROWS + y * ER + e;
                if (row < rows && 4u * TX * i + c < p.vdim) {
                    let to = o_at + row * p.o.s + (4u * TX * i + c) * p.o.d;
                    let result = a[x / (4u * TX * ER)][e * TX + c / 4u][c % 4u];
                    @if(OUT16 == 0u) o[to] = bitcast<u32>(result);
                    @else put(to, result);
                }
            }
        }
    }
}
