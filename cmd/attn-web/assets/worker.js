"use strict";
// Runs the program in a worker: a call never blocks the page. Messages are JSON texts.
importScripts("wasm_exec.js");

// load passes the bytes of a file beside the page, or a problem, to the program.
async function load(name, done) {
  try {
    const response = await fetch(name);
    if (!response.ok) throw new Error(response.status + " " + response.statusText);
    done(new Uint8Array(await response.arrayBuffer()), "");
  } catch (e) {
    done(null, e.message);
  }
}

(async () => {
  const go = new Go();
  go.env = {GOMEMLIMIT: "3GiB"}; // of the 4 GiB of wasm; tensors beyond it are refused with an error
  const fail = text => postMessage(JSON.stringify({type: "failed", text}));
  try {
    const response = await fetch("attn.wasm");
    if (!response.ok) throw new Error("attn.wasm: " + response.status + " " + response.statusText);
    // Some static hosts do not know the type of wasm, which streaming requires.
    const {instance} = response.headers.get("Content-Type") === "application/wasm"
      ? await WebAssembly.instantiateStreaming(response, go.importObject)
      : await WebAssembly.instantiate(await response.arrayBuffer(), go.importObject);
    await go.run(instance);
    fail("The program ended. Its memory may be full: reload the page and choose shorter lengths.");
  } catch (e) {
    fail("The program failed: " + e.message);
  }
})();
