// Parts of the kernels on matrix units.

// Types name columns first.
alias Left = subgroup_matrix_left<f16, K, M>;
alias Right = subgroup_matrix_right<f16, N, K>;
alias Result = subgroup_matrix_result<f32, N, M>;

// halves_of returns x in f16.
fn halves_of(x: vec4<f32>) -> vec2<u32> { return bitcast<vec2<u32>>(vec4<f16>(x)); }

// power_of_two returns 2^(exponent - 127).
fn power_of_two(exponent: u32) -> f32 { return bitcast<f32>(exponent << 23u); }

// magnitude returns the bits of |x|.
fn magnitude(x: vec4<f32>) -> vec4<u32> { return bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu); }

// fits reports which x are not 0 and have one of the SPAN exponents up to top.
fn fits(x: vec4<f32>, top: u32) -> vec4<bool> {
    let low = (max(top, SPAN) - SPAN + 1u) << 23u;
    return magnitude(x) - vec4<u32>(low) < vec4<u32>(((top + 1u) << 23u) - low);
}

// is_odd reports which x of bf16 and f32 are neither 0 nor fit, and which x of f16 are not finite.
fn is_odd(x: vec4<f32>, top: u32) -> vec4<bool> {
    @if(IN != 1u) return (magnitude(x) != vec4<u32>(0u)) & !fits(x, top);
    @else return magnitude(x) >= vec4<u32>(0x7f800000u);
}

// lifted returns x times the power of two that brings the exponent top to TOP. Odd x become 0.
fn lifted(x: vec4<f32>, top: u32) -> vec4<f32> {
    let scaled = bitcast<vec4<u32>>(x) + vec4<u32>((TOP - top) << 23u);
    return bitcast<vec4<f32>>(select(vec4<u32>(0u), scaled, fits(x, top)));
}

// not_a_number returns a NaN.
fn not_a_number() -> f32 {
    let bits = 0x7fc00000u;
    return bitcast<f32>(bits);
}

// store_columns and load_columns move turn c of $COUNT matrices in a row, SN at once, to and from workgroup memory.
@inline fn store_columns($acc, $COUNT) {
    @unroll(deep) for (var n = 0u; n < $COUNT; n++) {
        if (c == n / SN) { subgroupMatrixStore<row_major>(&scores[subgroup], n % SN * (N / 4u), $acc[n], SS); }
    }
    workgroupBarrier();
}

@inline fn load_columns($acc, $COUNT) {
    workgroupBarrier();
    @unroll(deep) for (var n = 0u; n < $COUNT; n++) {
        if (c == n / SN) { $acc[n] = subgroupMatrixLoad<Result, row_major>(&scores[subgroup], n % SN * (N / 4u), SS); }
    }
    workgroupBarrier();
}
