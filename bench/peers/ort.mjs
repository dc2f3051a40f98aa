// Serves one of ONNX Runtime's attention operators: node ort.mjs OPERATOR THREADS

import { InferenceSession, Tensor } from "onnxruntime-node";
import { model, operators } from "./onnx.mjs";
import { operand, sampled } from "./inputs.mjs";
import { extraMemory, serve } from "./serve.mjs";

const [operator, threads] = process.argv.slice(2);
let session, feeds, fetches;

await serve({
  async load({ case: c }) {
    await session?.release();
    const spec = operators[operator](c);
    session = await InferenceSession.create(model(spec), {
      executionProviders: ["cpu"], intraOpNumThreads: Number(threads), interOpNumThreads: 1,
      graphOptimizationLevel: "all", logSeverityLevel: 3,
    });
    feeds = {};
    ["q", "k", "v"].forEach((name, i) => {
      feeds[name] = new Tensor("float32", operand(c, i, spec.layout), spec.inputs[i][2]);
    });
    if (operator === "GroupQueryAttention") {
      feeds.last = new Tensor("int32", Int32Array.of(c.seq - 1), [1]);
      feeds.total = new Tensor("int32", Int32Array.of(c.seq), [1]);
    }
    // Preallocated outputs, touched once, so that calls do not allocate pages.
    fetches = {};
    for (const [name, , shape] of spec.outputs) {
      fetches[name] = new Tensor("float32", new Float32Array(shape.reduce((a, b) => a * b)).fill(1), shape);
    }
    const extra = await extraMemory(() => session.run(feeds, fetches));
    return { extra, sample: sampled(c, fetches.o.data, spec.layout) };
  },
  async run({ calls }) {
    const seconds = [];
    for (let i = 0; i < calls; i++) {
      const begin = performance.now();
      await session.run(feeds, fetches);
      seconds.push((performance.now() - begin) / 1e3);
    }
    return { seconds };
  },
});
