"use strict";
// Runs ONNX Runtime Web, which lies in ort/, in a worker: page.js asks for a turn in a case, and the
// answer is the result of the case so far.

let peer;

async function open(powerPreference) {
  const {changeAdapters, ortPeer, Peer} = await import("./ort/ortweb.mjs");
  changeAdapters(adapter => adapter.info?.subgroupMinSize <= 4, {powerPreference});
  const ort = await import("./ort/ort.webgpu.bundle.min.mjs");
  ort.env.wasm.numThreads = 1;
  return new Peer(operator => ortPeer(ort, operator));
}

onmessage = async ({data}) => {
  try {
    peer ??= await open(data.powerPreference);
    if (data.first) await peer.load(data.case);
    await peer.turn();
    postMessage(peer.result());
  } catch (e) {
    postMessage({failed: e.message});
  }
};
