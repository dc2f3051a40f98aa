// Parts of main that several kernels share.

// row_of_id declares the row of the box, head h and batch b of a workgroup that has one row.
@inline fn row_of_id($row) {
    let $row = id % p.rows;
    let h = (id / p.rows) % p.heads;
    let b = id / p.rows / p.heads;
}

// heads declares the key head of a query head, how many rows and keys the batch has, and where q, k, v, o and lse begin.
@inline fn heads($batch, $head, $kv_head) {
    let $kv_head = (p.head0 + $head) / p.group - p.head0 / p.group;
    let rows = rows_of($batch);
    let keys = keys_of($batch);
    @each($x: q, o, lse) let $x_at = p.$x.base + $batch * p.$x.b + $head * p.$x.h + first_row($batch) * p.$x.s;
    @each($x: k, v) let $x_batch = select($batch * p.$x.b + first_key($batch) * p.$x.s, 0u, PAGED == 1u);
    @each($x: k, v) let $x_at = p.$x.base + $x_batch + $kv_head * p.$x.h;
}

// visible_keys declares the keys that any row of a block of TY·ROWS rows from r0 on sees, sees_from to sees_to, those of them in the
// chunk, begin to end, those that all rows see, all_from to all_to, and the batch's offset.
@inline fn visible_keys() {
    let offset = offset_of(batch);
    let i_first = i32(p.row0 + r0) + offset;
    let i_last = i32(p.row0 + min(r0 + TY * ROWS, rows)) - 1 + offset;
    let cap = key_end(batch, p.all_keys);
    let sees_from = max(i_first + p.lo, 0);
    let sees_to = min(i_last + p.hi, cap);
    let all_from = i_last + p.lo;
    let all_to = min(i_first + p.hi, cap);
    let begin = max(sees_from, i32(p.key0));
    let end = min(sees_to, i32(p.key0 + p.keys));
}

// rows_of_split declares the split of the keys that a workgroup of decoding computes, and its rows $first to last, $COUNT at most, of
// those that read key head kh of batch $b. They are numbered head by head, from head h0 of the box on.
@inline fn rows_of_split($b, $first, $COUNT) {
    let $first = (id % p.blocks) * $COUNT;
    let split = (id / p.blocks) % p.parts;
    let kh = (id / p.blocks / p.parts) % p.kv_heads;
    let $b = id / p.blocks / p.parts / p.kv_heads;
    let number = p.head0 / p.group + kh;
    let h0 = max(number * p.group, p.head0) - p.head0;
    let h1 = min((number + 1u) * p.group, p.head0 + p.heads) - p.head0;
    let rows = (h1 - h0) * p.rows;
    if ($first >= rows) { return; }
    let last = min($first + $COUNT, rows) - 1u;
    @each($x: k, v) let $x_batch = select($b * p.$x.b, 0u, PAGED == 1u);
}

// keys_of_split declares the keys of the split that any of the rows sees, begin to end, and those that all of them see,
// all_from to all_to.
@inline fn keys_of_split($b, $first) {
    let several = $first / p.rows != last / p.rows;
    let row_first = select($first % p.rows, 0u, several);
    let row_last = select(last % p.rows, p.rows - 1u, several);
    let offset = offset_of($b);
    let i_first = i32(p.row0 + row_first) + offset;
    let i_last = i32(p.row0 + row_last) + offset;
    let split_key = p.key0 + split * SPLIT;
    let cap = key_end($b, p.key0 + p.keys);
    let begin = max(i_first + p.lo, i32(split_key));
    let end = min(min(i_last + p.hi, cap), i32(split_key + SPLIT));
    let all_from = i_last + p.lo;
    let all_to = min(i_first + p.hi, cap);
}

// add_sink adds the sink of $head to the sum of a row with the maximum $m, in units of log 2, and declares scale, the
// factor of the output that is not that of the sum.
@inline fn add_sink($sum, $m, $head) {
    var scale = p.keep;
    if ((p.flags & HAS_SINKS) != 0u) {
        let sink = p.sinks[$head / 4u][$head % 4u];
        if (bitcast<u32>(sink) != MINUS_INF) {
            let top = max($m, sink);
            let e = exp2_down(vec4<f32>($m - top, sink - top, 0.0, 0.0));
            $sum = fma($sum, e.x, e.y);
            scale = scale * e.x;
            $m = top;
        }
    }
}

// block_of returns which query block the n-th workgroup of each head computes. Blocks with many visible keys
// come first, so that the last workgroups to run are short. The number of visible keys of row i, min(i + hi,
// keys) - max(i + lo, 0), falls with the distance from the middle of the rows that see the most: blocks follow
// each other outwards from there, upper and lower in turns as long as there are both. Chunks of keys keep the
// order.
fn block_of(n: u32) -> u32 {
    let middle = i32(p.all_keys) / 2 - p.hi / 2 - p.lo / 2 - i32(p.row0);
    let first = u32(clamp(middle / i32(TY * ROWS), 0, i32(p.blocks) - 1));
    let both = min(first, p.blocks - 1u - first); // blocks that have a partner on the other side
    if (n > 2u * both) { return select(first - (n - both), first + (n - both), first == both); }
    return select(first - n / 2u, first + (n + 1u) / 2u, n % 2u == 1u);
}

// tile_of_product declares the batch b and head h of a workgroup of a matrix product, its first row and column, and where a, w and o begin.
@inline fn tile_of_product($height, $width) {
    let c0 = (id % p.col_tiles) * ($width);
    let r0 = ((id / p.col_tiles) % p.row_tiles) * ($height);
    let h = (id / p.col_tiles / p.row_tiles) % p.heads;
    let b = id / p.col_tiles / p.row_tiles / p.heads;
    let w_head = (p.head0 + h) / p.group - p.head0 / p.group;
    @each($x $head: a h, w w_head, o h) let $x_at = p.$x.base + b * p.$x.b + $head * p.$x.h;
}

// load_w loads the thread's part of the next 4·QD terms of w, for 4·CQ columns.
@inline fn load_w($to) {
    @unroll for (var n = 0u; n < WN; n++) {
        let e = t + THREADS * n;
        $to[n] = vec4<u32>(0u);
        @if(ALONG == 0u) {
            let x = x0 + e / CQ;
            let column = min(c0 + 4u * (e % CQ), (p.cols - 1u) & 0xfffffffcu);
            if (FULL == 1u || x < p.depth) { $to[n] = stored_w(w_at + x * p.w.s, column, p.cols, p.w.d); }
        } @else {
            let column = min(c0 + e / QD, p.cols - 1u);
            $to[n] = stored_w(w_at + column * p.w.d, x0 + 4u * (e % QD), p.depth, p.w.s);
        }
    }
}
