// What decoding on matrix units leaves for splitmerge.wgsl.

const WIDTH: u32 = COLUMNS / 4u + 5u; // vec4 of a row's state for one split, as in splitmerge.wgsl

// write_split writes the state of the rows. The output of a row that has met a huge value may overflow, as weights are up to 2^SLACK.
// It gets a factor of 2^-up, with which the sum of the weights is less than 1.
@inline fn write_split() {
    let at = (((batch * p.heads + h0) * p.rows + r0) * p.splits + p.part0 + split) * WIDTH;
    var up: array<u32, EACH>;
    @unroll for (var h = 0u; h < EACH; h++) {
        let line = subgroup * M + lane / PER + h * STEP;
        var sum = l[h];
        @unroll for (var y = 0u; y < HALVINGS; y++) { sum += subgroupShuffleXor(sum, 1u << y); }
        @if(IN != 1u) if (huge_row[h]) {
            up[h] = (bitcast<u32>(sum) >> 23u) - 126u;
            sum = sum * power_of_two(127u - up[h]);
            m[h] = m[h] + f32(up[h]);
        }
        if (lane % PER == 0u && r0 + line <= last) {
            state[at + line * p.splits * WIDTH + WIDTH - 5u].x = sum;
            state[at + line * p.splits * WIDTH + WIDTH - 1u].x = m[h];
        }
    }
    for (var c = 0u; c < TURNS; c++) {
        @inline store_columns(acc, ON);
        @unroll for (var h = 0u; h < EACH; h++) {
            let line = lane / PER + h * STEP;
            for (var x = lane % PER; x < KEYS / 4u; x += PER) {
                var y = scores[subgroup][line * SS + x];
                @if(IN != 1u) {
                    let far = far_of(y, huge_row[h]);
                    y = near(y, far) * either_power(127u - UP - up[h], 191u - UP - up[h], far);
                }
                if (r0 + subgroup * M + line <= last && c * (KEYS / 4u) + x < COLUMNS / 4u) {
                    state[at + (subgroup * M + line) * p.splits * WIDTH + c * (KEYS / 4u) + x] = y;
                }
            }
        }
        workgroupBarrier();
    }
}
