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
 * operand returns q, k or v of a case: element i of [batch, heads, seq, dim] in order, laid
 * out so ("bhsd") or as [batch, seq, heads, dim] ("bshd"). k and v have as many rows as the
 * case has keys, and heads of their own where they serve several of q.
 */
export function operand({ batch = 1, heads: qHeads, kvHeads = qHeads, seq, keys = seq, dim }, stream, layout) {
  const [rows, heads] = stream === 1 || stream === 2 ? [keys, kvHeads] : [seq, qHeads];
  const data = new Float32Array(batch * heads * rows * dim);
  let i = 0;
  for (let b = 0; b < batch; b++) {
    for (let h = 0; h < heads; h++) {
      for (let s = 0; s < rows; s++) {
        const at = layout === "bshd" ? ((b * rows + s) * heads + h) * dim : i;
        for (let d = 0; d < dim; d++) data[at + d] = element(i++, stream);
      }
    }
  }
  return data;
}

/** samples is the number of elements of an output that are compared. */
export const samples = 64;

/** place returns the problem of the batch, the head, row and column of sample j; the first is a last row's. */
export function place({ batch = 1, heads, seq, dim }, j) {
  return [(j * 1009) % batch, j % heads, (seq - 1 + j * 7919) % seq, (j * 31) % dim];
}

/** sampled returns the samples of an output in either layout. */
export function sampled(c, data, layout) {
  return Array.from({ length: samples }, (_, j) => {
    const [b, h, s, d] = place(c, j);
    const row = layout === "bshd" ? (b * c.seq + s) * c.heads + h : (b * c.heads + h) * c.seq + s;
    return data[row * c.dim + d];
  });
}

/** visible returns the number of visible pairs of query and key over all heads. */
export function visible({ batch = 1, heads, seq, keys = seq, causal, window = seq }) {
  return batch * heads * (causal ? (window * (window + 1)) / 2 + (seq - window) * window : seq * keys);
}

/**
 * flops counts two products of dim operations, 2 each, for each visible pair, and five more
 * of the backward pass.
 */
export const flops = (c) => visible(c) * (c.backward ? 14 : 4) * c.dim;
