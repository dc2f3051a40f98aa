// How decode.wgsl loads keys, and stages them in kv.

// key_at and value_at return where the row of a key begins, plus in_row: n keys after start but not after limit,
// which include in_row, and number in_tile of its tile. Callers keep start in a variable: compilers would turn
// j·s + n·s into (j + n)·s, another addition for each n.
@each($f $x $UNIT: key_at k KUNIT, value_at v UNIT)
fn $f(start: u32, n: u32, limit: u32, in_row: u32, turn: u32, in_tile: u32) -> u32 {
    @if(PAGED == 0u) return min(start + n * (p.$x.s / $UNIT), limit);
    @else return rows_$x[turn * BC + in_tile] + in_row;
}

// word_k returns word w of the row of k that begins at element at, as if its elements were contiguous, with
// zeros beyond the row's end.
@if(WIDE == 0u) fn word_k(at: u32, w: u32) -> u32 {
    var r = 0u;
    @if(KV == 0u) r = select(0u, k[at + min(w, p.dim - 1u) * p.k.d], w < p.dim);
    @if(EL == 8u) {
        let i = at + min(2u * w, p.dim - 1u) * p.k.d;
        let i1 = at + min(2u * w + 1u, p.dim - 1u) * p.k.d;
        let lower = select(0u, (k[i >> 1u] >> ((i & 1u) * 16u)) & 0xffffu, 2u * w < p.dim);
        let upper = select(0u, (k[i1 >> 1u] >> ((i1 & 1u) * 16u)) << 16u, 2u * w + 1u < p.dim);
        r = lower | upper;
    }
    return r;
}

// pair_of returns which 16-bit element of a row of q4 is the first of the n-th pair. Four pairs hold a block's
// integers, in each byte those of element 4·(n % 4) + 0..3 and of the element 16 later.
fn pair_of(n: u32) -> u32 { return n / 4u * 9u + 1u + n % 4u * 2u; }

// Stage is what a thread loads of a stage of K.
struct Stage {
    x: array<vec4<u32>, KLOADS>, // of q4 two pairs each, in two words each
    odd: u32, // bits of the pairs that begin in the middle of a word
}

// fetch returns the thread's part of a stage of a tile, the depths from d0 on. Keys after limit are replaced
// by that one, depths beyond the end by the last ones.
fn fetch(t: u32, start: u32, limit: u32, turn: u32, d0: u32) -> Stage {
    var r: Stage;
    @unroll for (var n = 0u; n < KLOADS; n++) {
        @if(WIDE == 1u) {
            var d = d0 + t % 4u * EL;
            @if(FULL == 0u) d = min(d, p.dim - EL);
            let in_tile = min(t / 4u + THREADS / 4u * n, BC - 1u);
            r.x[n] = k[key_at(start + d / EL, THREADS / 4u * n, limit + d / EL, d / EL, turn, in_tile)];
        } @else @if(KV == 5u) {
            let at = pair_of(min(d0 / 8u + t % 8u, p.dim / 8u - 1u));
            @unroll for (var c = 0u; c < 2u; c++) {
                let in_tile = min(t / 8u + THREADS / 8u * (2u * n + c), BC - 1u);
                let i = key_at(start + at, THREADS / 8u * (2u * n + c), limit + at, at, turn, in_tile);
                r.x[n][2u * c] = k[i >> 1u];
                r.x[n][2u * c + 1u] = k[(i + 1u) >> 1u];
                r.odd = r.odd | ((i & 1u) << (2u * n + c));
            }
        } @else {
            @unroll for (var c = 0u; c < 4u; c++) {
                let w = d0 * 4u / EL + t % 16u;
                let in_tile = min(t / 16u + THREADS / 16u * (4u * n + c), BC - 1u);
                @if(EL == 16u) {
                    let at = SCALES + min(w, (p.dim - 1u) / 4u); // q8 has its scale first
                    r.x[n][c] = k[key_at(start + at, THREADS / 16u * (4u * n + c), limit + at, at, turn, in_tile)];
                } @else {
                    r.x[n][c] = word_k(key_at(start, THREADS / 16u * (4u * n + c), limit, 0u, turn, in_tile), w);
                }
            }
        }
    }
    return r;
}

// place returns where granule g of a key lies in kv. Lanes with neighbouring keys and the same g use different
// banks, and so do lanes with the same key and different g.
fn place(key: u32, g: u32) -> u32 {
    return key * 4u + (g ^ ((key >> 1u) & 3u));
}

// stage puts a thread's part of a stage into kv.
fn stage(t: u32, next_stage: Stage) {
    var r = next_stage;
    @unroll for (var n = 0u; n < KLOADS; n++) {
        @if(WIDE == 1u) {
            let x = t + THREADS * n;
            if (KN % THREADS == 0u || x < KN) { kv[place(x / 4u, x % 4u)] = r.x[n]; }
        } @else @if(KV == 5u) {
            @unroll for (var c = 0u; c < 2u; c++) {
                let x = t + THREADS * (2u * n + c);
                let bytes = vec4<u32>(aligned(r.x[n][2u * c], r.x[n][2u * c + 1u], r.odd >> (2u * n + c)));
                if (KN % THREADS == 0u || x < 2u * KN) {
                    kv[place(x / 8u, x / 4u % 2u * 2u)][x % 4u] = nibbles(bytes, 0u).x;
                    kv[place(x / 8u, x / 4u % 2u * 2u + 1u)][x % 4u] = nibbles(bytes, 16u).x;
                }
            }
        } @else {
            @unroll for (var c = 0u; c < 4u; c++) {
                let x = t + THREADS * (4u * n + c);
                if (KN % THREADS == 0u || x < 4u * KN) {
                    kv[place(x / 16u, x / 4u % 4u)][x % 4u] = r.x[n][c];
                }
            }
        }
    }
}

// load_scale sets $to to the scale of key $j + t of $x, for q4 to a sixteenth of that of block $n.
@inline fn load_scale($to, $x, $f, $at, $j, $step, $turn, $n) {
    let at = (KV - 4u) * 9u * ($n);
    let i = $f($at + at + ($j + t) * $step, 0u, $at + at + last_key * $step, at, $turn, min(t, BC - 1u));
    @if(KV == 4u) $to = bitcast<f32>($x[i]);
    @else $to = scale4($x[i >> 1u], i);
}

// first_keys loads the first stage of K. k_start and k_limit are the positions of the thread's first key of the
// next tile to load from, and of the last key.
@inline fn first_keys() {
    var key_of_line = t / 16u;
    @if(WIDE == 1u) key_of_line = t / 4u;
    @if(KV == 5u) key_of_line = t / 8u;
    let k_step = p.k.s / KUNIT;
    var k_start = k_at / KUNIT + (tile_start + key_of_line) * k_step;
    let k_limit = k_at / KUNIT + last_key * k_step;
    var next_stage = fetch(t, k_start, k_limit, turn, 0u);
    var next_scale: vec2<f32>; // of key t of the next tile, or of its two blocks of the next stage
    @if(SCALES != 0u) @unroll for (var e = 0u; e < SCALES; e++) {
        let n = min(e, p.dim / 32u - 1u);
        @inline load_scale(next_scale[e], k, key_at, k_at, tile_start, k_step, turn, n);
    }
}

// look_up_rows puts where the rows of a tile from key $j on begin in pages into rows_k and rows_v.
@inline fn look_up_rows($j, $turn) {
    let j = min($j + min(t, BC - 1u), last_key);
    let next_k = k_row(k_at, b, j) / KUNIT;
    let next_v = v_row(v_at * UNIT, b, j) / UNIT;
    workgroupBarrier();
    if (t < BC) {
        rows_k[$turn * BC + t] = next_k;
        rows_v[$turn * BC + t] = next_v;
    }
    workgroupBarrier();
}
