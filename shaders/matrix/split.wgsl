// Products of f32, as those of matrices of f16: an element x is high + low/2^11, with high the nearest f16 to x and low
// what remains, rounded to f16. Together they hold 23 of its 24 bits or more, and 21 where high is below 2^-12. A product
// is high·high + (high·low + low·high)/2^11, without low·low, which is below 2^-22 of it. The derivation of package oracle
// has the bound.

// low_scores adds the products with low parts to the scores.
@inline fn low_scores() {
    @unroll for (var n = 0u; n < SN; n++) {
        @unroll for (var i = 0u; i < QI; i++) {
            let high = subgroupMatrixLoad<Right, col_major>(&tile_k, n * N * KS + i * (K / UNIT), KS);
            let low = subgroupMatrixLoad<Right, col_major>(&tile_k, (KEYS + n * N) * KS + i * (K / UNIT), KS);
            s[n] = subgroupMatrixMultiplyAccumulate(query[i], low, s[n]);
            s[n] = subgroupMatrixMultiplyAccumulate(query[QI + i], high, s[n]);
        }
        s[n] = subgroupMatrixScalarMultiply(s[n], 0.00048828125);
    }
}

// low_output adds the products with low parts to the output.
@inline fn low_output() {
    @unroll for (var n = 0u; n < ON; n++) {
        acc[n] = subgroupMatrixScalarMultiply(acc[n], 2048.0);
        @unroll for (var i = 0u; i < PI; i++) {
            let high = subgroupMatrixLoad<Right, row_major>(&tile_v, i * K * VS + n * (N / UNIT), VS);
            let low = subgroupMatrixLoad<Right, row_major>(&tile_v, (KEYS + i * K) * VS + n * (N / UNIT), VS);
            acc[n] = subgroupMatrixMultiplyAccumulate(subgroupMatrixLoad<Left, row_major>(&weights[subgroup], i * (K / 4u), PS), low, acc[n]);
            acc[n] = subgroupMatrixMultiplyAccumulate(subgroupMatrixLoad<Left, row_major>(&weights[subgroup], M * PS + i * (K / 4u), PS), high, acc[n]);
        }
        acc[n] = subgroupMatrixScalarMultiply(acc[n], 0.00048828125);
    }
}
