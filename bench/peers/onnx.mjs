// The models for ONNX Runtime, with one attention operator each, as the bytes of ONNX's
// protobuf messages (onnx.proto).

const text = new TextEncoder();

function varint(n) {
  const out = [];
  for (; n > 127; n = Math.floor(n / 128)) out.push((n % 128) | 128);
  out.push(n);
  return out;
}

// The wire types: a number, 32 bits, a length with as many bytes.
const int = (field, n) => [...varint(field * 8), ...varint(n)];
const bytes = (field, b) => [...varint(field * 8 + 2), ...varint(b.length), ...b];
const string = (field, s) => bytes(field, text.encode(s));
const message = (field, ...parts) => bytes(field, parts.flat());

/** types are the element types (TensorProto.DataType) by their names in JavaScript. */
export const types = { float32: 1, int8: 3, int32: 6, int64: 7, float16: 10 };
const { float32: FLOAT, int32: INT32 } = types;

// value is a ValueInfoProto: a name, an element type and a shape.
const value = (field, [name, type, shape]) =>
  message(field, string(1, name),
    message(2, message(1, int(1, type), message(2, ...shape.map((n) => message(1, int(1, n)))))));

// attribute is an AttributeProto with an integer, or with a string or a number as { float }.
const attribute = (field, [name, x]) => message(field, string(1, name), ...(
  typeof x === "string" ? [string(4, x), int(20, 3)]
  : typeof x === "object" ? [2 * 8 + 5, ...new Uint8Array(Float32Array.of(x.float).buffer), int(20, 1)]
  : [int(3, x), int(20, 2)]));

const microsoft = "com.microsoft";

/** model returns the bytes of a ModelProto with one node. */
export function model({ op, domain, inputs, outputs, attributes }) {
  const named = (list) => list.map((v) => (v ? v[0] : "")); // "" is an optional input left out
  const node = message(1,
    ...named(inputs).map((name) => string(1, name)),
    ...named(outputs).map((name) => string(2, name)),
    string(4, op),
    ...Object.entries(attributes).map((a) => attribute(5, a)),
    string(7, domain));
  const graph = message(7, node, string(2, "attention"),
    ...inputs.filter(Boolean).map((v) => value(11, v)),
    ...outputs.filter(Boolean).map((v) => value(12, v)));
  return Uint8Array.from([
    int(1, 10), // ir_version
    graph,
    message(8, string(1, ""), int(2, 23)), // opset_import
    message(8, string(1, microsoft), int(2, 1)),
  ].flat());
}

/**
 * operators are ONNX Runtime's three attention operators: what they are given for a
 * case, and how rows lie in it.
 */
export const operators = {
  MultiHeadAttention: (c) => {
    const x = [c.batch ?? 1, c.seq, c.heads * c.dim], kv = [c.batch ?? 1, c.keys ?? c.seq, c.heads * c.dim];
    return {
      layout: "bshd", op: "MultiHeadAttention", domain: microsoft,
      inputs: [["q", FLOAT, x], ["k", FLOAT, kv], ["v", FLOAT, kv]],
      outputs: [["o", FLOAT, x]],
      attributes: { num_heads: c.heads, unidirectional: c.causal ? 1 : 0 },
    };
  },
  Attention: (c) => {
    const x = [c.batch ?? 1, c.heads, c.seq, c.dim], kv = [c.batch ?? 1, c.kvHeads ?? c.heads, c.keys ?? c.seq, c.dim];
    return {
      layout: "bhsd", op: "Attention", domain: "",
      inputs: [["q", FLOAT, x], ["k", FLOAT, kv], ["v", FLOAT, kv]],
      outputs: [["o", FLOAT, x]],
      attributes: { is_causal: c.causal ? 1 : 0 },
    };
  },
  // Always causal, and the only operator that skips hidden pairs. It also writes its cache,
  // which holds the keys before the last rows where the case has more keys than rows.
  GroupQueryAttention: (c) => {
    const kvHeads = c.kvHeads ?? c.heads;
    const x = [1, c.seq, c.heads * c.dim], kv = [1, c.seq, kvHeads * c.dim], cache = [1, kvHeads, c.keys ?? c.seq, c.dim];
    const past = (name) => (c.keys ? [name, FLOAT, cache] : null);
    return {
      layout: "bshd", op: "GroupQueryAttention", domain: microsoft,
      inputs: [["q", FLOAT, x], ["k", FLOAT, kv], ["v", FLOAT, kv], past("past_k"), past("past_v"),
        ["last", INT32, [1]], ["total", INT32, [1]]],
      outputs: [["o", FLOAT, x], ["present_k", FLOAT, cache], ["present_v", FLOAT, cache]],
      attributes: { num_heads: c.heads, kv_num_heads: kvHeads, ...(c.window && { local_window_size: c.window }) },
    };
  },
};
