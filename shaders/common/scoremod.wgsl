// The score mod of a call, with MOD = 1: a function score_mod of the program, and score_derivative for gradients.
// VALUES is where its values are: 0 without, 1 in mask, 2 in bias, 3 in table.

// Texts call these, without mod_, and no others. They have no other access to memory.

fn mod_values() -> u32 { return p.values; }

fn mod_value(n: u32) -> f32 {
    var word = 0u;
    let at = p.values_at + min(n, p.values - 1u);
    @if(VALUES == 1u) word = mask[at];
    @if(VALUES == 2u) word = bias[at];
    @if(VALUES == 3u) word = table[at];
    return bitcast<f32>(word);
}

fn mod_hidden() -> f32 { return negative_infinity(); }

fn precise_tanh(x: f32) -> f32 { return tanh_acc(vec4<f32>(x)).x; }

fn precise_exp2(x: f32) -> f32 { return exp2_acc(vec4<f32>(x)).x; }

// $f returns the function of four scaled scores of rows of the box and keys of the chunk.
@each($f $text: modified score_mod, derived score_derivative)
fn $f(s: vec4<f32>, batch: u32, head: u32, row: vec4<u32>, key: vec4<u32>) -> vec4<f32> {
    let b = batch + p.mod_batch;
    let h = head + p.mod_head;
    let i = row + vec4<u32>(p.mod_row + u32(offset_of(batch)));
    let j = vec4<u32>(key_of(batch, key.x), key_of(batch, key.y), key_of(batch, key.z), key_of(batch, key.w)) + vec4<u32>(p.mod_key);
    return vec4<f32>($text(s.x, b, h, i.x, j.x), $text(s.y, b, h, i.y, j.y), $text(s.z, b, h, i.z, j.z), $text(s.w, b, h, i.w, j.w));
}

// mod_hides reports which results of a score mod hide their keys.
fn mod_hides(s: vec4<f32>) -> vec4<bool> { return bitcast<vec4<u32>>(s) == vec4<u32>(MINUS_INF); }

// capped returns tanh of scores over the softcap: of dot products, or of results of the score mod.
fn capped(x: vec4<f32>) -> vec4<f32> {
    @if(MOD == 1u) return select(tanh_acc(x / p.softcap), x, mod_hides(x));
    @else return tanh_acc(x * p.scale / p.softcap);
}
