// What the options of a call do to the scores of four rows with one key.

// Scores are the scores of four rows with one key, before their unit.
struct Scores {
    x: vec4<f32>,
    hidden: vec4<bool>,
}

// has reports whether the call has the option with a constant and a flag.
fn has(option: u32, flag: u32) -> bool {
    return option == 1u || (option == 2u && (p.flags & flag) != 0u);
}

// Pairs holds where four rows of block masks and biases begin.
struct Pairs {
    blocks, bias, relative: vec4<u32>,
}

// pairs_of clamps rows to those of the box, because hidden pairs are read too.
fn pairs_of(batch: u32, head: u32, row: u32) -> Pairs {
    let rows = min(vec4<u32>(row) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(p.rows - 1u));
    var r: Pairs;
    @each($x: bias, relative) r.$x = vec4<u32>(p.$x.base + batch * p.$x.b + head * p.$x.h) + rows * vec4<u32>(p.$x.s);
    r.blocks = vec4<u32>(0u);
    if (has(BLOCKED, HAS_BLOCKS)) {
        r.blocks = vec4<u32>(p.blocked.base + batch * p.blocked.b + head * p.blocked.h)
            + (rows + vec4<u32>(p.row0)) / vec4<u32>(p.block_q) * vec4<u32>(p.blocked.s);
    }
    return r;
}

// paired applies block masks, biases and slopes to the scores of four rows of the box, from row on, with key j
// of the chunk. It reads them for hidden pairs too: without branches, a compiler loads many at once. Slopes
// without a bias are already in the scores, because they hide nothing.
fn paired(given: Scores, pairs: Pairs, batch: u32, head: u32, row: u32, j: u32) -> Scores {
    var w = given;
    let key = key_of(batch, j);
    @if(BLOCKED != 0u) if (has(BLOCKED, HAS_BLOCKS)) {
        let column = (p.key0 + key) / p.block_k * p.blocked.d;
        @unroll(deep) for (var r = 0u; r < 4u; r++) {
            let base = pairs.blocks[r];
            let seen = block(base + column) != 0u;
            w.hidden[r] = w.hidden[r] | !seen;
        }
    }
    @if(BIASES == 1u) @unroll for (var r = 0u; r < 4u; r++) {
        let base = pairs.bias[r];
        let bits = bias[base + key * p.bias.d];
        let y = bounded(bitcast<f32>(bits), MAX_BIAS);
        w.hidden[r] = w.hidden[r] | (bits == MINUS_INF);
        w.x[r] = fma(w.x[r], p.unit, y * LOG2E);
    }
    @if(BIASES == 2u) if ((p.flags & HAS_BIAS) != 0u) {
        let away = i32(p.row0 + row) + p.offset + offset_of(batch) - i32(p.key0 + key);
        @unroll(deep) for (var r = 0u; r < 4u; r++) {
            let base = pairs.bias[r];
            let start = pairs.relative[r];
            let y = biases(base + key * p.bias.d, start + key * p.relative.d, batch, head, away + i32(r));
            w.hidden[r] = w.hidden[r] | (bitcast<u32>(y) == MINUS_INF);
            w.x[r] = fma(w.x[r], p.unit, y * LOG2E);
        }
    }
    return w;
}

// marks returns a bit for each of 32 keys of the chunk, from j on: 1 where the row of the mask that begins at
// element at shows the key. Bits after the last key have no meaning.
fn marks(batch: u32, at: u32, j: u32) -> u32 {
    var r = 0u;
    if (LISTED == 0u && p.mask.d == 1u) {
        let last = (at + p.keys - 1u) >> 2u;
        let first = (at + j) >> 2u;
        let shift = ((at + j) & 3u) * 8u;
        var word = mask[min(first, last)];
        @unroll(deep) for (var n = 0u; n < 8u; n++) {
            let next = mask[min(first + n + 1u, last)];
            let four = (word >> shift) | ((next << (31u - shift)) << 1u);
            // The highest bit of each byte that is not 0, then these bits next to each other.
            let high = (((four & 0x7f7f7f7fu) + 0x7f7f7f7fu) | four) & 0x80808080u;
            r |= (((high >> 7u) * 0x01020408u) >> 24u) << (4u * n);
            word = next;
        }
    } else {
        for (var n = 0u; n < 32u; n++) {
            if (unmasked(at + key_of(batch, min(j + n, p.keys - 1u)) * p.mask.d)) { r |= 1u << n; }
        }
    }
    return r;
}
