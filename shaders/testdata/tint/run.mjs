// Runs a Go program for GOOS=js GOARCH=wasm in Node, with Dawn's WebGPU as navigator.gpu: what browsers have, without one.
//
//     GOOS=js GOARCH=wasm go test -exec "node --stack-size=8192 $PWD/shaders/testdata/tint/run.mjs" ./gpu
//
// VK_ICD_FILENAMES chooses the driver, such as SwiftShader's of Debian's package chromium
// (/usr/lib/chromium/vk_swiftshader_icd.json). Dawn refuses the software driver of Debian 12's Mesa.
// Experimental features are there, as behind a browser's flag.
import { execFileSync } from "node:child_process";
import { createRequire } from "node:module";
import { create, globals } from "webgpu";

Object.assign(globalThis, globals);
Object.defineProperty(globalThis, "navigator", { value: { gpu: create(["enable-dawn-features=allow_unsafe_apis"]) }, configurable: true });
const runner = execFileSync("go", ["env", "GOROOT"], { encoding: "utf8" }).trim() + "/lib/wasm/wasm_exec_node.js";
process.argv.splice(1, 1, runner); // the program follows
createRequire(import.meta.url)(runner);
