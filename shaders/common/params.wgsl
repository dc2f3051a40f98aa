// Parameters that several kernels share. From these structures and those in the kernels'
// files, _generate makes Go types and encoders.

// Strides are the element strides of an operand's four axes; base is the index of its
// element 0 in the binding. WGSL requires the padding of structures inside a uniform.
struct Strides {
    base, b, h, s, d: u32,
    pad0, pad1, pad2: u32,
}

// AttentionParams are the parameters of the kernels that compute scores, each of which
// reads some of the fields. A call is cut into boxes (ranges of batches, query heads and
// queries), and a box into chunks (ranges of keys).
@ranged struct AttentionParams {
    blocks: u32, // query blocks
    heads: u32, // query heads of the box
    head0: u32, // index in the call of the box's first query head
    group: u32, // query heads for each key head
    kv_heads: u32, // key heads of the box
    rows: u32, // queries of the box
    row0: u32, // index in the call of the first
    keys: u32, // keys of the chunk
    key0: u32, // index in the call of the first, a multiple of the tile size
    all_keys: u32, // keys of the call
    parts: u32, // splits of the chunk; gradients: parts of the columns
    part0: u32, // splits of the box before the chunk
    splits: u32, // splits of the box; gradients: vec4 of a row of state
    dim: u32, // D
    vdim: u32, // Dv
    running: u32, // position of the unfinished split's state, in vec4; flash only
    scale, softcap: f32,
    unit: f32, // log2(e) times softcap if there is one, else log2(e) times scale
    lo: i32, // row i sees key j when i + lo <= j < min(i + hi, klen); offsets are added to i, as also to offset and mod_row
    hi: i32,
    flags: u32,
    bias_type: u32, // 0 without a bias, else 1 + its type
    relative_type: u32, // 0 without a relative bias, else 1 + its type
    out_type: u32, // type of o
    offset: i32, // slopes measure the distance of key j from i + offset
    slope_b: u32, // slopes of a batch in the table, 0 when all batches share them
    block_q: u32, // rows of a block of the block mask
    block_k: u32, // keys of a block of the block mask
    threshold: u32, // dropout keeps a weight whose random word is at least this
    seed0, seed1: u32,
    drop_batch: u32, // added to batch, head, row and key in dropout's counter
    drop_head, drop_row, drop_key: u32,
    keep: f32, // dropout multiplies weights by this; 1 without dropout
    page: u32, // keys of a page
    pages: u32, // pages of a batch in the table
    table_at: u32, // position of the first batch's pages in the table
    page_bits: u32, // log2 of page, 32 when page is not a power of 2
    batch_heads: u32, // query heads of the box in all batches; gradients: owners of results
    mod_batch: u32, // added to batch, head, row and key for the score mod
    mod_head, mod_row, mod_key: u32,
    values: u32, // of the score mod
    values_at: u32, // position of the first in its binding
    batch_at: u32, // position of the first batch's count of listed keys in the table, or of the first packed sequence in mask
    s: Strides, // scores of the softmax stage
    q, k, v, o, lse, mask, bias: Strides,
    blocked: Strides, // of the block mask, in blocks
    relative: Strides, // of the relative bias; s is -d
    klen, offsets: array<vec4<i32>, 16>, // of up to 64 batches
    slopes: array<vec4<f32>, 16>, // of up to 64 heads, batch by batch unless slope_b is 0
    sinks: array<vec4<f32>, 16>, // of up to 64 heads, -Inf where there is none, in units of log 2 but for softmax
}

// MatmulParams are the parameters of matmul.wgsl and matrixproduct.wgsl.
@ranged struct MatmulParams {
    row_tiles, col_tiles: u32,
    heads: u32, // heads of the box
    head0: u32, // index in the call of the first
    group: u32, // heads of a for each head of w
    rows, cols: u32,
    depth: u32, // terms of a sum in the chunk
    flags: u32, // GO_ON, LEAVE
    bias_type: u32, // 0: no bias, else 1 + its type
    out_type: u32, // type of o
    bias_base, bias_stride: u32,
    a: Strides,
    w: Strides, // s along x, d along n
    o: Strides,
}

// Bits of flags.
const GO_ON: u32 = 1u; // continue from state
const LEAVE: u32 = 2u; // leave state for the next chunk
const WANT_LSE: u32 = 4u;
const HAS_KLEN: u32 = 8u;
const HAS_MASK: u32 = 16u;
const HAS_SOFTCAP: u32 = 32u;
const HAS_SLOPES: u32 = 64u;
const HAS_SINKS: u32 = 128u;
const HAS_BLOCKS: u32 = 256u;
const HAS_DROPOUT: u32 = 512u;
const HAS_BIAS: u32 = 1024u; // of either kind
const SUMS: u32 = 2048u; // the first phase of the softmax stage
const WEIGHTS: u32 = 4096u; // the second phase
const HAS_OFFSETS: u32 = 8192u;
const HAS_COUNTS: u32 = 16384u; // of listed keys, in the table

// LinearParams are the parameters of linear.wgsl and matrixlinear.wgsl.
@ranged struct LinearParams {
    blocks: u32, // of 16 columns
    heads: u32, // states of a batch
    head0: u32, // index in the call of the box's first output head
    group: u32, // output heads of a state
    query_group: u32, // output heads that share a query head
    key_group: u32, // output heads that share a key head
    tokens: u32,
    dim: u32, // K
    vdim: u32, // columns of the box
    held: u32, // tokens that are staged together, at most 16
    slots: u32, // rows of a token that are staged
    queries: u32, // of them, those of queries
    decayed: u32, // 1: decays of heads, 2: of channels
    delta: u32, // 1: the delta rule
    starts: u32, // with the state in 1: past, 2: present; 0: with zeros
    leaves: u32, // 1: present is written
    query_type: u32, // type of query: 0 f32, 1 f16, 2 bf16
    key_type, value_type, decay_type, beta_type: u32,
    out_type: u32, // type of o
    scale: f32,
    query, key, value, decay, beta, past, o, present: Strides,
}
