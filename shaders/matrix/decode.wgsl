// What decoding on matrix units leaves for splitmerge.wgsl.

const WIDTH: u32 = COLUMNS / 4u + 5u; // vec4 of a row's state for one split, as in splitmerge.wgsl
const MOST_SUM: u32 = 16u; // sums of 256 weights are at most 2^16

// write_split writes the state of the rows. Where a row has met a huge value, its output may overflow for weights of more
// than 1: a factor of 2^-MOST_SUM goes to m.
@inline fn write_split() {
    let at = (((batch * p.heads + h0) * p.rows + r0) * p.splits + p.part0 + split) * WIDTH;
    for (var c = 0u; c < TURNS; c++) {
        @inline store_columns(acc, ON);
        @unroll for (var h = 0u; h < EACH; h++) {
            let line = lane / PER + h * STEP;
            for (var x = lane % PER; x < KEYS / 4u; x += PER) {
                var y = scores[subgroup][line * SS + x];
                @if(IN != 1u) y = y * power_of_two(select(127u, 191u - MOST_SUM, huge_row[h]) - UP);
                if (r0 + subgroup * M + line <= last && c * (KEYS / 4u) + x < COLUMNS / 4u) {
                    state[at + (subgroup * M + line) * p.splits * WIDTH + c * (KEYS / 4u) + x] = y;
                }
            }
        }
        workgroupBarrier();
    }
    @unroll for (var h = 0u; h < EACH; h++) {
        let line = subgroup * M + lane / PER + h * STEP;
        var sum = l[h];
        @unroll for (var y = 0u; y < HALVINGS; y++) { sum += subgroupShuffleXor(sum, 1u << y); }
        @if(IN != 1u) if (huge_row[h]) {
            sum = sum * power_of_two(127u - MOST_SUM);
            m[h] = m[h] + f32(MOST_SUM);
        }
        if (lane % PER == 0u && r0 + line <= last) {
            state[at + line * p.splits * WIDTH + WIDTH - 5u].x = sum;
            state[at + line * p.splits * WIDTH + WIDTH - 1u].x = m[h];
        }
    }
}
