// How decode.wgsl loads values.

// value_word returns the word with the element at position i of value_at.
@if(PACK == 1u) fn value_word(i: u32) -> u32 { return v[select(i, i >> 1u, EL == 8u)]; }

// value returns the element at position i, given its value_word.
fn value(word: u32, i: u32) -> f32 {
    if (KV == 0u) { return bitcast<f32>(word); }
    let bits = word >> ((i & 1u) * 16u);
    if (KV == 1u) { return unpack2x16float(bits).x; }
    return bitcast<f32>(bits << 16u);
}

// column_at returns the column at place w of a row of staged. Neighbouring threads write 16 bytes of VWIDE rows
// next to each other: columns 0 to 3, 8 to 11 and so on, then the others.
fn column_at(w: u32) -> u32 {
    return select(w, w / 4u % LN * 8u + w / (4u * LN) * 4u + w % 4u, VWIDE == 1u);
}

// load_line loads a line of values that are staged: key $key of the tile, and the next ones of a word.
@inline fn load_line($turn, $key) {
    @unroll for (var c = 0u; c < PACK; c++) {
        let in_block = min((t + THREADS * x) / LN, AHEAD / PACK - 1u) * PACK + c;
        let i = value_at(v_start[x], c, v_limit[x], lines[x], $turn, $key);
        @if(KV == 5u) {
            values[8u * x + 2u * c] = v[i >> 1u];
            values[8u * x + 2u * c + 1u] = v[(i + 1u) >> 1u];
            odd = odd | ((i & 1u) << (4u * x + c));
        } @else @if(VWIDE == 0u) {
            values[PACK * x + c] = v[i];
        } @else {
            let loaded = v[i];
            @unroll for (var e = 0u; e < 4u; e++) { values[(PACK * x + c) * 4u + e] = loaded[e]; }
        }
    }
}

// first_values loads the first values. Lines begin with the thread's columns, and where values are staged with
// loads t % LN of PACK neighbouring keys.
@inline fn first_values() {
    let v_step = p.v.s / UNIT;
    var lines: array<u32, LINES>; // in a row
    var v_start, v_limit: array<u32, LINES>;
    @unroll for (var x = 0u; x < LINES; x++) {
        let n = t + THREADS * x;
        var key_of_value = 0u;
        @if(PACK == 1u) {
            lines[x] = min(n, p.vdim - 1u) * p.v.d;
        } @else {
            lines[x] = min(n % LN, (p.vdim - 1u) / (4u * QUADS / LN)) + min(SCALES, 1u); // q8 has its scale first
            @if(KV == 5u) lines[x] = pair_of(lines[x] - 1u);
            key_of_value = n / LN * PACK;
        }
        v_start[x] = v_at + lines[x] + (tile_start + key_of_value) * v_step;
        v_limit[x] = v_at + lines[x] + last_key * v_step;
    }
    var values: array<u32, VN>; // words of the next values: [key][column] or [line][key % PACK]
    var odd = 0u; // bits of the pairs of q4 that begin in the middle of a word
    @unroll for (var x = 0u; x < LINES; x++) {
        @if(PACK != 1u) { @inline load_line(turn, in_block); } @else {
            @unroll for (var n = 0u; n < AHEAD; n++) {
                values[n * COLS + x] = value_word(value_at(v_start[x], n, v_limit[x], lines[x], turn, n));
            }
        }
    }
}

// stage_values puts the values that were loaded into staged, and loads the next ones.
@inline fn stage_values() {
    workgroupBarrier();
    @unroll for (var x = 0u; x < LINES; x++) {
        let n = t + THREADS * x;
        @if(KV == 5u) {
            var bytes: vec4<u32>;
            @unroll for (var c = 0u; c < 4u; c++) {
                bytes[c] = aligned(values[8u * x + 2u * c], values[8u * x + 2u * c + 1u], odd >> (4u * x + c));
            }
            bytes = transposed(bytes);
            staged[n / LN][n % LN / 4u * 8u + n % 4u] = nibbles(bytes, 0u);
            staged[n / LN][n % LN / 4u * 8u + n % 4u + 4u] = nibbles(bytes, 16u);
        }
        @if(PACK == 4u) @if(KV != 5u) {
            staged[n / LN][n % LN] = transposed(vec4<u32>(values[4u * x], values[4u * x + 1u], values[4u * x + 2u], values[4u * x + 3u]));
        }
        @if(PACK == 2u) @unroll for (var e = 0u; e < 2u; e++) {
            let first_key = vec2<u32>(values[8u * x + 2u * e], values[8u * x + 2u * e + 1u]);
            let second_key = vec2<u32>(values[8u * x + 2u * e + 4u], values[8u * x + 2u * e + 5u]);
            staged[n / LN][n % LN + e * LN] = transposed_halves(first_key, second_key);
        }
    }
    workgroupBarrier();
    odd = 0u;
    @unroll for (var x = 0u; x < LINES; x++) { @inline load_line(after_turn, after_in + in_block); }
}

// four_values declares y, the values of the n-th four keys, and loads the values that follow.
@inline fn four_values() {
    var y: array<vec4<f32>, COLS>; // of four keys
    @unroll for (var x = 0u; x < COLS; x++) {
        let in_row = min(t % (THREADS / SIDES) + THREADS / SIDES * x, 4u * QUADS - 1u);
        @if(PACK == 4u) {
            let word = staged[n][in_row / 4u][in_row % 4u];
            @if(KV == 6u) y[x] = eighths(word);
            @else y[x] = integers(word) * scales[in_row / 32u % VB * SN + j / AHEAD][n];
        }
        @if(PACK == 2u) {
            let word = staged[2u * n][in_row / 4u][in_row % 4u];
            let word1 = staged[2u * n + 1u][in_row / 4u][in_row % 4u];
            @inline halves(y[x], word, word1, KV);
        }
        @if(PACK == 1u) @unroll for (var c = 0u; c < 4u; c++) {
            let at = value_at(v_here[x], 4u * n + c, v_limit[x], lines[x], turn, j + 4u * n + c);
            let at_after = value_at(v_start[x], 4u * n + c, v_limit[x], lines[x], after_turn, after_in + 4u * n + c);
            y[x][c] = value(values[(4u * n + c) * COLS + x], at);
            values[(4u * n + c) * COLS + x] = value_word(at_after);
        }
    }
}
