// node compile.mjs DIR: compiles every .wgsl file of a folder with Tint, the compiler of Chrome,
// Edge and Dawn. It prints a line for each error and warning:
//
//   flash-064-L-f32-2048.wgsl:12:34: error: unresolved call target 'f'
//
// and the number of files last. The exit status is 1 after a message, 2 without Tint. The npm
// package webgpu contains Tint; its null backend needs no GPU and no driver.
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";

const fail = (why) => {
  console.error(why);
  process.exit(2);
};
const { create, globals } = await import("webgpu").catch((e) => fail(`npm package webgpu: ${e.message}`));
Object.assign(globalThis, globals);
globalThis.gpu = create(["backend=null", "enable-dawn-features=allow_unsafe_apis"]); // a device does not keep it from being collected
const adapter = await gpu.requestAdapter();
if (!adapter) fail("npm package webgpu: no null adapter");
// Modules may enable what the adapter has.
const requiredFeatures = ["shader-f16", "subgroups", "chromium-experimental-subgroup-matrix"].filter((f) => adapter.features.has(f));
const device = await adapter.requestDevice({ requiredFeatures });

const [dir] = process.argv.slice(2);
if (!dir) fail("usage: node compile.mjs DIR");
const names = readdirSync(dir).filter((n) => n.endsWith(".wgsl"));
for (const name of names) {
  device.pushErrorScope("validation");
  const module = device.createShaderModule({ code: readFileSync(join(dir, name), "utf8") });
  const { messages } = await module.getCompilationInfo();
  const rejected = await device.popErrorScope();
  for (const m of messages) console.log(`${name}:${m.lineNum}:${m.linePos}: ${m.type}: ${m.message.split("\n")[0]}`);
  if (rejected && !messages.length) console.log(`${name}:0:0: error: ${rejected.message.split("\n")[0]}`);
  if (rejected || messages.length) process.exitCode = 1;
}
console.log(`${names.length} files`);
process.exit();
