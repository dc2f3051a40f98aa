// The cases, the turns and the figures of run.mjs.

import { flops } from "./inputs.mjs";

const rows = (seq, keys, dim) => ({ seq, keys, dim, causal: false, name: `${seq === 1 ? "1 row" : `${seq} rows`}, ${keys} keys D=${dim}` });

// Prompts of a model whose four heads share keys.
const grouped = (type) => [128, 512].map((seq) => ({ heads: 32, kvHeads: 8, seq, dim: 128, causal: true,
  name: `${type.dtype ? type.dtype + " " : ""}causal H=32,8 S=${seq} D=128`, ...type }));

/** cases of the table, float32, one batch of 8 heads where they do not say otherwise; bf16 has low-precision products. */
export const cases = [
  ...[256, 512, 1024, 2048, 4096, 8192].map((seq) => ({ seq, dim: 64, causal: false })),
  ...[1024, 4096].map((seq) => ({ seq, dim: 128, causal: false })),
  ...[1024, 4096].map((seq) => ({ seq, dim: 64, causal: true })),
  { seq: 4096, dim: 128, causal: true },
  ...[64, 128, 256, 512].map((seq) => ({ seq, dim: 64, causal: true })),
  ...grouped({}),
  ...[1024, 2048, 4096].map((seq) => ({ seq, dim: 64, causal: false, backward: true })),
  ...[1024, 4096].map((seq) => ({ seq, dim: 64, causal: true, backward: true })),
  ...[[64, 64], [128, 64], [256, 64], [1024, 64], [4096, 64], [128, 128], [1024, 128], [4096, 128]].map(([seq, dim]) => ({ seq, dim, causal: false, dtype: "bf16", low: true, name: `bf16 S=${seq} D=${dim}` })),
  ...grouped({ dtype: "bf16", low: true }),
  { ...rows(1, 32768, 128), dtype: "bf16", low: true, name: "bf16 1 row, 32768 keys D=128" },
  rows(1, 32768, 128),
  ...[4, 8, 16, 32].flatMap((seq) => [4096, 32768].flatMap((keys) => [64, 128].map((dim) => rows(seq, keys, dim)))),
  { seq: 8192, dim: 64, causal: true, window: 256, name: "window 256 S=8192 D=64" },
  ...[[1, 8], [4, 8], [8, 16]].map(([seq, dim]) => ({ batch: 100000, heads: 1, seq, dim, causal: false, name: `100000 problems S=${seq} D=${dim}` })),
].map((c) => ({ heads: 8, name: `${c.causal ? "causal" : "plain"} S=${c.seq} D=${c.dim}${c.backward ? " and gradients" : ""}`, ...c }));

// A turn consists of calls for turnSeconds in total, at most maxCalls. A case has the
// requested repetitions, or fewer after caseSeconds, but at least three.
const turnSeconds = 0.05, maxCalls = 50, caseSeconds = 40, leastTurns = 3;

/** median returns the middle value of xs, or the mean of the two middle ones. */
export function median(xs) {
  const s = [...xs].sort((a, b) => a - b);
  const m = s.length >> 1;
  return s.length % 2 ? s[m] : (s[m - 1] + s[m]) / 2;
}

// The outputs are means of numbers in [-2, 2): float32 sums of thousands of them in
// another order differ by some 1e-6, a wrong mask or scale by 1e-2. Of 16 bits the
// output is rounded, and where a peer rounds weights p as well, each by up to 2^-9
// (bf16) or 2^-12 (f16), that adds 2^-9·sqrt(Σp²)·1.2, 4e-4 at S=256. PyTorch before 2.0
// rounds scores s as well, by up to 2^-9·|s|: of these inputs that alone moves outputs by
// 5.3e-4 (standard deviation in float64 at S=1024; by the root of the keys more at fewer), of which scores has five.
export const tolerances = { f32: [5e-5, 0], f16: [1e-4, 2 ** -10], bf16: [8e-4, 2 ** -7], scores: [2.7e-3, 2 ** -7] };

/** differs describes the difference of two samples over a number of keys; "" when they agree. */
export function differs(got, want, dtype = "f32", keys = 1024) {
  const [many, relative] = tolerances[dtype];
  const absolute = dtype === "scores" ? many * Math.sqrt(Math.max(1, 1024 / keys)) : many;
  if (got?.length !== want.length) return "no sample";
  for (let i = 0; i < want.length; i++) {
    if (!(Math.abs(got[i] - want[i]) <= absolute + relative * Math.abs(want[i]))) return `element ${i} is ${got[i]}, attn has ${want[i]}`;
  }
  return "";
}

/**
 * measure runs a case on all peers in turns and returns a result for each, in their
 * order: {gflops, percent, extra} as medians, of the FMA peak at each turn, or
 * {error}. The first peer is attn, which measures the peak. Each is run for settle
 * seconds before, until clocks have settled.
 */
export async function measure(c, peers, repetitions, settle = 0) {
  const [attn] = peers;
  const results = [];
  for (const p of peers) {
    const r = { gflops: [], percent: [] };
    results.push(r);
    const loaded = await p.child.ask({ do: "load", case: c });
    r.error = loaded.error || (p === attn ? "" : differs(loaded.sample, results[0].sample ?? [], c.low ? "scores" : c.dtype, c.keys ?? c.seq));
    if (r.error) continue;
    Object.assign(r, { extra: loaded.extra ?? null, sample: loaded.sample });
    const warm = await p.child.ask({ do: "run", calls: 2 });
    r.error = warm.error;
    if (r.error) continue;
    const each = Math.max(Math.min(...warm.seconds), 1e-6);
    if (settle > 2 * each) r.error = (await p.child.ask({ do: "run", calls: Math.ceil(settle / each) })).error;
    r.calls = Math.min(Math.max(Math.ceil(turnSeconds / each), 1), maxCalls);
  }
  const begin = Date.now();
  for (let n = 0; n < repetitions && (n < leastTurns || Date.now() - begin < caseSeconds * 1e3); n++) {
    for (let i = 0; i < peers.length; i++) {
      // Each round starts with another peer.
      const at = (n + i) % peers.length, p = peers[at], r = results[at];
      if (r.error) continue;
      const peak = await attn.child.ask({ do: "peak" });
      const run = await p.child.ask({ do: "run", calls: r.calls });
      if ((r.error = peak.error || run.error)) continue;
      const rate = flops(c) / median(run.seconds);
      r.gflops.push(rate / 1e9);
      r.percent.push((100 * rate) / peak.flops);
    }
  }
  return results.map((r) => (r.error ? { error: r.error } : { gflops: median(r.gflops), percent: median(r.percent), extra: r.extra }));
}

const mib = (bytes) => (bytes === null ? "-" : `${(bytes / 2 ** 20).toFixed(bytes < 10 * 2 ** 20 ? 1 : 0)}`);

/** speedTable writes GFLOP/s and percent of the peak, a row for each case. */
export function speedTable(peers, rows) {
  const lines = [
    ["GFLOP/s (% of the FMA peak)", ...peers, "attn / best"],
    ["---", ...peers.map(() => "---"), "---"],
    ...rows.map(({ name, results }) => {
      const [attn, ...others] = results.map((r) => r?.gflops ?? 0);
      const best = Math.max(...others);
      return [name, ...results.map(cell), attn && best > 0 ? `${(attn / best).toFixed(2)}x` : "-"];
    }),
  ];
  return lines.map((l) => `| ${l.join(" | ")} |\n`).join("");
}

function cell(r) {
  if (!r) return "-";
  return r.error ? "error" : `${r.gflops.toFixed(r.gflops < 10 ? 1 : 0)} (${r.percent.toFixed(0)})`;
}

/** memoryTable writes the memory of a first call in addition to inputs and outputs. */
export function memoryTable(peers, rows) {
  const lines = [
    ["extra memory of a call, MiB", ...peers],
    ["---", ...peers.map(() => "---")],
    ...rows.map(({ name, results }) => [name, ...results.map((r) => (!r || r.error ? "-" : mib(r.extra)))]),
  ];
  return lines.map((l) => `| ${l.join(" | ")} |\n`).join("");
}
