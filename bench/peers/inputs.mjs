// The inputs of every program, and the samples of its output that are compared. A formula
// instead of a file yields the same numbers everywhere.

/** element returns input number i of a stream (0 q, 1 k, 2 v, 3 the gradient of the output): in [-2, 2), exact in float32. */
export function element(i, stream) {
  let x = (Math.imul(i, 2654435769) + Math.imul(stream + 1, 1663821211)) >>> 0;
  x = Math.imul(x ^ (x >>> 15), 739982445) >>> 0;
  x = (x ^ (x >>> 13)) >>> 0;
  return (x >>> 8) / (1 << 22) - 2;
}

/**
 * operand returns q, k or v of a case: element i of [heads, seq, dim] in order, laid
 * out so ("bhsd") or as [seq, heads, dim] ("bshd").
 */
export function operand({ heads, seq, dim }, stream, layout) {
  const data = new Float32Array(heads * seq * dim);
  let i = 0;
  for (let h = 0; h < heads; h++) {
    for (let s = 0; s < seq; s++) {
      const at = layout === "bshd" ? (s * heads + h) * dim : (h * seq + s) * dim;
      for (let d = 0; d < dim; d++) data[at + d] = element(i++, stream);
    }
  }
  return data;
}

/** samples is the number of elements of an output that are compared. */
export const samples = 64;

/** place returns the head, row and column of sample j; the first is the last row's. */
export function place({ heads, seq, dim }, j) {
  return [j % heads, (seq - 1 + j * 7919) % seq, (j * 31) % dim];
}

/** sampled returns the samples of an output in either layout. */
export function sampled(c, data, layout) {
  return Array.from({ length: samples }, (_, j) => {
    const [h, s, d] = place(c, j);
    const row = layout === "bshd" ? s * c.heads + h : h * c.seq + s;
    return data[row * c.dim + d];
  });
}

/** visible returns the number of visible pairs of query and key over all heads. */
export function visible({ heads, seq, causal }) {
  return heads * (causal ? (seq * (seq + 1)) / 2 : seq * seq);
}

/**
 * flops counts two products of dim operations, 2 each, for each visible pair, and five more
 * of the backward pass.
 */
export const flops = (c) => visible(c) * (c.backward ? 14 : 4) * c.dim;
